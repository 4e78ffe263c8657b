"""Advise what to do next: SFT, DPO, online DPO, PPO, or first label more. Figures have sources.

    trl-ext advise --annotators outputs/labels --prompts_report outputs/prompts --reward_report outputs/reward
    trl-ext advise --pairs pairs.jsonl --verifiable false --model_name_or_path PATH_OR_HUB_NAME --gpu H100 --gpus 8

It reads the reports that `trl-ext annotators`, `trl-ext prompts` and `trl-ext reward-report` write, and counts the
rows of data sets; all are optional. It lists what is unknown, with the command that finds it out. With a model and
GPUs it plans PPO as `trl-ext plan` does, which takes seconds to minutes. Nothing is trained or changed.
"""

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.parser import StrictTrlParser, pairs, path_and_split
from ...runs import check_settings, setting, write_text
from ...upstream import late_bars, quiet

if TYPE_CHECKING:
    from .advice import Facts, Method, Reason, Recommendation

# A setting that names a report → the report's file, the command that writes it, and the keys that must be there
REPORTS = {
    "annotators": ("annotators.json", "annotators", ("agreement", "labels_per_item")),
    "prompts_report": ("prompts.json", "prompts", ("sets", "settings")),
    "reward_report": ("reward_report.json", "reward-report", ("accuracy", "accuracy_interval")),
}
# A training set's name in `trl-ext prompts --sets` → the fact that counts its rows
SETS = {"sft": "demonstrations", "pref": "pairs", "pairs": "pairs", "rl": "prompts"}
BUDGETS = ("gpu_hours", "labels")
MODEL, DATA = "PATH_OR_HUB_NAME", "DATASET"
# An unknown fact → in words, and the command that finds it out
FIND_OUT = {
    "verifiable": ("whether a rule or a unit test can score an answer", "trl-ext advise --verifiable true"),
    "agreement": (
        "how far annotators agree",
        "trl-ext annotators --dataset_name labels.jsonl --output_dir outputs/labels",
    ),
    "pairs": ("how many pairs there are", "trl-ext advise --pairs DATASET"),
    "demonstrations": ("how many demonstrations there are", "trl-ext advise --demonstrations DATASET"),
    "prompts": ("how many prompts there are", "trl-ext advise --prompts DATASET"),
    "accuracy": (
        "how good a reward model of these pairs is",
        "trl-ext reward --dataset_name DATASET --model_name_or_path PATH_OR_HUB_NAME --output_dir outputs/reward",
    ),  # writes the report, too
    "passed": (
        "whether the reward model withstands probes: its report has no verdict",
        "trl-ext reward-report outputs/reward --dataset_name DATASET",
    ),
    "leaks": (
        "what the evaluation's prompts share with the training's",
        "trl-ext prompts --sets sft=SFT pref=PAIRS rl=PROMPTS eval=EVAL --output_dir outputs/prompts",
    ),
    "ppo": (
        "whether PPO fits on your GPUs",
        "trl-ext advise --model_name_or_path PATH_OR_HUB_NAME --gpu H100 --gpus 8",
    ),
}


@dataclass
class AdviseArguments:
    """Declare the arguments of `trl-ext advise`: the reports, data sets, model, GPUs and budget that are known."""

    annotators: str | None = setting(None, "annotators.json of `trl-ext annotators`, or its folder.")
    prompts_report: str | None = setting(
        None, "prompts.json of `trl-ext prompts`, or its folder; its sets are sft, pref, rl."
    )
    reward_report: str | None = setting(None, "reward_report.json, or the reward model's folder.")
    demonstrations: str | None = setting(
        None, "Data set of demonstrations, as PATH or PATH:SPLIT; its rows are counted."
    )
    pairs: str | None = setting(None, "Data set of preference pairs, in the same form.")
    prompts: str | None = setting(None, "Data set of prompts to sample answers to, in the same form.")
    verifiable: bool | None = setting(None, "Whether a rule or a unit test can score an answer.")
    budget: list[str] = field(default_factory=list, metadata={"help": "gpu_hours=NUMBER, labels=NUMBER, or both."})
    model_name_or_path: str | None = setting(None, "The model to train: a hub name, or a folder with its config.json.")
    gpu: str | None = setting(None, "Kind of GPU, such as H100 or 'RTX 4090'.")
    gpus: int = setting(1, "Number of these GPUs.", range=">= 1")
    output_file: str | None = setting(None, "File to write the advice to, as JSON.")
    json: str | None = setting(None, "The older name of `output_file`.")

    def __post_init__(self) -> None:
        check_settings(self)
        self.budgets: dict[str, float] = {}
        for name, value in pairs("budget", self.budget, "NAME=NUMBER").items():
            if name not in BUDGETS:
                raise ValueError(f"`budget` names {name!r}: it takes {' and '.join(BUDGETS)}")
            self.budgets[name] = _number(value.replace(",", ""), f"`budget` of {name}", "above 0", lambda x: x > 0)
        if bool(self.gpu) != bool(self.model_name_or_path):
            needed, given = ("gpu", "model_name_or_path") if self.model_name_or_path else ("model_name_or_path", "gpu")
            raise ValueError(f"`{given}` has an effect only with `{needed}`: give both, or neither")
        if self.gpus > 1 and not self.gpu:
            raise ValueError(f"`gpus` is {self.gpus}, but their kind is not known: give `gpu`, too")


def facts_of(args: AdviseArguments) -> tuple["Facts", dict[str, str]]:
    """
    Return the facts that the arguments give, and a dictionary: name of a fact → where it comes from.

    Raises:
        ValueError: a file is not the report that it should be, or contradicts itself or another report.
        OSError: a file or data set is missing.
    """
    from .advice import Facts

    known: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def add(found: dict[str, Any], origin: str) -> None:
        for name, value in found.items():
            if value is None:
                continue
            if name in known and known[name] != value and name not in counted:
                raise ValueError(
                    f"{origins[name]} says {known[name]:,} {name} and {origin} {value:,}: give reports of the same "
                    f"data, or count the data with `--{name} DATASET`"
                )
            known.setdefault(name, value)
            origins.setdefault(name, origin)

    counted = dict(_counts(args))
    add(counted, "the data set")
    for name, read in (("annotators", _labels), ("prompts_report", _prompts), ("reward_report", _reward)):
        if given := getattr(args, name):
            path, report = _report(name, given)
            try:
                add(read(report), str(path))
            except (AttributeError, KeyError, TypeError, IndexError) as error:
                file = REPORTS[name][0]
                raise ValueError(f"{path} cannot be read as {file} ({error!r}): write it again") from error
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    for name, value in args.budgets.items():
        add({name: int(value) if name == "labels" else value}, "--budget")
    if args.verifiable is not None:
        add({"verifiable": args.verifiable}, "--verifiable")
    return Facts(**known), origins


def _counts(args: AdviseArguments) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of rows of each data set that the arguments give."""
    from ...data import load_dataset_split

    for name, columns in (("demonstrations", ()), ("pairs", ("chosen", "rejected")), ("prompts", ())):
        if path := getattr(args, name):
            path, split = path_and_split(path)
            try:
                yield name, len(load_dataset_split(path, split, columns=columns))
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from error


def _report(which: str, given: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the contents of a report; `given` is its file or folder, and `which` a key of `REPORTS`."""
    path, (name, command, keys) = Path(given).expanduser(), REPORTS[which]
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"`{which}`: there is no {file}; `trl-ext {command}` writes {name}")
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"`{which}`: {file} is not JSON ({error})") from error
    missing = [key for key in keys if not isinstance(report, dict) or key not in report]
    if missing:
        raise ValueError(f"`{which}`: {file} is not the {name} of `trl-ext {command}`: it lacks {missing[0]!r}")
    return file, report


def _labels(report: dict[str, Any]) -> dict[str, Any]:
    """Return the facts in annotators.json. The agreement is among the annotators whose labels make the pairs."""
    agreement = (report.get("without_left_out") or report)["agreement"]
    train = report.get("pairs", {}).get("train", {})
    return {
        "agreement": None if agreement is None else _share(agreement, "agreement"),
        "labels_per_item": _number(report["labels_per_item"], "labels_per_item", "1 or more", lambda x: x >= 1),
        "pairs": _count(train["pairs"], "pairs.train.pairs") if train else None,
    }


def _prompts(report: dict[str, Any]) -> dict[str, Any]:
    """Return the facts in prompts.json: rows kept of training sets, and rows that held-out sets share with others."""
    from .advice import Leak

    found: dict[str, Any] = {}
    leaks = []
    for name, figures in report["sets"].items():
        rows, kept, shared = (_count(figures[key], f"sets.{name}.{key}") for key in ("rows", "kept", "shared_near"))
        if max(kept, shared) > rows:
            raise ValueError(f"set {name!r} has {rows} rows, but {kept} are kept and {shared} shared")
        if name in (report["settings"]["held_out"] or ()):
            leaks.append(Leak(name, shared, rows))
        elif fact := SETS.get(name):
            found[fact] = found.get(fact, 0) + kept
    return {**found, "leaks": tuple(leaks) or None}


def _reward(report: dict[str, Any]) -> dict[str, Any]:
    """
    Return the facts in reward_report.json, with the report's verdict if it has one.

    For an ensemble, take the accuracy of the members' mean score, which is the default reward.
    """
    accuracy, interval = (report[name] for name in ("accuracy", "accuracy_interval"))
    if "members" in report:
        accuracy, interval = accuracy["mean"], interval["mean"]
    accuracy = _share(accuracy, "accuracy")
    low, high = (_share(interval[place], "accuracy_interval") for place in (0, 1))
    if not low - 1e-9 <= accuracy <= high + 1e-9:
        raise ValueError(f"the accuracy is {accuracy}, but its interval goes from {low} to {high}")
    found: dict[str, Any] = {"accuracy": accuracy, "accuracy_low": low}
    if (verdict := report.get("verdict")) is not None:
        passed, reasons = verdict["passed"], tuple(map(str, verdict["reasons"]))
        if not isinstance(passed, bool) or passed == bool(reasons):
            raise ValueError(f"the verdict has passed: {passed}, with {len(reasons)} reasons against it")
        found |= {"passed": passed, "complaints": reasons}
    return found


def _number(value: Any, what: str, rule: str, is_valid: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and is_valid(number)):
        raise ValueError(f"{what} must be a number {rule}, got {value!r}")
    return number


def _share(value: Any, what: str) -> float:
    return _number(value, what, "from 0 to 1", lambda x: 0 <= x <= 1)


def _count(value: Any, what: str) -> int:
    return int(_number(value, what, "of rows", lambda x: x >= 0 and x == int(x)))


def planned(args: AdviseArguments, facts: "Facts") -> "Facts":
    """Return the facts with plans of PPO with LoRA and of all weights, or unchanged if the arguments name no model."""
    from ...cli.model_names import check_model, is_cached
    from ...models import load_config
    from . import GPUS, fit

    name = args.model_name_or_path
    if name is None:
        return facts
    gpu = next((gpu for gpu in GPUS if gpu.name == args.gpu), None)
    if gpu is None:
        raise ValueError(f"`gpu` must be one of {', '.join(gpu.name for gpu in GPUS)}, got {args.gpu!r}")
    check_model("model_name_or_path", name, weights=False)
    given: dict[str, Any] = {"reward_model": facts.verifiable is not True}
    if facts.prompts:
        given["examples"] = facts.prompts
    plans = {}
    for lora in (True, False):
        # Each plan reads a configuration of its own, since planning changes it for a moment
        config = load_config(name, local_files_only=is_cached(name))
        plans[lora] = fit("ppo", config, gpu, args.gpus, lora=lora, **given)
    return replace(facts, ppo=plans[True], ppo_full=plans[False])


def next_commands(method: "Method", args: AdviseArguments, facts: "Facts") -> list[str]:
    """Return the commands to run next, with names in capitals to fill in where something is unknown."""
    model, out = args.model_name_or_path or MODEL, f"outputs/{method}"
    pairs = args.pairs or (str(_folder(args.annotators) / "pairs") if args.annotators else DATA)
    base = ["trl-ext", method, "--model_name_or_path", model, "--dataset_name"]
    reward = str(_folder(args.reward_report)) if args.reward_report else "REWARD_MODEL"
    train_reward = ["trl-ext", "reward", "--model_name_or_path", model, "--dataset_name", *_data(pairs)]
    train_reward += ["--output_dir", "outputs/reward"]
    scored = ["--reward_model_name_or_path", reward]
    if Path(reward, "ensemble.json").is_file():
        scored = ["--rewards", f"{{EnsembleReward: {{members: {reward}}}}}"]
    if method == "label-more":
        labels = ["trl-ext", "annotators", "--dataset_name", "labels.jsonl", "--output_dir", "outputs/labels"]
        again = ["trl-ext", "advise", "--annotators", "outputs/labels"]
        return [shlex.join(words) for words in (labels, again)]
    if method == "sft":
        commands = [[*base, *_data(args.demonstrations), "--output_dir", out]]
    elif method == "dpo":
        confident = ["--use_confidence", "true"] if args.annotators and not args.pairs else []
        commands = [[*base, *_data(pairs), *confident, "--output_dir", out]]
        commands += [train_reward] if facts.accuracy is None else []
    elif method == "online-dpo":
        commands = [[*base, *_data(args.prompts, holds_out=False), *scored, "--output_dir", out]]
    else:
        if facts.verifiable:
            scored = ["--reward_funcs", "path/to/file.py:name"]
        guarded = ["--kl_controller", "adaptive", "--kl_coef", "0.05", "--kl_target", "6"]
        commands = [[*base, *_data(args.prompts), *scored, *guarded, "--output_dir", out]]
    return [shlex.join(words) for words in commands]


def _data(given: str | None, holds_out: bool = True) -> list[str]:
    """Return a recipe's flags for a data set; local data without a split `test` get a number of rows to hold out."""
    from ...data import load_dataset_split

    name, split = path_and_split(given or DATA)
    words = [name, *(["--dataset_train_split", split] if split != "train" else [])]
    if holds_out and Path(name).exists():
        try:
            load_dataset_split(name, "test", columns=())
        except ValueError:
            rows = len(load_dataset_split(name, split, columns=()))
            words += ["--eval_size", str(max(rows // 10, 1))]
    return words


def _folder(report: str) -> Path:
    path = Path(report)
    return path.parent if path.suffix == ".json" else path


def text(found: "Recommendation", commands: list[str]) -> str:
    """Return the advice as text to print."""
    from .advice import TITLES

    lines = [TITLES[found.method]]
    lines += _listed("Because", found.reasons)
    lines += _listed("Take care", found.cautions)
    if found.unknown:
        lines += ["", "Not known", *(f"- {what}; `{how}`" for what, how in map(FIND_OUT.__getitem__, found.unknown))]
    lines += ["", "Next", *(f"  {command}" for command in commands)]
    lines += _listed("What would change this", found.changes)
    title = {True: "Leave this library for this", False: "This library will do", None: "When to leave this library"}
    lines += _listed(title[found.leaves], found.leave)
    return "\n".join(lines)


def _listed(title: str, reasons: tuple["Reason", ...]) -> list[str]:
    return ["", title, *(f"- {each.sentence} [{each.source}]" for each in reasons)] if reasons else []


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(AdviseArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    late_bars()
    with parser.one_line_errors():
        from .advice import advise

        facts, origins = facts_of(args)
        facts = planned(args, facts)
        found = advise(facts)
        commands = next_commands(found.method, args, facts)
        if file := args.output_file or args.json:
            report = _as_json(found, facts, origins, commands)
            write_text(Path(file), json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(text(found, commands))


def _as_json(found: "Recommendation", facts: "Facts", origins: dict[str, str], commands: list[str]) -> dict[str, Any]:
    lists = ("reasons", "cautions", "changes", "leave")
    return {
        "method": found.method,
        **{name: [each._asdict() for each in getattr(found, name)] for name in lists},
        "leaves": found.leaves,
        "unknown": [{"name": name, "what": FIND_OUT[name][0], "command": FIND_OUT[name][1]} for name in found.unknown],
        "next": commands,
        "facts": {name: value for name, value in asdict(facts).items() if value is not None},
        "origins": origins,
    }


if __name__ == "__main__":
    main()
