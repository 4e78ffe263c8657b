"""Test a reward model before it is trusted, on a page and in JSON, with an exit status for pipelines.

    trl-ext reward-report MODEL --dataset_name PAIRS

MODEL is the folder of a reward model, an adapter or an ensemble, a hub name, or file.py:function. PAIRS has `chosen`,
`rejected` and `prompt`; pairs that the model was trained on, which `trl-ext reward` records in the model's folder, are
left out. `reward_report.html` and `reward_report.json`, in the model's folder or --output_dir, show the accuracy (also
by group and length), the calibration, the scores of training pairs and of a policy's answers, probes, and ranks. If a
bound is broken or cannot be judged, the command prints a sentence and ends with status 1; after a wrong input it ends
with status 2.
"""

import itertools
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.parser import StrictTrlParser
from ...runs import check_output_dir, check_settings, redacted, refuse, setting, write_text
from ...upstream import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "reward_report"  # of the page and the JSON
_OF_TRAINING = ("demonstrations_mean", "demonstrations_mean_before_centring", "margin_change_by_centring")
_NAMED = 3  # most reasons of a report that PPO's warning lists


@dataclass
class RewardReportArguments:
    """Declare the arguments of `trl-ext reward-report`: the reward, the data to test it on, and the bounds."""

    model: str | None = setting(
        None, "Reward model: a folder or a hub name, or file.py:function. It may come first, without the flag."
    )
    dataset_name: str = setting("", "Pairs: a .jsonl, .parquet or .csv file, a folder, a hub name. (required)")
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str | None = setting(None, "Split to measure on; if unset, `train` of a single file, else `test`.")
    train_name: str | None = setting(None, "Pairs that the model was trained on; `dataset_name` if unset.")
    train_split: str | None = setting(
        None, "Split of the training pairs; `train` if unset, unless that is the held-out split."
    )
    policy_answers: str | None = setting(None, "The policy's own answers, as `trl-ext generate` writes them.")
    ranking_name: str | None = setting(None, "Rankings by people: `prompt`, `responses` and `ranks`, 1 the best.")
    group_columns: list[str] | None = setting(
        None, "Columns to compare the accuracy by; if unset topic, subset, source, language, annotator."
    )
    drop_unusable_pairs: bool = setting(
        False, "Leave out pairs that lack an answer or have the same answer twice, instead of stopping."
    )
    max_pairs: int | None = setting(None, "Most held-out pairs, sampled at random; all if unset.", range=">= 1")
    probe_rows: int = setting(256, "Held-out answers that each probe changes; 0 for none.", range=">= 0")
    phrases: list[str] = field(
        default_factory=list, metadata={"help": "Phrases to probe besides those that the training pairs suggest."}
    )
    min_accuracy: float | None = setting(
        0.6, "Least accuracy, which must also be significantly above chance; null for no bound.", range="in [0, 1]"
    )
    max_length_bias: float | None = setting(
        0.2,
        "Largest difference in accuracy between pairs with a longer and with a shorter chosen answer; null for no "
        "bound.",
        range="in [0, 1]",
    )
    max_calibration_error: float | None = setting(None, "Largest expected calibration error.", range="in [0, 1]")
    min_rank_correlation: float | None = setting(
        0.7, "Least Spearman correlation with people's ranks.", range="in [-1, 1]"
    )
    min_best_of_n: float | None = setting(None, "Least best-of-n accuracy.", range="in [0, 1]")
    max_suspicious_probes: int | None = setting(
        0, "Most probes that may look like a hack, or cannot be judged; null for any number.", range=">= 0"
    )
    output_dir: str | None = setting(None, "Folder for the report; the model's folder if unset.")
    dtype: str | None = setting(None, "dtype of the model's weights; the saved one if unset.")
    max_batch_tokens: int = setting(16384, "Tokens in one forward pass, padding included.")
    use_cpu: bool = setting(False, "Do not use a GPU, even if there is one.")
    seed: int = setting(0, "Seed for sampling rows.")

    def __post_init__(self) -> None:
        check_settings(self)
        self.output_dir = self.output_dir or self.model
        refuse(
            (not self.model, "give MODEL, a folder, a hub name or file.py:function"),
            (not self.dataset_name, "give `dataset_name`, pairs: a hub name, a .jsonl file or a folder"),
            (
                self.output_dir == self.model and not Path(str(self.model)).is_dir(),
                "give `output_dir`, since MODEL is not a folder",
            ),
        )


BOUNDS = (
    *("min_accuracy", "max_length_bias", "max_calibration_error"),
    *("min_rank_correlation", "min_best_of_n", "max_suspicious_probes"),
)


def is_ensemble(folder: Any) -> bool:
    """Return whether `trl-ext reward --ensemble` wrote this folder."""
    return Path(str(folder), "ensemble.json").is_file()


def load(args: RewardReportArguments) -> Any:
    """Load the reward that the arguments name, and return it as a reward function."""
    from ...rewards import EnsembleReward, ModelReward, load_reward

    given: dict[str, Any] = {"dtype": args.dtype, "max_batch_tokens": args.max_batch_tokens, "truncation": "left"}
    if args.use_cpu:
        given["device"] = "cpu"
    if ".py:" in str(args.model):
        return load_reward(str(args.model))
    return (
        EnsembleReward(str(args.model), model_kwargs=given)
        if is_ensemble(args.model)
        else ModelReward(args.model, **given)
    )


def tokenizer_of(reward: Any) -> Any:
    """Return the tokenizer of a reward model, or of an ensemble's first member; None for a function."""
    for member in getattr(reward, "members", None) or []:
        return tokenizer_of(getattr(member, "function", member))
    return getattr(reward, "tokenizer", None)


def trained_pairs(args: RewardReportArguments) -> Any:
    """
    Return the pairs that the tested models were trained on, as recorded in their folders.

    The result is a [`~trl_ext.data.TrainedPairs`]. Its `is_complete` is False if a model has no folder or no complete
    record.
    """
    from ...data import TrainedPairs

    folders = _folders_of(args.model)
    found = TrainedPairs(is_complete=bool(folders))
    for folder in folders:
        places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
        known = next((pairs for place in places if (pairs := TrainedPairs.load(place)) is not None), None)
        found |= known or TrainedPairs(is_complete=False)
    return found


def _folders_of(named: str | None) -> list[Path]:
    """Return the model's folder, or the folders of an ensemble's members; [] for a function, a hub name or None."""
    if not named or not Path(named).is_dir():
        return []
    if not is_ensemble(named):
        return [Path(named)]
    members = json.loads(Path(named, "ensemble.json").read_text(encoding="utf-8"))["members"]
    return [Path(named, member["folder"]) for member in members]


def write_reward_report(folder: str | Path, report: dict[str, Any], is_uploaded: bool = False) -> Path:
    """
    Write `reward_report.html` and `reward_report.json`, each atomically; return the path of the page.

    Args:
        folder: folder for both files; use the model's folder, so that `trl-ext ppo` finds the report.
        report: result of [`~trl_ext.workbench.reports.reward_figures.examine`]. Figures that were measured in training
            are added from an earlier report in the folder.
        is_uploaded: whether the folder is uploaded to the hub. If so, the page is written into the subfolder `_run`,
            which is not uploaded, and the JSON has neither texts nor the values of columns.
    """
    from ...runs import PRIVATE_FOLDER
    from .reward_figures import page

    folder = Path(folder)
    report = {name: value for name, value in _read(folder).items() if name in _OF_TRAINING} | report
    shown = folder / f"{NAME}.html"
    data = {**report}
    if is_uploaded:  # what a Trainer uploads must not tell texts and names
        shown = folder / PRIVATE_FOLDER / f"{NAME}.html"
        data["probes"] = [{name: each[name] for name in each if name != "examples"} for each in report["probes"]]
        for name in ("highest", "lowest", "groups"):
            del data[name]
    write_text(shown, page(report))
    write_text(folder / f"{NAME}.json", json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return shown


def _read(folder: Path) -> dict[str, Any]:
    """Return the report in a reward model's folder; {} if there is none, or if it cannot be read."""
    from ..pages.recorded import read_object

    return read_object(folder / f"{NAME}.json")


def objections(rewards: "Sequence[Any]") -> list[str]:
    """
    Return why the reports in reward models' folders say not to trust these models.

    Args:
        rewards: folders of reward models, or reward functions. The reports of rewards within a function, such as an
            ensemble's members, are read, too.

    Returns:
        A text for each report that did not pass: a line that names the report, and a line for each of its first three
        reasons. There is none for a reward that has no report, or a report without a verdict.
    """
    found: dict[str, None] = {}  # each sentence once
    for reward in rewards:
        folder = Path(str(reward if isinstance(reward, str) else getattr(reward, "path", None)))
        said = _read(folder).get("verdict") if folder.is_dir() else None
        if said and not said["passed"]:
            begin = f"This reward model did not pass its report, {folder / f'{NAME}.json'}:"
            found["\n  - ".join([begin, *said["reasons"][:_NAMED]])] = None
        within = [*(getattr(reward, "members", None) or [])]
        within += [getattr(reward, name) for name in ("function", "reward") if getattr(reward, name, None) is not None]
        found |= dict.fromkeys(objections(within))
    return [*found]


def report_trained(
    trainer: Any,
    held_out: Any,
    train: Any,
    measured: dict[str, Any],
    *,
    trained: Any = None,
    group_columns: "Sequence[str] | None" = None,
    probe_rows: int = 128,
) -> dict[str, Any]:
    """
    Examine the model of a reward trainer, and write the report into the trainer's output folder.

    Every process must call this function, since the weights may be sharded.

    Args:
        trainer: a `trl.RewardTrainer`, trained.
        held_out, train: datasets of usable pairs (`chosen`, `rejected`) before tokenization: those to measure on, and
            those that the model was trained on.
        measured: further entries of the report, by name.
        trained: all pairs that the model was ever trained on, as [`~trl_ext.data.TrainedPairs`], none of them in
            `held_out`; None if these are just `train`.
        group_columns: columns to compare the accuracy by; None takes those with a usual name, such as `topic`.
        probe_rows: held-out answers that each probe changes, 0 for no probes. As many training pairs are scored, but
            at least 100.

    Returns:
        The report that was written. If the model cannot be examined, the report is `measured` alone, the reason is
        printed, and nothing is raised, since the model matters more than its report.

    Raises:
        Exception: the weights are sharded, and scoring failed with another error than a `ValueError`, for example by
            lack of memory. Without the error, other processes would wait for this one forever.
    """
    from ...data import TrainedPairs
    from ...rewards import ModelReward, logits_of
    from .reward_data import material_of
    from .reward_figures import Scorer, examine

    folder = Path(trainer.args.output_dir)
    begin = time.perf_counter()
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    reward = ModelReward(
        model,
        tokenizer=trainer.processing_class,
        score=partial(logits_of, model),
        device=args.device,
        max_batch_tokens=None,
        batch_size=args.per_device_eval_batch_size,
        max_length=args.max_length,
        truncation="left",
        name=folder.resolve().name,
    )
    try:
        material = material_of(held_out, train, trained or TrainedPairs.of(train), group_columns, seed=args.seed)
        bounds = {name: getattr(RewardReportArguments, name) for name in BOUNDS}
        examined = examine(
            Scorer(reward),
            material,
            bounds,
            tokenizer=reward.tokenizer,
            probe_rows=probe_rows,
            train_rows=max(probe_rows, 100),
            seed=args.seed,
        )
        report = {**measured, **examined, "seconds": time.perf_counter() - begin}
        if trainer.is_world_process_zero():
            write_reward_report(folder, report, is_uploaded=args.push_to_hub)
    except Exception as error:
        if (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled) and not isinstance(error, ValueError):
            raise  # if a process that ran out of memory went on, the others would wait in their forward for ever
        report = measured
        if trainer.is_world_process_zero():
            print(f"{NAME}.html was not written: {type(error).__name__}: {' '.join(str(error).split())}")
            (folder / f"{NAME}.html").unlink(missing_ok=True)  # of an earlier model
            write_text(folder / f"{NAME}.json", json.dumps(measured, indent=2))
    return report


def main(arguments: list[str] | None = None) -> None:
    quiet()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    parser = StrictTrlParser(RewardReportArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(args.output_dir, "false")
        report, kept = run(args)
    name = "held-out accuracy" if report["trained_on"]["is_known"] else "accuracy"
    folder = Path(args.output_dir)
    low, high = report["accuracy_interval"]
    print(f"{name.capitalize()} {report['accuracy']:.1%} ({low:.1%} to {high:.1%}) of {report['pairs']:,} pairs")
    for sentence in report["unknown"]:
        print(f"Note: {sentence}")
    if kept is not None:
        print(f"The earlier report was copied to {kept}")
    print(f"Report: {folder / f'{NAME}.html'}")
    if not report["verdict"]["passed"]:
        for sentence in report["verdict"]["reasons"]:
            print(f"{parser.prog}: {sentence}", file=sys.stderr)
        sys.exit(1)


def keep_earlier(folder: Path) -> Path | None:
    """
    Copy an earlier report in a folder to `reward_report.N.html` and `.json`, with the first free number N.

    Returns:
        The path of the copied JSON; None if the folder has no report.
    """
    if not (folder / f"{NAME}.json").is_file():
        return None
    number = next(i for i in itertools.count(1) if not (folder / f"{NAME}.{i}.json").exists())
    for kind in ("html", "json"):
        if (path := folder / f"{NAME}.{kind}").is_file():
            shutil.copy2(path, folder / f"{NAME}.{number}.{kind}")
    return folder / f"{NAME}.{number}.json"


def run(args: RewardReportArguments) -> tuple[dict[str, Any], Path | None]:
    """
    Examine the reward and write the report; return the report, and the path of the copy of an earlier one, if any.
    """
    from .reward_data import gather
    from .reward_figures import Scorer, examine

    begin = time.perf_counter()
    folder = Path(str(args.output_dir))
    material = gather(args, trained_pairs(args))
    reward = load(args)
    report = examine(
        Scorer(reward, args.model),
        material,
        {name: getattr(args, name) for name in BOUNDS},
        tokenizer=tokenizer_of(reward),
        probe_rows=args.probe_rows,
        phrases=args.phrases,
        seed=args.seed,
    )
    report |= {"seconds": time.perf_counter() - begin, "settings": redacted(asdict(args))}
    kept = keep_earlier(folder)
    write_reward_report(folder, report)
    return report, kept


if __name__ == "__main__":
    main()
