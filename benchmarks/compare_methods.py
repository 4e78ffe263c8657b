"""Compare methods on one task with equally many labels: SFT, best-of-n, DPO, online DPO, PPO, RLAIF and CAI.

    python -m benchmarks.compare_methods --world_seed 8 --seeds 0 1 2 3 4 5 6 7 --tuning_seeds 8

The task is the demo's support desk, where the true quality of an answer, gold, is known. All start from one SFT model.
Each seed draws `labels` pairs of answers, labels, errors, training and answers. People, who are gold with a tenth of
the labels flipped, label all pairs; or a judge of stated error does, whom `trl-ext label` first compares with people
on `known` of them. Where it refuses the judge, nothing is trained. Each method has the same number of trials on the
tuning seeds, and the trial with the highest gold there is run with the other seeds. Policies are measured by `trl-ext
evaluate`. Writes a small JSON a run, `compare_methods.md` and `compare_methods.png`; the same command again makes what
is missing, also with more seeds. Hardware: 1 CPU core, some ten CPU-seconds a run.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import contextlib
import functools
import io
import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from recipes import dpo, reward, sft
from recipes.demo import world
from recipes.demo.measure import BATCH, MAX_NEW_TOKENS
from recipes.demo.stages import (
    HERE,
    DemoArguments,
    _settings,
    _train,
    build,
    online_dpo_stage,
    ppo_stage,
    sft_stage,
    use_one_thread,
)
from trl_ext import StrictTrlParser, load_dataset_split
from trl_ext.data import write_rows
from trl_ext.rewards import ModelReward
from trl_ext.runs import FolderInUse, Hold, differences, read_jsonl, setting, write_text
from trl_ext.workbench.feedback.constitution import main as constitution
from trl_ext.workbench.reports.answers import Sampling, answers_of, margins, policy_figures, scores, win_rate
from trl_ext.workbench.reports.evaluate import EvaluateArguments, run as evaluate

from . import judges

GOLD = "gold_reward"
UNRECORDED = ["--record_run", "false"]
TWO_EPOCHS = ["--record_answers", 0, "--num_train_epochs", 2, "--eval_size", 0]  # of DPO, and of CAI's SFT
REWARD = ["--num_train_epochs", 4, "--probe_rows", 0]
ENSEMBLE = 3  # reward models
ONLINE = ["--record_answers", 0, "--num_rounds", 2, "--prompts_per_round", 192]
ONLINE += ["--dataset_test_split", "test[:32]", "--save_strategy", "no"]
# The demo's settings before it got those that learn sooner
STUDIED = ["--total_episodes", "4096", "--per_device_train_batch_size", "64", "--baseline", "critic"]
STUDIED += ["--learning_rate", "1.5e-4", "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "16"]
PPO = [*STUDIED, "--total_episodes", 640, "--eval_strategy", "no", "--eval_on_start", "false"]
PPO += ["--save_strategy", "no", "--kl_coef", 0.1]
ROUNDS = 2  # of critique and revision
WRITER_ERROR = 0.1  # how often CAI's model sees a principle the wrong way round, and how often its revision breaks it


def further_sft_stage(args: DemoArguments, name: str, demonstrations: Path, options: Sequence = ()) -> Path:
    """Train the policy on more demonstrations; `name` is `sft-` and a suffix."""
    arguments = ["--model_name_or_path", sft_stage(args), "--dataset_name", demonstrations]
    return _train(args, name, sft.main, arguments, options)


def dpo_stage(args: DemoArguments, name: str, start: Path, pairs: Path, options: Sequence = ()) -> Path:
    """Train by DPO on pairs, from the model in `start`, which is the reference; `name` is `dpo-` and a suffix."""
    return _train(args, name, dpo.main, ["--model_name_or_path", start, "--dataset_name", pairs], options)


def noisy_reward_stage(args: DemoArguments, name: str, options: Sequence, rows: Callable[[list], list]) -> Path:
    """
    Train a reward model on the rows that `rows` makes of the training pairs; `name` is `reward-` and a suffix.

    The held-out pairs keep the columns that these rows have.
    """
    world, policy = args.folder / "world", sft_stage(args)
    source, pairs = world / "preferences", args.folder / f"pairs-{name.removeprefix('reward-')}"

    def write(folder: Path) -> None:
        made = rows(list(read_jsonl(source / "train.jsonl")))
        test = [{name: row[name] for name in row if name in made[0]} for row in read_jsonl(source / "test.jsonl")]
        write_rows(folder / "train.jsonl", made)
        write_rows(folder / "test.jsonl", test)

    build(pairs, _settings(args, name, "reward", options), write)
    arguments = ["--model_name_or_path", policy, "--dataset_name", pairs, "--demonstrations_name", world / "sft"]
    return _train(args, name, reward.main, arguments, options)


@dataclass(frozen=True)
class Arm:
    """Describe one method of the comparison: who labels its pairs, and the settings of each trial."""

    kind: str  # "sft", "best_of_n", "dpo", "online_dpo", "ppo", "cai"
    trials: tuple[dict[str, Any], ...] = ({},)
    judge: dict[str, float] | None = None  # errors of `benchmarks.judges`; None if people label
    min_agreement: float = 0.6
    votes: int = 1


RATES = ({"learning_rate": 5e-4}, {"learning_rate": 1e-3})
OF_PPO = ({"learning_rate": 1.5e-4}, {"learning_rate": 5e-4})
NO_GATE = 0.0  # least kappa
FEW = 20  # the least that `trl-ext label` compares with
ERRORS: dict[str, dict[str, float]] = {"error 0 %": {}, "error 10 %": {"error": 0.1}, "error 25 %": {"error": 0.25}}
SLIP = {"slip": 0.25}
PEOPLE = "DPO, β 0.1"  # with the labels of people
ARMS: dict[str, Arm] = {
    "SFT": Arm("sft"),
    "best-of-n": Arm("best_of_n", ({"n": 4}, {"n": 16})),
    PEOPLE: Arm("dpo", RATES),
    "DPO, β tuned": Arm("dpo", ({"beta": 0.03, "learning_rate": 5e-4}, {"beta": 0.3, "learning_rate": 1e-3})),
    "online DPO": Arm("online_dpo", RATES),
    "PPO": Arm("ppo", OF_PPO),
    "PPO, ensemble": Arm("ppo", OF_PPO),
    **{f"RLAIF, {name}, no gate": Arm("dpo", RATES, judge, NO_GATE) for name, judge in ERRORS.items()},
    **{f"RLAIF, {name}, gate": Arm("dpo", RATES, judge) for name, judge in ERRORS.items()},
    "RLAIF, slip 25 %, gate": Arm("dpo", RATES, SLIP),
    "RLAIF, slip 25 %, 9 votes, gate": Arm("dpo", RATES, SLIP, votes=9),
    "CAI": Arm("cai", RATES),
}


@dataclass
class CompareArguments:
    """Declare which methods are compared, on which seeds, and with how many labels."""

    seeds: list[int] = field(
        default_factory=lambda: [*range(8)], metadata={"help": "Seeds of pairs, labels, training, answers."}
    )
    tuning_seeds: list[int] = field(
        default_factory=lambda: [8], metadata={"help": "Seeds on which a trial is chosen; they are not measured."}
    )
    short: bool = setting(False, "Take the same way in minutes, too short to show anything.")
    arms: list[str] = field(default_factory=lambda: list(ARMS), metadata={"help": "What is compared."})
    labels: int = setting(400, "Labels of a seed: pairs that people or a judge label.")
    known: int = setting(120, "How many of these labels are by people, for comparing a judge with them.")
    prompts: int = setting(128, "Held-out prompts on which policies are measured.")
    world_seed: int = setting(0, "Seed of the world and of the SFT model, which all share.")
    output_dir: str = setting("outputs/compare_methods", "Folder of all runs.")

    def __post_init__(self):
        if {*self.seeds} & {*self.tuning_seeds}:  # a trial would be measured where it was chosen
            raise ValueError(f"`seeds` {self.seeds} and `tuning_seeds` {self.tuning_seeds} must have none in common")

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the arguments that the result of each run depends on."""
        names = ("labels", "known", "prompts", "world_seed", "short")
        return {name: getattr(self, name) for name in names}


def in_words(values: Sequence[float]) -> str:
    """Return a mean with its 95 % t-interval over the seeds, as `+0.123 ± 0.045`."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.3f} ± {half:.3f}"


def slug(text: str) -> str:
    """Return a text as a name for a folder."""
    return re.sub(r"[^\w.]+", "-", text.replace("β", "beta")).strip("-")


def flags_of(trial: dict[str, Any]) -> list[Any]:
    return [part for name, value in trial.items() for part in (f"--{name}", value)]


class Draw:
    """Build what the arms of one seed share, each part once: pairs, labels, reward models, revisions."""

    def __init__(self, args: CompareArguments, seed: int):
        self.args, self.seed = args, seed
        self.demo = DemoArguments(args.world_seed, args.output_dir, planted_share=0.0, short=args.short)
        self.world, self.folder = self.demo.folder / "world", self.demo.folder / f"draw-{seed}"
        self.sft = sft_stage(self.demo)
        self.test = load_dataset_split(self.world / "prompts", "test").select(range(args.prompts))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of one of the world's data sets, in this seed's order."""
        rows = load_dataset_split(self.world / name, "train").to_list()
        return random.Random(f"{self.seed} {name}").sample(rows, len(rows))

    def options(self, *options: Any) -> list[Any]:
        """Return a stage's flags with this seed; otherwise the stage would take the world's seed."""
        return [*options, *UNRECORDED, "--seed", self.seed]

    def built(self, name: str, make: Callable[[Path], Any]) -> Path:
        """Return a folder, which `make` fills if it is not there yet."""
        build(self.folder / name, {"seed": self.seed, **self.args.sizes}, make)
        return self.folder / name

    def labels(self) -> Path:
        """Return a folder with pairs, rubric, constitution, and people's choices as labels and as training pairs."""

        def make(folder: Path) -> None:
            size = self.args.labels
            judges.make(folder, self.rows("preferences"), size, size, self.seed)
            pairs, labels = (list(read_jsonl(folder / f"{name}.jsonl")) for name in ("pairs", "labels"))
            if len(pairs) < size:
                raise ValueError(
                    f"`labels` is {size}, but the world has only {len(pairs)} pairs with different gold scores: lower "
                    "it"
                )
            write_rows(folder / "people" / "train.jsonl", [chosen(*each) for each in zip(pairs, labels, strict=True)])
            for name, known in (("known", self.args.known), ("few", FEW)):
                write_rows(folder / f"{name}.jsonl", labels[:known])
            write_rows(folder / "demonstrations" / "train.jsonl", self.rows("sft")[:size])  # a reward model's zero

        return self.built("labels", make)

    def judged(self, arm: Arm) -> tuple[dict[str, Any], Path]:
        """Return what `trl-ext label` reports on an arm's judge, and the folder of the pairs that it labelled."""
        source, has_gate = self.labels(), arm.min_agreement > NO_GATE
        known = source / f"{'known' if has_gate else 'few'}.jsonl"
        words = ["--labels", known, "--min_known", min(self.args.known, 50) if has_gate else FEW]
        words += ["--min_agreement", arm.min_agreement]
        words += ["--votes", arm.votes, "--judge_temperature", 1] if arm.votes > 1 else []
        errors = "-".join(f"{name}-{value:g}" for name, value in (arm.judge or {}).items()) or "right"
        name = f"judge-{errors}-{arm.votes}-{'gate' if has_gate else 'no-gate'}"

        def make(folder: Path) -> None:
            random.seed(f"{name} {self.seed}")  # a slip is drawn when the judge is asked
            judges.label_by(source, folder, arm.judge or {}, [str(word) for word in words])

        folder = self.built(name, make)
        return json.loads((folder / "label.json").read_text()), folder / "pairs"

    def reward(self, is_ensemble: bool) -> tuple[Path, float]:
        """Return a reward model, or an ensemble, trained on people's labels; and the CPU-seconds that this took."""
        kind = "ensemble" if is_ensemble else "single"
        file, start, labels = self.folder / f"reward-{kind}.json", time.process_time(), self.labels()
        options = [*REWARD, "--demonstrations_name", labels / "demonstrations"]
        options += ["--ensemble", ENSEMBLE] if is_ensemble else []
        rows = list(read_jsonl(labels / "people" / "train.jsonl"))
        name = f"reward-{kind}-{self.seed}"
        folder = noisy_reward_stage(self.demo, name, self.options(*options), lambda _: rows)
        if not file.is_file():
            write_text(file, json.dumps({"cpu_seconds": time.process_time() - start}))
        return folder, json.loads(file.read_text())["cpu_seconds"]

    def revised(self) -> tuple[Path, int]:
        """Return the folder with the revisions of SFT's answers by `trl-ext constitution`, and the number of calls."""

        def make(folder: Path) -> None:
            rows = self.rows("prompts")[: self.args.labels // ROUNDS]  # a pair a round: at most `labels`
            write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
            prompts = load_dataset_split(folder / "prompts.jsonl", "train")
            answers, _ = answers_of(str(self.sft), prompts, self.sampling(self.seed), folder / "answers.jsonl")
            first = {row["prompt"]: row["completion"] for row in answers}
            given = {"prompts": folder / "prompts.jsonl", "output_dir": folder, "rounds": ROUNDS, "model": "desk"}
            given |= {"constitution": self.labels() / "constitution.yaml", "max_concurrency": 1, "seed": self.seed}
            with judges.serving(lambda messages: written(messages, first, WRITER_ERROR)) as url:
                constitution([str(word) for word in flags_of({**given, "model_url": url})])

        folder = self.built("revised", make)
        return folder, json.loads((folder / "constitution.json").read_text())["calls"]

    def sampling(self, seed: int) -> Sampling:
        return Sampling(MAX_NEW_TOKENS, 1.0, 1.0, BATCH, seed, "auto", True)

    @functools.cached_property
    def measured_sft(self) -> dict[str, Any]:
        return self.measured(self.sft)

    def measured(self, policy: Path) -> dict[str, Any]:
        """Evaluate a policy beside SFT, by `trl-ext evaluate`: its gold of each prompt, and its figures."""
        output = self.folder / "evaluation"
        found = evaluate(
            EvaluateArguments(
                policies=[str(each) for each in dict.fromkeys((self.sft, policy))],
                prompts=str(self.world / "prompts"),
                max_prompts=self.args.prompts,
                rewards=[f"{HERE / 'world.py'}:{GOLD}"],
                max_completion_length=MAX_NEW_TOKENS,
                batch_size=BATCH,
                seed=self.seed,
                use_cpu=True,
                output_dir=str(output),
            )
        )
        name, figures = list(found["policies"].items())[-1]
        file = output / "answers" / f"{name}.jsonl"
        gold = [row["scores"][GOLD] for row in read_jsonl(file)]
        if policy != self.sft:
            file.unlink()
        return {"gold": gold, "figures": {key: value for key, value in figures.items() if key != "policy"}}

    def best_of(self, n: int) -> dict[str, Any]:
        """
        Take, of SFT's n answers to each prompt, the one that the reward model scores highest.

        Return what [`Draw.measured`] does, with an upper bound as KL to SFT: log n − (n − 1)/n (Beirami et al.,
        2401.01879).
        """
        reward, _ = self.reward(is_ensemble=False)
        columns = {name: self.test[name][:] for name in ("product", "problem")}
        drawn, scored = [], []
        for number in range(n):
            file = self.folder / "best-of-n" / f"{number}.jsonl"
            drawn.append(answers_of(str(self.sft), self.test, self.sampling(1000 * (self.seed + 1) + number), file)[0])
            scored.append(scores(ModelReward(str(reward)), drawn[-1], columns))
        best = [max(range(n), key=lambda i, place=place: scored[i][place]) for place in range(len(self.test))]
        answers = [drawn[i][place] for place, i in enumerate(best)]
        gold = scores(world.gold_reward, answers, columns)
        figures = policy_figures(answers, {GOLD: gold}, None)
        figures["kl"] = {"mean": math.log(n) - (n - 1) / n, "standard_error": None, "count": len(answers)}
        return {"gold": gold, "figures": figures}


def chosen(pair: dict[str, Any], label: dict[str, Any]) -> dict[str, Any]:
    """Return the pair to train on: the answer that a label prefers, and the other one."""
    a, b = pair["response_a"], pair["response_b"]
    first, second = (a, b) if label["choice"] == "a" else (b, a)
    return {"prompt": pair["prompt"], "chosen": first, "rejected": second}


def written(messages: list[dict], first: dict[str, str], error: float) -> str:
    """
    Return the next text of the model behind `trl-ext constitution`: SFT's answer, a critique or a revision.

    The model sees a principle the wrong way round in a share `error` of the critiques, and as many of its revisions
    break the principle.
    """
    texts = [message["content"] for message in messages]
    if len(texts) == 1:
        return first[texts[0]]
    prompt, answer, asked = texts[:3]
    name = next(name for name, text in judges.PRINCIPLES.items() if text in asked)
    product, problem = judges.case_of(prompt)
    draw = random.Random(f"{len(texts)} {name} {answer} {prompt}")
    if len(texts) == 3:
        is_kept = world.judge(answer, product, problem)[name] != (draw.random() < error)
        return "It keeps the principle." if is_kept else "It breaks the principle."
    if texts[3] == "It keeps the principle.":
        return answer
    return revision(answer, name, product, problem, draw.random() >= error, draw)


def revision(answer: str, name: str, product: str, problem: str, is_right: bool, draw: random.Random) -> str:
    """Rewrite an answer so that it keeps the principle `name`, or, if not `is_right`, so that it breaks it."""
    words = answer.split()
    remedies = {f"{remedy} ." for _, remedy in world.PROBLEMS.values()}
    said = product if is_right else draw.choice([other for other in world.PRODUCTS if other != product])
    if name == "product":
        words = [said if word in world.PRODUCTS else word for word in words]
        return " ".join(words if said in words else [*f"this is about your {said} .".split(), *words])
    sentences = [f"{text.strip()} ." for text in " ".join(words).split(" .") if text.strip()]
    if name == "remedy":
        case = problem if is_right else draw.choice([other for other in world.PROBLEMS if other != problem])
        place = next((i for i, text in enumerate(sentences) if text in remedies), min(1, len(sentences)))
        sentences = [text for text in sentences if text not in remedies]
        sentences.insert(place, f"{world.PROBLEMS[case][1]} .")
    elif name == "polite":
        closings = world.POLITE_CLOSINGS if is_right else world.RUDE_CLOSINGS
        sentences = [t for t in sentences if t not in (*world.POLITE_CLOSINGS, *world.RUDE_CLOSINGS)]
        sentences.append(draw.choice(closings))
    elif name == "no_repetition":
        sentences = list(dict.fromkeys(sentences)) if is_right else [*sentences[:1], *sentences]
    else:
        sentences = [text for text in sentences if text not in world.FILLERS] if is_right else (
            [*sentences[:-1], *world.FILLERS, *sentences[-1:]]
        )  # fmt: skip
    return " ".join(sentences)


def run(of: Draw, name: str, trial: dict[str, Any]) -> dict[str, Any]:
    """Train and measure one arm in one world; return its small figures, and delete what was trained."""
    arm, label, folders = ARMS[name], slug(f"{name} {list(trial.values())} {of.seed}"), []
    cost = {"people": 0, "judge_calls": 0, "cpu_seconds": 0.0}
    row: dict[str, Any] = {"refused": None, "kappa": None}
    options, shared, start = flags_of(trial), 0.0, time.process_time()

    def timed(policy: Path) -> Path:
        cost["cpu_seconds"] = time.process_time() - start + shared
        folders.append(policy)
        return policy

    match arm.kind:
        case "sft":
            policy = of.sft
        case "best_of_n":
            _, shared = of.reward(is_ensemble=False)
            start = time.process_time()
            row |= of.best_of(trial["n"])
            cost |= {"people": of.args.labels, "cpu_seconds": time.process_time() - start + shared}
        case "dpo":
            pairs = of.labels() / "people"
            if arm.judge is None:
                cost["people"] = of.args.labels
            else:
                found, pairs = of.judged(arm)
                cost |= {"people": of.args.known if arm.min_agreement > NO_GATE else FEW}
                cost |= {"judge_calls": found["judged"]["calls"]}
                row["kappa"] = found["known"]["kappa"]
                options += ["--use_confidence", "true"] if arm.min_agreement > NO_GATE else []
                row["refused"] = None if found["gate"]["passed"] else found["gate"]["reasons"][0]
            start = time.process_time()
            policy = of.sft
            if row["refused"] is None:
                policy = timed(dpo_stage(of.demo, f"dpo-{label}", of.sft, pairs, of.options(*TWO_EPOCHS, *options)))
        case "online_dpo":
            reward, shared = of.reward(is_ensemble=False)
            cost["people"], start = of.args.labels, time.process_time()
            given = ["--reward_model_name_or_path", reward]
            stage = f"online_dpo-{label}"
            folder = timed(online_dpo_stage(of.demo, stage, of.options(*ONLINE, *options), given))
            policy = folder / "round-2"
        case "ppo":
            reward, shared = of.reward(is_ensemble="ensemble" in name)
            cost["people"], start = of.args.labels, time.process_time()
            scored = {"EnsembleReward": {"members": str(reward)}} if "ensemble" in name else {
                "ModelReward": {"model": str(reward)}
            }  # fmt: skip
            given = ["--rewards", json.dumps(scored), "--reward_weights", 0, 0, 1]
            policy = timed(ppo_stage(of.demo, f"unguarded-{label}", of.options(*PPO, *options), given))
        case "cai":
            revised, calls = of.revised()
            cost["judge_calls"], start = calls, time.process_time()
            settings = of.options(*TWO_EPOCHS, *options)
            middle = timed(further_sft_stage(of.demo, f"sft-{label}", revised / "sft", settings))
            policy = timed(dpo_stage(of.demo, f"dpo-{label}", middle, revised / "pairs", settings))
    if arm.kind != "best_of_n":
        row |= of.measured_sft if policy == of.sft else of.measured(policy)
    for folder in folders:
        shutil.rmtree(folder)
    return {**row, "cost": cost}


def head_to_head(mine: Sequence[dict], theirs: Sequence[dict]) -> list[float]:
    """Return for each seed the share of prompts on which one arm has more gold than another; a tie counts one half."""
    theirs_of = {row["seed"]: row["gold"] for row in theirs}
    found = []
    for row in mine:
        if row["seed"] in theirs_of:
            known = margins(row["gold"], theirs_of[row["seed"]])
            found.append(win_rate(known, range(len(known)))["win_rate"])
    return found


def gains(mine: Sequence[dict], theirs: Sequence[dict]) -> list[float]:
    """Return for each seed the mean gold of one arm minus that of another."""
    theirs_of = {row["seed"]: fmean(row["gold"]) for row in theirs}
    return [fmean(row["gold"]) - theirs_of[row["seed"]] for row in mine if row["seed"] in theirs_of]


def table(rows: dict[str, list[dict]]) -> str:
    """Return a table with a row for each arm: means over the seeds, and paired differences with 95 % t-intervals."""
    lines = ["| method | gold − SFT's | wins over SFT | wins over DPO on people's labels | KL to SFT, nats |"]
    lines[0] += " different 3-grams | length | people's labels | judge's calls | CPU-seconds | seeds |"
    lines.append("|---" * 11 + "|")
    for name, own in rows.items():
        figures = [row["figures"] for row in own]
        cells = [in_words(gains(own, rows["SFT"]))] if name != "SFT" else ["0"]
        for other in ("SFT", PEOPLE):
            wins = head_to_head(own, rows[other])
            cells.append(in_words(wins).removeprefix("+") if name != other and wins else "–")
        cells.append(f"{fmean(each['kl']['mean'] for each in figures):.2f}")
        cells.append(f"{fmean(each['distinct_3'] for each in figures):.3f}")
        cells.append(f"{fmean(each['length']['mean'] for each in figures):.1f}")
        cells += [f"{fmean(row['cost'][key] for row in own):,.0f}" for key in ("people", "judge_calls", "cpu_seconds")]
        refused = sum(row["refused"] is not None for row in own)
        cells.append(f"{len(own)}" + (f", refused in {refused}" if refused else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def conclusions(rows: dict[str, list[dict]]) -> str:
    """Say which arm has the most gold, and whether RLAIF with the gate wins half against people's labels."""
    by_gold = sorted(rows, key=lambda name: -fmean(fmean(row["gold"]) for row in rows[name]))
    first, second = by_gold[:2]
    said = [f"Most gold: {first}, {in_words(gains(rows[first], rows[second]))} above {second}, the next.", ""]
    said += [
        "| RLAIF with the gate | κ with people | passed | wins, where it passed | wins of all seeds |",
        "|---" * 5 + "|",
    ]
    reached = []
    for name, own in rows.items():
        if (judge := ARMS[name].judge) is None or ARMS[name].min_agreement == NO_GATE:
            continue
        passed = [row for row in own if row["refused"] is None]
        won, all_ = (head_to_head(part, rows[PEOPLE]) for part in (passed, own))
        kappas = [row["kappa"] for row in own if row["kappa"] is not None]
        cells = [f"{fmean(kappas):.2f}" if kappas else "–", f"{len(passed)} of {len(own)}"]
        cells += [in_words(part).removeprefix("+") if part else "–" for part in (won, all_)]
        said.append(f"| {name} | {' | '.join(cells)} |")
        if won and judge and fmean(won) >= 0.5:
            reached.append(name)
    said += ["", "Wins are against DPO on as many labels by people. Where the gate refuses, the policy is SFT's."]
    goal = f"reached by {'; '.join(reached)}" if reached else "not reached"
    said.append(f"Goal, that a judge with errors wins half or more where the gate lets it pass: {goal}.")
    return "\n".join(said) + "\n"


def tuned(tuning: dict[str, list[dict]]) -> dict[str, dict[str, Any]]:
    """Return the trial of each arm with the highest mean gold on the tuning seeds; the first if all are refused."""
    best = {}
    for name, rows in tuning.items():
        means: dict[int, list[float]] = {}
        for row in rows:
            means.setdefault(row["trial"], []).append(fmean(row["gold"]))
        best[name] = ARMS[name].trials[max(means, key=lambda trial: fmean(means[trial]))]
    return best


def plot(rows: dict[str, list[dict]], path: Path) -> None:
    """Draw gold over KL for each arm: small points are seeds, large ones their means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    for place, (name, own) in enumerate(rows.items()):
        kl = [max(row["figures"]["kl"]["mean"], 0.0) for row in own]
        gold = [fmean(row["gold"]) for row in own]
        style = {"color": f"C{place % 10}", "marker": "os^D"[place // 5 % 4]}
        axes.scatter(kl, gold, s=10, alpha=0.3, **style)
        axes.scatter([fmean(kl)], [fmean(gold)], s=70, label=name, edgecolors="black", **style)
    axes.set(xlabel="KL to SFT, nats per answer", ylabel="gold", xscale="symlog")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(CompareArguments, prog="python -m benchmarks.compare_methods", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    output_dir = Path(args.output_dir)
    draws: dict[int, Draw] = {}

    def result(seed: int, name: str, trial: dict[str, Any]) -> dict[str, Any]:
        file = output_dir / "runs" / f"seed-{seed}" / f"{slug(f'{name} {list(trial.values())}')}.json"
        settings = {"arm": asdict(ARMS[name]) | {"trials": None}, **args.sizes}
        if file.is_file():
            row = json.loads(file.read_text())
            if different := differences(row["settings"], settings):
                raise ValueError(
                    f"{file} was made with other settings ({'; '.join(different)}): choose another `output_dir`"
                )
            return row
        if seed not in draws:
            draws.clear()
            draws[seed] = Draw(args, seed)
        with contextlib.redirect_stdout(io.StringIO()):
            made = run(draws[seed], name, trial)
        number = ARMS[name].trials.index(trial)
        row = {"seed": seed, "name": name, "trial": number, **made, "settings": settings}
        write_text(file, json.dumps(row))
        print(
            f"seed {seed}, {name}, {trial}: gold {fmean(row['gold']):.3f}, KL {row['figures']['kl']['mean']:.2f}, "
            f"{row['cost']['cpu_seconds']:.0f} CPU-seconds{', refused' * (row['refused'] is not None)}",
            flush=True,
        )
        return row

    with parser.one_line_errors(ValueError, FolderInUse), Hold(output_dir):
        tuning: dict[str, list[dict]] = {name: [] for name in args.arms if len(ARMS[name].trials) > 1}
        for seed in args.tuning_seeds:
            for name in tuning:
                tuning[name] += [result(seed, name, trial) for trial in ARMS[name].trials]
        best = tuned(tuning)
        rows: dict[str, list[dict]] = {name: [] for name in args.arms}
        for seed in args.seeds:  # breadth first: what is interrupted has all arms of fewer seeds
            for name in args.arms:
                rows[name].append(result(seed, name, best.get(name, ARMS[name].trials[0])))
            text = f"{table(rows)}\n{conclusions(rows)}"
            write_text(output_dir / "compare_methods.md", text)
            plot(rows, output_dir / "compare_methods.png")
    print(text)


if __name__ == "__main__":
    main()
