"""Train by online DPO in rounds: sample k answers from the current policy, score them, train on best against worst.

    trl-ext online-dpo --config demo/online_dpo --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model, a dataset with the column `prompt` and a held-out split (or
`eval_size`), and a reward: `reward_model_name_or_path`, `reward_funcs`, `rewards`, or several. The folder `round-r` of
`output_dir` has the results of round r: the model (with `use_peft`, its adapter is merged), the pairs it was trained
on, and its scores on the held-out prompts (`round.json`); `online_dpo.json` has all rounds. The same command again
resumes, within a round from its newest complete checkpoint; a larger `num_rounds` adds rounds.
"""

import copy
import gc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import HeldOutArguments, ModelArguments, PromptArguments
from trl_ext.runs import Hold, check_output_dir, check_settings, setting, write_text
from trl_ext.upstream import quiet


@dataclass
class OnlineDPOScriptArguments(PromptArguments, HeldOutArguments):
    """Declare the arguments that `DPOConfig` and `ModelConfig` lack: the prompts, the answers and their scores."""

    num_rounds: int = setting(3, "Number of rounds of sampling and training.", range=">= 1")
    prompts_per_round: int = setting(512, "Number of prompts that are answered in a round.", range=">= 1")
    num_samples: int = setting(4, "Number k of answers to each prompt.", range=">= 2")
    max_completion_length: int = setting(256, "Tokens after which an answer is cut off.", range=">= 1")
    temperature: float = setting(1.0, "Temperature of sampling.", range="> 0, since equal answers make no pair")
    reward_weights: list[float] | None = setting(
        None, "Weight of each reward; 1 if unset. A reward with weight 0 is only reported."
    )
    watch: Literal["warn", "stop", "off"] = setting(
        "warn", "What `HackWatch` does on an alert: `stop` starts no further round."
    )
    keep_reference: bool = setting(
        False, "Keep the first policy as the reference in all rounds, instead of the policy that a round starts from."
    )

    def __post_init__(self):
        super().__post_init__()
        check_settings(self)


def answer(
    model: Any, tokenizer: Any, rows: list[dict], number: int, ends: list[int], script_args: Any, batch: int
) -> list[dict]:
    """
    Sample `number` answers to each row in succession; an answer ends at a token id in `ends`, or at the length limit.
    `batch` answers are sampled at once. The rows are those of [`~trl_ext.models.answer_rows`].
    """
    from trl_ext.models import answer_rows, prompt_token_ids, sample

    prompts = [row["prompt"] for row in rows for _ in range(number)]
    prompt_ids = prompt_token_ids(tokenizer, prompts)
    answers = sample(
        model,
        prompt_ids,
        ends,
        max_new_tokens=script_args.max_completion_length,
        temperature=script_args.temperature,
        batch_size=batch,
    )
    return answer_rows(tokenizer, prompts, prompt_ids, answers, ends)


def score(rewards: list[Any], rows: list[dict], answers: list[dict], batch: int) -> list[list[float | None]]:
    """
    Return for each answer its score by each reward, a `Member`; all rows have equally many answers, in succession.
    `batch` answers are scored in one call. A score is NaN where the reward failed and was skipped.
    """
    rows = [row for row in rows for _ in range(len(answers) // len(rows))]
    scores: list[list[float | None]] = []
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        columns = {name: [row[name] for row in rows[part]] for name in rows[0] if name != "prompt"}
        given = {
            "prompts": [row["prompt"] for row in rows[part]],
            "completions": [a["completion"] for a in answers[part]],
            "completion_ids": [a["completion_ids"] for a in answers[part]],
            "prompt_ids": [a["prompt_ids"] for a in answers[part]],
            "finished": [a["finished"] for a in answers[part]],
        }
        scores += zip(*(reward.scores_or_nan(**given, **columns) for reward in rewards), strict=True)
    return [list(row) for row in scores]


def total(scores: list[float | None], weights: list[float]) -> float | None:
    """
    Return the weighted sum of an answer's scores that are not None and have a weight other than 0; None without any,
    or if one of them is NaN.
    """
    applying = [w * s for w, s in zip(weights, scores, strict=True) if s is not None and w != 0]
    return sum(applying) if applying and not any(map(math.isnan, applying)) else None


def best_and_worst(rows: list[dict], answers: list[dict], totals: list[float | None]) -> list[dict]:
    """
    Return for each prompt a pair of its best and its worst non-empty answer by `totals`, the answers' scores, except
    where the two scores or texts are equal. Its keys are `prompt`, `chosen`, `rejected` and `score_chosen`,
    `score_rejected`.
    """
    from trl_ext.rewards import text_of

    pairs = []
    k = len(answers) // len(rows)
    for i, row in enumerate(rows):
        scored = [(t, a) for t, a in zip(totals[i * k : i * k + k], answers[i * k : i * k + k], strict=True)]
        scored = [(t, a) for t, a in scored if t is not None and text_of(a["completion"]).strip()]
        if not scored:
            continue
        (high, best), (low, worst) = (pick(scored, key=lambda item: item[0]) for pick in (max, min))
        if high > low and best["completion"] != worst["completion"]:
            pair = {"prompt": row["prompt"], "chosen": best["completion"], "rejected": worst["completion"]}
            pairs.append({**pair, "score_chosen": high, "score_rejected": low})
    return pairs


def in_words(facts: dict) -> str:
    """Return a text with a round's mean scores, their intervals and the mean length."""
    shown = [
        f"{name} {mean:.3f} ({low:.3f} to {high:.3f})"
        for (name, mean), (low, high) in zip(facts["held_out"].items(), facts["intervals"].values(), strict=True)
    ]
    return ", ".join([*shown, f"length {facts['length']:.1f} tokens"])


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (OnlineDPOScriptArguments, "trl_ext.DPOConfig", ModelArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if training_args.eval_strategy != "no" or training_args.push_to_hub:
        parser.error(
            "remove `eval_strategy` and `push_to_hub`: each round is evaluated at its end, and nothing is uploaded"
        )
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir)

    # These take seconds to import: what was mistyped has been refused by now
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import get_peft_config

    from trl_ext import DPOTrainer, load_dataset_split
    from trl_ext.callbacks import watch_rounds
    from trl_ext.data import check_texts, held_out_rows
    from trl_ext.evaluation import bootstrap_interval
    from trl_ext.models import eos_token_ids, is_adapter, load_merged, load_tokenizer
    from trl_ext.rewards import Member, ModelReward, RewardFailed, distinct
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume, differences, fingerprint
    from trl_ext.workbench import next_answer, next_line, report_of

    processes = PartialState()
    output_dir = Path(training_args.output_dir)
    with parser.one_line_errors():
        in_use = Hold(output_dir)

    def write(path: Path, text: str) -> None:
        """Write a file on the main process; the other processes wait."""
        if processes.is_main_process:
            write_text(path, text)
        processes.wait_for_everyone()

    size = training_args.per_device_eval_batch_size  # answers are sampled and scored in such batches

    # 2. Data and rewards
    def rows_of(split: str) -> Any:
        dataset = load_dataset_split(script_args.dataset_name, split, config=script_args.dataset_config)
        check_texts(dataset, ("prompt",), f"the split {split!r}", may_be_empty=False)
        return dataset

    start = model_args.model_name_or_path
    tokenizer_kwargs = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
    with parser.one_line_errors(), parser.one_line_errors(RewardFailed):
        train, held_out = held_out_rows(
            rows_of(script_args.dataset_train_split),
            lambda: rows_of(script_args.dataset_test_split),
            script_args.eval_size,
            training_args.seed,
        )
        if held_out is None:
            parser.error("`eval_size` must be at least 1: each round is measured on held-out prompts")
        tokenizer = load_tokenizer(start, **tokenizer_kwargs)
        ends = eos_token_ids(start, tokenizer, revision=model_args.model_revision)
        model = None
        if path := script_args.reward_model_name_or_path:
            reads = {"policy_tokenizer": tokenizer, "eos_token_ids": ends}
            model = ModelReward(path, batch_size=size, device=training_args.device, **reads)
        rewards, reward_weights = script_args.load_rewards(tokenizer, script_args.reward_weights, model)
        members = [Member(reward) for reward in rewards]
        names = distinct([member.name for member in members])
    settings = {**vars(script_args), **vars(model_args), "per_device_eval_batch_size": size}
    for name in ("num_rounds", "watch"):  # more rounds go on, and a watch changes no weight
        del settings[name]
    settings = fingerprint(training_args, **settings, rows=[len(train), len(held_out)])
    begun = output_dir / "online_dpo_settings.json"
    before = json.loads(begun.read_text()) if begun.is_file() else settings
    if before["model_name_or_path"] != start:
        parser.error(f"{output_dir} was started from {before['model_name_or_path']}: choose another `output_dir`")
    if different := differences(before, settings):
        processes.print(
            f"Warning: {output_dir} was started with other settings: {'; '.join(different)}. From here on the new "
            "settings are used."
        )
    held_out = held_out.to_list()
    weights = reward_weights or [1.0] * len(rewards)

    # 3. Rounds
    kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),
    }

    def load_policy(path: str | Path) -> Any:
        revision = {"revision": model_args.model_revision} if path == start else {}
        with parser.one_line_errors():
            load = load_merged if is_adapter(str(path), **revision) else AutoModelForCausalLM.from_pretrained
            return load(path, **kwargs, **revision)

    def sampled(path: str | Path, rows: list[dict], number: int, seed: int) -> tuple[list, list, list]:
        """Have a policy answer the rows, a part on each process; return rows, answers and scores of all processes."""
        policy = load_policy(path).to(training_args.device).eval()
        mine = rows[processes.process_index :: processes.num_processes]
        torch.manual_seed(seed * processes.num_processes + processes.process_index)
        answers = answer(policy, tokenizer, mine, number, ends, script_args, size) if mine else []
        with parser.one_line_errors(RewardFailed):
            scores = score(members, mine, answers, size) if mine else []
        return tuple(gather_object(part) for part in (mine, answers, scores))  # type: ignore[return-value]

    history: list[dict] = []

    def measure(path: str | Path, folder: Path, round_number: int, facts: dict) -> dict:
        if not (folder / "round.json").is_file():
            asked, answers, scores = sampled(path, held_out, 1, training_args.seed)
            means, intervals = {}, {}  # 95 %, over the prompts
            for name, column in zip(names, zip(*scores, strict=True), strict=True):
                applying = torch.tensor([value for value in column if value is not None], dtype=torch.double)
                applying = applying[~applying.isnan()]
                if len(applying):
                    means[name] = applying.mean().item()
                    intervals[name] = bootstrap_interval(applying)
            length = sum(len(a["completion_ids"]) for a in answers) / len(answers)
            facts["answers"] = {
                "prompts": [row["prompt"] for row in asked],
                "completions": [each["completion"] for each in answers],
                "scores": [total(row, weights) for row in scores],
            }
            if script_args.watch != "off":
                measured = [each["answers"] for each in (*history, facts) if "scores" in each.get("answers", ())]
                facts["risk"], facts["alert"], facts["paid"] = watch_rounds(measured)
            if processes.is_main_process:  # written last: the round is complete
                facts = {"round": round_number, **facts, "held_out": means, "intervals": intervals, "length": length}
            write(folder / "round.json", json.dumps(facts, indent=2))
        return json.loads((folder / "round.json").read_text())

    write(begun, json.dumps(settings, indent=2))
    policy: str | Path = start
    history.append(measure(policy, output_dir / "round-0", 0, {}))
    processes.print(f"Before training, on {len(held_out)} held-out prompts: {in_words(history[0])}")
    for number in range(1, script_args.num_rounds + 1):
        folder = output_dir / f"round-{number}"
        if not (folder / "round.json").is_file():
            if script_args.watch == "stop" and any(each.get("alert") for each in history):
                processes.print(f"Stopped before round {number} by HackWatch: set `--watch warn` to continue.")
                break
            if not (folder / "pairs.jsonl").is_file():
                order = torch.randperm(len(train), generator=torch.Generator().manual_seed(training_args.seed))
                first = (number - 1) * script_args.prompts_per_round
                places = [int(order[(first + i) % len(train)]) for i in range(script_args.prompts_per_round)]
                rows, answers, scores = sampled(
                    policy, train.select(places).to_list(), script_args.num_samples, training_args.seed + 1000 * number
                )
                pairs = best_and_worst(rows, answers, [total(row, weights) for row in scores])
                if not pairs:
                    parser.error(
                        f"in round {number} no prompt has two answers with different scores: check the rewards"
                    )
                write(folder / "pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
            pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
            # 4. Train
            args = copy.copy(training_args)
            peft_config = get_peft_config(model_args)
            args.output_dir = str(folder)
            whole = (
                peft_config is None or script_args.keep_reference
            )  # else the reference is the model without adapter
            with parser.one_line_errors():
                trainer = DPOTrainer(
                    model=load_policy(policy),
                    ref_model=load_policy(start if script_args.keep_reference else policy) if whole else None,
                    args=args,
                    train_dataset=Dataset.from_list(pairs),
                    processing_class=tokenizer,
                    peft_config=peft_config,
                )
            with parser.one_line_errors(CannotResume, NotSaved):
                result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(args))
            # 5. Save: the model first, since a disk may be full
            if peft_config is None:
                trainer.save_model()
            elif processes.is_main_process:  # the next round begins with a whole model
                trainer.accelerator.unwrap_model(trainer.model).merge_and_unload().save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            processes.wait_for_everyone()
            processes.print(report_of(folder, bool(result.metrics), args.record_run))
            del trainer
            gc.collect()  # the next round needs the room
            facts = {"pairs": len(pairs)}
        else:
            facts = {}
        history.append(measure(folder, folder, number, facts))
        policy = folder
        processes.print(f"Round {number} of {script_args.num_rounds}, held-out: {in_words(history[-1])}")
        for paid in history[-1].get("paid", []):
            processes.print(f"What the reward paid for: {paid['words']}")
        if alert := history[-1].get("alert"):
            processes.print(f"HackWatch, round {number}: {alert['what']}. {alert['advice']}")
    write(output_dir / "online_dpo.json", json.dumps(history, indent=2))
    report = report_of(output_dir, is_recorded=training_args.record_run)
    processes.print(f"Model: {policy}\n{report}{next_line(next_answer(training_args, train, policy))}")
    in_use.release()


if __name__ == "__main__":
    main()
