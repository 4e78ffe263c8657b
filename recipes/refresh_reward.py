"""Keep a reward model up to date: queue the policy's answers for labels, and train the model further on the labels.

    trl-ext refresh-reward --config FILE.yaml

Needed, in the configuration file or as flags: the policy, the reward model, prompts, and another `output_dir` for each
round. The first call writes the queue, `queue.jsonl` and files for Label Studio and Argilla. In it are the answers
with the highest scores, those on which an ensemble disagrees most, and some at random, each beside another answer to
its prompt. A call with `labels` (files of people's choices) or `judge` (a reward function that decides) makes pairs.
If it also has `reward_config` and `reward_dataset_name`, it trains the reward model further, on these pairs and a
share of old ones, and compares the old and the new model. The same command again does the steps that are left.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import functools
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from trl_ext import StrictTrlParser, load_dataset_split
from trl_ext.cli.parser import entry_of
from trl_ext.data import TrainedPairs, check_texts, has_content, pair_hashes, write_rows
from trl_ext.evaluation import reward_model_report
from trl_ext.functional import disagreement
from trl_ext.rewards import ModelReward, RewardFailed, load_rewards
from trl_ext.runs import Hold, check_output_dir, check_settings, differences, read_jsonl, setting, write_text
from trl_ext.upstream import quiet
from trl_ext.workbench import next_line, objections
from trl_ext.workbench.labels import Columns, majority_pairs, read_labels
from trl_ext.workbench.labels.labelling import (
    LABEL_STUDIO_CONFIG,
    answer_key,
    answers_to_label,
    argilla_records,
    as_text,
    label_studio_tasks,
    read_choices,
)
from trl_ext.workbench.pages.markup import render, with_interval

from . import generate, reward

TEXTS = ("prompt", "response_a", "response_b")
CHOSEN = ("chosen", "rejected")
PAIR = ("prompt", *CHOSEN)
SPLITS = ("train", "test")
# What the result of each step depends on
QUEUE = "model_name_or_path against_model_name_or_path reward_model_name_or_path dataset_name dataset_config earlier "
QUEUE += "dataset_split num_prompts num_samples max_new_tokens temperature batch_size queue_size shares seed"
PAIRS = "judge confidence_bound held_out_share seed"
TRAIN = "old_share seed demonstrations_name reward_dataset_name reward_config"


@dataclass
class RefreshArguments:
    """Declare the arguments: the policy whose answers are queued, who labels them, and the reward model to train."""

    model_name_or_path: str = field(metadata={"help": "Policy whose answers are queued: a folder or a hub name."})
    reward_model_name_or_path: str = field(
        metadata={"help": "Reward model that the policy was trained with, or the folder of an ensemble."}
    )
    dataset_name: str = field(metadata={"help": "Prompts: a hub name, a .jsonl file or a folder."})
    output_dir: str = field(metadata={"help": "Folder of this round."})
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str = setting("train", "Split of the prompts.")
    against_model_name_or_path: str | None = setting(
        None, "Model whose answers are compared with the policy's; if unset, other answers of the policy."
    )
    earlier: list[str] | None = setting(
        None, "`output_dir` of each earlier round: its queued answers are not queued again, its pairs are reused."
    )
    num_prompts: int = setting(512, "Number of prompts that are answered.", range=">= 1")
    num_samples: int = setting(2, "Number of the policy's answers to each prompt.", range=">= 1")
    max_new_tokens: int | None = setting(
        None, "Tokens after which an answer is cut off; if unset, the default of `trl-ext generate`."
    )
    temperature: float = setting(1.0, "Temperature of sampling.", range="> 0, since equal answers make no pair")
    batch_size: int = setting(16, "Number of prompts in one batch.", range=">= 1")
    queue_size: int = setting(200, "Number of pairs of answers to label.", range=">= 1")
    score_share: float = setting(0.4, "Share of the queue for the answers with the highest scores.", range="in [0, 1]")
    disagreement_share: float = setting(
        0.3,
        "Share of the queue for answers on which an ensemble disagrees most; without one, other reasons get it.",
        range="in [0, 1]",
    )
    random_share: float = setting(0.3, "Share of the queue for random answers.", range="in [0, 1]")
    labels: list[str] | None = setting(
        None, "Files of people's choices, written by hand or exported by a labelling tool: see docs/refresh.md."
    )
    judge: str | None = setting(
        None, "Reward that chooses the better answer: `path/to/file.py:function` or `{JudgeReward: {url: …, …}}`."
    )
    confidence_bound: float = setting(
        0.6, "Least share of an item's labels that its winner must have.", range="in [0.5, 1]"
    )
    held_out_share: float = setting(0.2, "Share of prompts whose pairs are held out to measure on.", range="in (0, 1)")
    reward_dataset_name: str | None = setting(None, "Pairs that the reward model was trained on, with a split `test`.")
    old_share: float = setting(0.5, "Share of old pairs among the training pairs.", range="in [0, 1)")
    reward_config: str | None = setting(
        None, "Configuration of `trl-ext reward` for training the reward model further."
    )
    demonstrations_name: str | None = setting(
        None, "Demonstrations; the new model's scores are shifted so that demonstrations score 0 on average."
    )
    seed: int = setting(0, "Seed of prompts, answers, queue and training.")
    use_cpu: bool = setting(False, "Do not use a GPU, even if there is one.")

    def __post_init__(self):
        check_settings(self)
        if self.labels and self.judge:
            raise ValueError(
                "`labels` and `judge` are both given: remove one, or write the judge's choices into a file"
            )
        if not any(self.shares.values()):
            raise ValueError("All shares of the queue are 0: raise `score_share` or `random_share`.")

    @property
    def shares(self) -> dict[str, float]:
        return {"score": self.score_share, "disagreement": self.disagreement_share, "random": self.random_share}


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    parser = StrictTrlParser(RefreshArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        for name in args.earlier or []:
            if not Path(name, "queue.jsonl").is_file():
                raise FileNotFoundError(f"`earlier` {name} holds no queue.jsonl: give the `output_dir` of a round")
        check_output_dir(args.output_dir)
    folder = Path(args.output_dir)
    with parser.one_line_errors(), parser.one_line_errors(RewardFailed), Hold(folder):
        # 2. The queue
        result = folder / "queue.jsonl"
        once(args, "queue", QUEUE, result, make_queue)
        queue = read_rows(result)
        print(f"Queue: {result}, {len(queue)} pairs of answers: {in_words(queue, 'why')}")
        if not (args.labels or args.judge):
            print(
                f"Next: label the pairs, with {folder / 'label_studio.json'} (interface: label_studio.xml) or "
                "argilla.jsonl, and run the same command with --labels FILE; or run it with --judge REWARD"
            )
            return
        # 3. Labels and pairs
        result = folder / "pairs" / "train.jsonl"
        once(args, "pairs", PAIRS, result, partial(make_pairs, queue=queue))
        made = json.loads((folder / "pairs.json").read_text())
        print(f"Pairs: {folder / 'pairs'}, {made['train']} to train on, {made['test']} held out; {made['said']}")
        if not args.reward_config:
            print("Next: run the same command with --reward_config FILE and --reward_dataset_name OLD_PAIRS")
            return
        # 4. Train
        result = folder / "reward" / "refreshed.json"
        once(args, "train", TRAIN, result, train)
        # 5. Old and new side by side
        if not (folder / "refresh.json").is_file():
            compare(args)
    print(summary(json.loads((folder / "refresh.json").read_text())))
    for said in objections([str(folder / "reward")]):
        print(f"Warning: {said}")
    print(f"Reward model: {folder / 'reward'}\nReport: {folder / 'refresh.html'}{next_line(next_ppo(args))}")


# ---- Each step once ----


def once(
    args: RefreshArguments, step: str, names: str, result: Path, make: Callable[[RefreshArguments], None]
) -> None:
    """
    Do a step, unless `result`, the file that it writes last, exists.

    Raises:
        ValueError: the step was done, or begun, with other values of the settings that `names` lists, separated by
            spaces, or with other labels, or on another queue or pairs.
    """
    folder = Path(args.output_dir)
    file = folder / f"{step}_settings.json"
    read = {"pairs": [folder / "queue.jsonl", *(args.labels or [])], "train": [folder / "pairs" / "train.jsonl"]}
    settings = {name: getattr(args, name) for name in names.split()}
    settings["files"] = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in read.get(step, [])]
    before = json.loads(file.read_text()) if file.is_file() else settings
    if different := differences(before, settings):
        raise ValueError(
            f"{args.output_dir} was started with other settings ({'; '.join(different)}): choose another "
            f"`output_dir`, or delete {file} and {result.parent if step == 'train' else result}"
        )
    if not result.is_file():
        write_text(file, json.dumps(settings, indent=2))
        make(args)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(path))


def in_words(rows: list[dict], column: str) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(Counter(row[column] for row in rows).items()))


def members_of(name: str) -> list[str]:
    """Return the folders of an ensemble's members; for any other model, its own folder or name."""
    file = Path(name, "ensemble.json")
    members = json.loads(file.read_text())["members"] if file.is_file() else []
    return [str(Path(name, member["folder"])) for member in members] or [name]


# ---- The queue ----


def make_queue(args: RefreshArguments) -> None:
    """
    Sample answers, score them, and choose which are queued; `queue.jsonl` is written last. Raise a `ValueError` if no
    prompt has two different answers that were not queued before.
    """
    folder = Path(args.output_dir)
    other = args.against_model_name_or_path
    dataset = load_dataset_split(args.dataset_name, args.dataset_split, config=args.dataset_config)
    check_texts(dataset, ("prompt",), f"dataset {args.dataset_name!r}", may_be_empty=False)
    draws = {answer_key(prompt, "asked", seed_of(args)): row for row, prompt in enumerate(dataset["prompt"])}
    prompts = dataset.select([draws[draw] for draw in sorted(draws)[: args.num_prompts]]).to_list()
    answers = answers_of(args, args.model_name_or_path, "policy", prompts * args.num_samples)
    own = len(answers)
    rows = with_scores(args, answers + (answers_of(args, other, "against", prompts) if other else []))
    policy = rows[:own]
    against = rows[own:] or rows
    earlier = [row for name in args.earlier or [] for row in read_rows(Path(name, "queue.jsonl"))]
    spent = {answer_key(row["prompt"], row[name]) for row in earlier for name in TEXTS[1:]}

    def draw(row: dict) -> str:
        return answer_key(row["prompt"], row["completion"], args.seed)

    def is_new(row: dict) -> bool:
        return has_content(row["completion"]) and answer_key(row["prompt"], row["completion"]) not in spent

    partners: dict[str, list[dict]] = {}
    for row in sorted(filter(is_new, against), key=draw):
        partners.setdefault(answer_key(row["prompt"], None), []).append(row)
    pairs = [
        (row, next((each for each in partners.get(name, []) if each["completion"] != row["completion"]), None))
        for row in filter(is_new, policy)
        if (name := answer_key(row["prompt"], None))
    ]
    pairs = [pair for pair in pairs if pair[1]]
    if not pairs:
        raise ValueError(
            "no prompt has two different answers that were not queued before: raise `num_prompts` or `num_samples`"
        )
    chosen = answers_to_label(
        [row["prompt"] for row, _ in pairs],
        [row["completion"] for row, _ in pairs],
        [row["score"] for row, _ in pairs],
        None if pairs[0][0]["disagreement"] is None else [row["disagreement"] for row, _ in pairs],
        args.queue_size,
        args.shares,
        args.seed,
    )
    rows = [queued(*pairs[place], why, args) for place, why in chosen.items()]
    write_text(folder / "label_studio.xml", LABEL_STUDIO_CONFIG)
    tasks = [json.dumps(task, ensure_ascii=False) for task in label_studio_tasks(rows)]
    write_text(folder / "label_studio.json", "[\n" + ",\n".join(tasks) + "\n]\n")  # its upload reads no lines
    write_rows(folder / "argilla.jsonl", argilla_records(rows))
    write_rows(folder / "queue.jsonl", rows)


def queued(row: dict, other: Any, why: str, args: RefreshArguments) -> dict[str, Any]:
    """
    Make a row of the queue. Its two answers are in random order; `picked` says which one was chosen for the queue.
    """
    item = answer_key(row["prompt"], [row["completion"], other["completion"]])
    picked = "ab"[int(answer_key(item, None, args.seed), 16) % 2]
    sides = {picked: row, "ab".replace(picked, ""): other}
    of_answers = {"completion": "response", **{name: name for name in ("score", "disagreement", "finished", "policy")}}
    return {
        **{name: value for name, value in row.items() if name not in of_answers},
        "item": item,
        **{f"{said}_{side}": sides[side][name] for name, said in of_answers.items() for side in "ab"},
        "picked": picked,
        "why": why,
        "round": number_of(args),
    }


def rounds(args: RefreshArguments) -> list[str]:
    """Return the folders of all rounds of refreshing, the present round last."""
    return [*(args.earlier or []), args.output_dir]


def number_of(args: RefreshArguments) -> int:
    """Return the number of this round, from 1."""
    return len(rounds(args))


def seed_of(args: RefreshArguments) -> int:
    """Return this round's seed, which differs from those of all other rounds."""
    return args.seed + 1000 * number_of(args)


def answers_of(args: RefreshArguments, model: str, name: str, prompts: list[dict]) -> list[dict]:
    """
    Return the rows of `prompts`, each with a model's answer: `completion`, `finished`, and `policy`, the model's name.
    `trl-ext generate` makes the answers if their file, `answers/NAME-answers.jsonl`, does not exist.
    """
    asked, said = (Path(args.output_dir, "answers", f"{name}-{what}.jsonl") for what in ("prompts", "answers"))
    if not said.is_file():
        write_rows(asked, [{"prompt": row["prompt"]} for row in prompts])
        same = ("temperature", "batch_size", "max_new_tokens", "use_cpu")
        flags = {"model_name_or_path": model, "dataset_name": asked, "output_file": said, "seed": seed_of(args)}
        generate.main(words({**flags, **{flag: getattr(args, flag) for flag in same}}))
    return [{**row, **answer, "policy": model} for row, answer in zip(prompts, read_rows(said), strict=True)]


def with_scores(args: RefreshArguments, rows: list[dict]) -> list[dict]:
    """
    Return the answers, each with the mean of the reward models' scores (`score`), and how far these scores disagree
    (`disagreement`, None for a single model).
    """
    scores = scores_by(members_of(args.reward_model_name_or_path), rows, args)
    spread = disagreement(scores).tolist() if len(scores) > 1 else [None] * len(rows)
    return [
        {**row, "score": score, "disagreement": differs}
        for row, score, differs in zip(rows, scores.mean(0).tolist(), spread, strict=True)
    ]


def words(flags: dict[str, Any]) -> list[str]:
    """Return flags as the words of a command line, without flags whose value is None."""
    return [str(word) for flag, value in flags.items() if value is not None for word in (f"--{flag}", value)]


def scores_by(models: list[str], rows: list[dict], args: RefreshArguments) -> torch.Tensor:
    """Return the (M, N) scores of N rows by M models; one model is in memory at a time."""
    texts = [[row[name] for row in rows] for name in ("prompt", "completion")]
    finished = [row.get("finished", True) for row in rows]
    device = "cpu" if args.use_cpu else None
    scores = [ModelReward(model, device=device)(*texts, finished=finished) for model in models]
    return torch.tensor(scores, dtype=torch.double)


# ---- Labels and pairs ----


def make_pairs(args: RefreshArguments, queue: list[dict]) -> None:
    """
    Write `labels.jsonl`, a row for each label, then the pairs made from the labels, `pairs/train.jsonl` last. Raise a
    `ValueError` if there are no labels, or no pairs for one of the two splits.
    """
    folder = Path(args.output_dir)
    choices = judged(args, queue) if args.judge else labelled(args.labels or [], queue)
    by_item = {row["item"]: row for row in queue}
    said = [{**by_item[each["item"]], **each} for each in choices if each["choice"]]
    if not said:
        raise ValueError(
            "there are no labels, since people skipped all items or the judge scored no answer: label items, "
            "or check the judge"
        )
    write_rows(folder / "labels.jsonl", said)
    table = Dataset.from_list(said)
    columns = Columns()
    left_out = {}
    labels = read_labels(table, columns)
    kept = [name for name in table.column_names if name not in (*TEXTS, "annotator", "choice")]
    pairs = [
        {
            **{name: value for name, value in pair.items() if name != "row"},
            "picked_won": pair["chosen"] == by_item[pair["item"]][f"response_{pair['picked']}"],
            "source": "judge" if args.judge else "people",
        }
        for pair in majority_pairs(
            table, labels, columns, confidence_bound=args.confidence_bound, keep_columns=kept, left_out=left_out
        )
    ]
    # By the prompt alone, so that no prompt is trained on in one round and held out in another
    parts: dict[str, list[dict]] = {"train": [], "test": []}
    for pair in pairs:
        is_test = int(answer_key(pair["prompt"], "held out", args.seed), 16) < args.held_out_share * 2**64
        parts["test" if is_test else "train"].append(pair)
    left_out = {reason: number for reason, number in left_out.items() if number}
    if not all(parts.values()):
        raise ValueError(f"{len(pairs)} pairs are too few to train on and to hold some out: label more of the queue")
    facts: dict[str, Any] = {name: len(rows) for name, rows in parts.items()}
    facts |= {"labels": len(said), "items": len({row["item"] for row in said}), "left_out": left_out}
    lost = ", ".join(f"{number} items {reason}" for reason, number in left_out.items() if number) or "none"
    facts["said"] = f"of {facts['labels']} labels of {facts['items']} items; left out: {lost}"
    write_text(folder / "pairs.json", json.dumps(facts, indent=2))
    for name in ("test", "train"):
        write_rows(folder / "pairs" / f"{name}.jsonl", parts[name])


def labelled(files: list[str], queue: list[dict]) -> list[dict]:
    """Read people's choices, as [`read_choices`] does; raise a `ValueError` for an item that is not in the queue."""
    choices = [choice for name in files for choice in read_choices(name)]
    if unknown := {each["item"] for each in choices} - {row["item"] for row in queue}:
        raise ValueError(
            f"{len(unknown)} labelled items are not in this queue, such as {min(unknown)!r}: give the labels of this "
            "round's queue"
        )
    return choices


def judged(args: RefreshArguments, queue: list[dict]) -> list[dict]:
    """
    Return the choices of a reward function in the form of [`read_choices`]. It scores both answers; a judge with
    `compare` compares them.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    ((judge,), _) = load_rewards([entry_of(args.judge)], tokenizer)
    columns = {name: [row[name] for row in queue] for name in queue[0] if name != "prompt"}

    def scored(side: str, **more: Any) -> list[float | None]:
        answers = columns[f"response_{side}"]
        finished = columns[f"finished_{side}"]
        ends = [[tokenizer.eos_token_id] if end else [] for end in finished]
        ids = [tokenizer(as_text(answer))["input_ids"] + end for answer, end in zip(answers, ends, strict=True)]
        given = {"prompts": [row["prompt"] for row in queue], "completions": answers, "completion_ids": ids}
        return judge(**{**columns, **given, **more, "finished": finished})

    if against := getattr(judge, "compare", None):
        second = [sum(judge.scale) / 2] * len(queue)
        first = scored("a", **{against: columns["response_b"]})
    else:
        first = scored("a")
        second = scored("b")
    name = getattr(judge, "__name__", type(judge).__name__)
    decided = [
        None if None in (a, b) else "tie" if a == b else "a" if a > b else "b"
        for a, b in zip(first, second, strict=True)
    ]
    return [{"item": row["item"], "annotator": name, "choice": said} for row, said in zip(queue, decided, strict=True)]


# ---- The reward model ----


def old_pairs(args: RefreshArguments, split: str) -> Dataset:
    return load_dataset_split(args.reward_dataset_name or "", split, columns=PAIR)


def train(args: RefreshArguments) -> None:
    """Mix old and new pairs, and train each model further on them by `trl-ext reward`."""
    folder = Path(args.output_dir)
    (folder / "refresh.json").unlink(missing_ok=True)  # of a model that is no more
    old = {split: old_pairs(args, split).to_list() for split in SPLITS}
    new = {
        split: [row for each in rounds(args) for row in read_rows(Path(each, "pairs", f"{split}.jsonl"))]
        for split in SPLITS
    }
    # Also what earlier rounds held out: with another seed or share they may have held out other prompts
    held_out = {answer_key(row["prompt"], None) for rows in (old, new) for row in rows["test"]}
    new["train"] = [row for row in new["train"] if answer_key(row["prompt"], None) not in held_out]
    wanted = round(len(new["train"]) * args.old_share / (1 - args.old_share))
    replayed = sorted(old["train"], key=lambda row: answer_key(row["chosen"], row["rejected"], seed_of(args)))[:wanted]
    columns = [*PAIR, *(known for known in ("confidence", "weight") if known in old["train"][0])]
    for split, rows in (("train", replayed + new["train"]), ("test", old["test"] + new["test"])):
        write_rows(folder / "training" / f"{split}.jsonl", [{each: row[each] for each in columns} for row in rows])
    models = members_of(args.reward_model_name_or_path)
    for place, model in enumerate(models):
        output = folder / "reward" / (f"member-{place}" if len(models) > 1 else "")
        if reward.is_complete(str(output)):
            continue
        flags = {"config": args.reward_config, "model_name_or_path": model, "dataset_name": folder / "training"}
        flags |= {"output_dir": output, "seed": args.seed + place, "demonstrations_name": args.demonstrations_name}
        flags |= {"use_cpu": "true" if args.use_cpu else None}
        if not any(output.glob("checkpoint-*")):
            flags["resume_from_checkpoint"] = "false"  # what lies there is not a checkpoint to resume from
        reward.main(words(flags))
    if len(models) > 1:
        print(reward.finish_ensemble(folder / "reward", len(models)))
    facts = {"old": len(replayed), "new": len(new["train"]), "rounds": number_of(args)}
    write_text(folder / "reward" / "refreshed.json", json.dumps(facts, indent=2))


def compare(args: RefreshArguments) -> None:
    """Compare the old and the new model on held-out pairs: old pairs, this round's, and earlier rounds'."""
    folder = Path(args.output_dir)
    sets = {"old pairs": old_pairs(args, "test").to_list()}
    if args.earlier:
        sets["earlier rounds"] = [row for each in args.earlier for row in read_rows(Path(each, "pairs", "test.jsonl"))]
    sets["this round"] = read_rows(folder / "pairs" / "test.jsonl")
    models = {"old": args.reward_model_name_or_path, "new": str(folder / "reward")}
    sets, is_held_out, said = held_out_sets(sets, [each for name in models.values() for each in members_of(name)])
    tokenizer = AutoTokenizer.from_pretrained(members_of(models["old"])[0])
    report: dict[str, Any] = {"is_held_out": is_held_out, "said": said}
    report["training"] = json.loads((folder / "reward" / "refreshed.json").read_text())
    answers = [
        {**row, "completion": row[side], "finished": True} for rows in sets.values() for side in CHOSEN for row in rows
    ]
    sizes = [len(rows) for rows in sets.values() for _ in CHOSEN]
    lengths = torch.tensor([len(tokenizer(as_text(row["completion"]))["input_ids"]) for row in answers]).split(sizes)
    for which, model in models.items():
        report[which] = {"model": model}
        scores = scores_by(members_of(model), answers, args).mean(0).split(sizes)
        for name, a, b in zip(sets, range(0, len(sizes), 2), range(1, len(sizes), 2), strict=True):
            report[which][name] = reward_model_report(scores[a], scores[b], lengths[a] - lengths[b])
    pairs = [row for part in SPLITS for row in read_rows(folder / "pairs" / f"{part}.jsonl")]
    report |= {"round": number_of(args), "pairs": json.loads((folder / "pairs.json").read_text()), **outcomes(pairs)}
    title = f"Reward model, refreshed: round {report['round']}"
    write_text(folder / "refresh.html", render("refresh.html.j2", title=title, report=report))
    write_text(folder / "refresh.json", json.dumps(report, indent=2, ensure_ascii=False))


def held_out_sets(sets: dict[str, list[dict]], models: list[str]) -> tuple[dict[str, list[dict]], bool, list[str]]:
    """
    Return three values: the pairs of each set that no model is known to have been trained on; whether all training
    pairs are known, so that these pairs are surely held out; and sentences on this for the report.
    """
    records = [TrainedPairs.load(model) or TrainedPairs(is_complete=False) for model in models]
    trained = functools.reduce(TrainedPairs.__or__, records)
    kept = {}
    said = []
    for name, rows in sets.items():
        seen = trained.has(pair_hashes(Dataset.from_list([{each: row[each] for each in PAIR} for row in rows])))
        kept[name] = [row for row, is_seen in zip(rows, seen, strict=True) if not is_seen]
        if seen.any():
            said.append(f"{seen.sum():,} of {len(rows):,}, {name}, are left out: a model was trained on them.")
    if not trained.is_complete:
        said.append("It is not known which pairs the old model was trained on: some of these may not be held out.")
    return {name: rows for name, rows in kept.items() if rows}, trained.is_complete, said


def outcomes(pairs: list[dict]) -> dict[str, Any]:
    """
    Return how often queued answers won, by the reason for queueing them (`won`), and the ten answers with the highest
    scores among those that lost (`lost`).
    """
    won: dict[str, list[bool]] = {}
    lost = []
    for row in pairs:
        won.setdefault(row["why"], []).append(row["picked_won"])
        if not row["picked_won"]:
            texts = {"prompt": row["prompt"], "answer": row["rejected"], "preferred": row["chosen"]}
            score = row[f"score_{row['picked']}"]
            lost.append({"score": score, **{name: as_text(value) for name, value in texts.items()}})
    shares = {why: {"pairs": len(each), "won": sum(each) / len(each)} for why, each in sorted(won.items())}
    return {"won": shares, "lost": sorted(lost, key=lambda row: -row["score"])[:10]}


def summary(report: dict[str, Any]) -> str:
    """Return a text on the accuracy of both models, with a line for each set of pairs."""
    sets = [(name, old, report["new"][name]) for name, old in report["old"].items() if name != "model"]
    lines = []
    for name, *both in sets:
        old, new = (with_interval(each["accuracy"], each["accuracy_interval"]) for each in both)
        what = "Held-out accuracy" if report.get("is_held_out") else "Accuracy"
        lines.append(f"{what}, {name} ({both[0]['pairs']}): old model {old}, new model {new}")
    return "\n".join([*lines, *(f"Note: {said}" for said in report.get("said", []))])


def next_ppo(args: RefreshArguments) -> str:
    """Return the shell command that continues PPO, from the policy and its critic, with the new reward model."""
    policy = Path(args.model_name_or_path)
    new = Path(args.output_dir, "reward")
    flags: dict[str, Any] = {"model_name_or_path": policy, "dataset_name": args.dataset_name}
    flags |= {"dataset_config": args.dataset_config, "max_completion_length": args.max_new_tokens}
    if args.dataset_split != "train":
        flags["dataset_train_split"] = args.dataset_split
    if (policy / "critic").is_dir():
        flags["value_model_name_or_path"] = policy / "critic"
    if len(members_of(str(new))) > 1:
        flags["rewards"] = f"{{EnsembleReward: {{members: {new}}}}}"
    else:
        flags["reward_model_name_or_path"] = new
    flags["output_dir"] = f"{policy}-refreshed"
    if args.use_cpu:
        flags |= {"use_cpu": "true", "bf16": "false"}
    return shlex.join(["trl-ext", "ppo", *words(flags)])


if __name__ == "__main__":
    main()
