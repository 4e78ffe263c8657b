"""Test a reward model before it is trusted, on a page and in JSON, with an exit status for pipelines.

    trl-ext reward-report MODEL --dataset_name PAIRS

MODEL is a reward model's folder (an adapter's and an ensemble's, too), a hub name, or file.py:function; or --rewards
has an entry as a configuration of `trl-ext ppo` has. PAIRS has `chosen`, `rejected` and `prompt`; pairs that the model
was trained on, which `trl-ext reward` notes beside it, are left out. `reward_report.html` and `reward_report.json`, in
the model's folder or --output_dir, have the accuracy, also by group and length, calibration, scores on training data
and of a policy, probes, and ranks. A bound that is broken, or cannot be judged, ends the command with status 1 and a
sentence, a wrong input with status 2.
"""

import itertools
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.model_names import check_model
from ...cli.parser import StrictTrlParser, entry_of
from ...runs import check_output_dir, check_settings, redacted, setting, write_text
from ...upstream import late_bars, quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "reward_report"  # of the page and the JSON
_OF_TRAINING = ("demonstrations_mean", "demonstrations_mean_before_centring", "margin_change_by_centring")
_NAMED = 3  # most reasons of a report that PPO's warning lists


@dataclass
class RewardReportArguments:
    """Declare the arguments of `trl-ext reward-report`: the reward, the data to test it on, and the bounds."""

    model: str | None = setting(
        None, "Reward model: a folder or a hub name, or file.py:function. It may stand first, alone."
    )
    rewards: list[str] | None = setting(
        None, "Instead of MODEL one reward of trl_ext.rewards with settings, as in a configuration of ppo."
    )
    dataset_name: str = setting("", "Pairs: a .jsonl, .parquet or .csv file, a folder, a hub name. (required)")
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str | None = setting(None, "Split to measure on; `test`, or `train` of a single file, if unset.")
    train_name: str | None = setting(None, "Pairs that the model was trained on; `dataset_name` if unset.")
    train_split: str | None = setting(None, "Their split; `train` if unset, where it is not the held-out one.")
    policy_answers: str | None = setting(None, "The policy's own answers, as `trl-ext generate` writes them.")
    policy: str | None = setting(
        None, "Instead of answers the policy, which answers the held-out prompts: a folder or hub name."
    )
    max_new_tokens: int | None = setting(
        None, "Longest answer of `policy`, in tokens; if unset 256, or what the context leaves.", range=">= 1"
    )
    ranking_name: str | None = setting(None, "Rankings by people: `prompt`, `responses` and `ranks`, 1 the best.")
    best_of_n_name: str | None = setting(
        None, "Rows with one `chosen` and several `rejected` answers, as RewardBench 2 has."
    )
    group_columns: list[str] | None = setting(
        None, "Columns to compare the accuracy by; if unset topic, subset, source, language, annotator."
    )
    drop_unusable_pairs: bool = setting(False, "Go on without pairs that lack an answer or have the same one twice.")
    max_pairs: int | None = setting(None, "Most held-out pairs, drawn at random; all if unset.", range=">= 1")
    max_train_rows: int = setting(1000, "Most training pairs that are scored.", range=">= 1")
    max_policy_rows: int = setting(1000, "Most answers of the policy that are scored.", range=">= 1")
    probe_rows: int = setting(256, "Held-out answers that each probe changes; 0 for none.", range=">= 0")
    phrases: list[str] = field(
        default_factory=list, metadata={"help": "Phrases to probe beside those that the training pairs suggest."}
    )
    min_accuracy: float | None = setting(
        0.6, "Least accuracy, which must surely be above a coin's, too; null for any.", range="in [0, 1]"
    )
    max_length_bias: float | None = setting(
        0.2,
        "Largest difference in accuracy between pairs with a longer and with a shorter chosen answer; null for any.",
        range="in [0, 1]",
    )
    max_calibration_error: float | None = setting(None, "Most expected calibration error.", range="in [0, 1]")
    min_rank_correlation: float | None = setting(
        0.7,
        "Least Spearman correlation with people's ranks, where prompts have more than two answers.",
        range="in [-1, 1]",
    )
    min_best_of_n: float | None = setting(None, "Least best-of-n accuracy.", range="in [0, 1]")
    max_suspicious_probes: int | None = setting(
        0, "Most probes that may look like a hack, or cannot be judged; null for any number.", range=">= 0"
    )
    output_dir: str | None = setting(None, "Where the report goes; the model's folder if unset.")
    dtype: str | None = setting(None, "dtype of the model's weights; as saved if unset.")
    max_batch_tokens: int = setting(16384, "Tokens in one forward pass, padding included.")
    use_cpu: bool = setting(False, "Use no GPU, also where there is one.")
    seed: int = setting(0, "Seed of the rows that are drawn, and of the policy's answers.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_new_tokens is not None and not self.policy:
            raise ValueError(
                "`max_new_tokens` has an effect only with `policy`: give `policy`, too, or leave `max_new_tokens` out"
            )
        if (self.model is None) == (not self.rewards):
            raise ValueError("give one reward: MODEL (a folder, a hub name or file.py:function), or `rewards`")
        if not self.dataset_name:
            raise ValueError("no pairs: give `dataset_name`, a hub name, a .jsonl file or a folder")
        if self.policy and self.policy_answers:
            raise ValueError("`policy` and `policy_answers` are both given: drop one")
        if self.rewards and len(self.rewards) > 1:
            raise ValueError(f"`rewards` has {len(self.rewards)} entries: give one, such as a `SumReward` of them")
        self.rewards = self.rewards and [entry_of(text) for text in self.rewards]
        if self.output_dir is None:
            if self.model is None or not Path(self.model).is_dir() or is_ensemble(self.model):
                what = "`rewards`" if self.model is None else f"MODEL {self.model!r}"
                raise ValueError(
                    f"{what} is not the folder of one model, so the report needs another place: give `output_dir`, or "
                    "correct it"
                )
            self.output_dir = self.model
        is_own = self.model is not None and Path(self.output_dir).resolve() == Path(self.model).resolve()
        if is_ensemble(self.output_dir) or (not is_own and holds_model(self.output_dir)):
            raise ValueError(
                f"`output_dir` {self.output_dir} holds another model, which may have a report of its own: choose "
                "another"
            )

    @property
    def is_function(self) -> bool:
        """Return whether the reward is given as a function or as an entry of `rewards`, not as a model."""
        return self.model is None or ".py:" in self.model


def is_ensemble(folder: str) -> bool:
    """Return whether `trl-ext reward --ensemble` wrote this folder."""
    return Path(folder, "ensemble.json").is_file()


def holds_model(folder: str) -> bool:
    """Return whether this folder has a model or an adapter in it."""
    return any(Path(folder, name).is_file() for name in ("config.json", "adapter_config.json"))


def load(args: RewardReportArguments) -> tuple[Any, Any]:
    """Return the reward as a function, and its tokenizer, which counts lengths (None if it has none)."""
    from ...rewards import EnsembleReward, ModelReward, load_reward, load_rewards

    given: dict[str, Any] = {"dtype": args.dtype, "max_batch_tokens": args.max_batch_tokens, "truncation": "left"}
    if args.use_cpu:
        given["device"] = "cpu"
    if args.rewards:
        (reward,), _ = load_rewards(args.rewards)
    elif args.is_function:
        reward = load_reward(str(args.model))
    elif is_ensemble(str(args.model)):
        reward = EnsembleReward(str(args.model), model_kwargs=given)
    else:
        reward = ModelReward(args.model, **given)
    return reward, tokenizer_of(reward)


def tokenizer_of(reward: Any) -> Any:
    """Return the tokenizer of a reward model, or of an ensemble's first member; None for a function."""
    for member in getattr(reward, "members", None) or []:
        return tokenizer_of(getattr(member, "function", member))
    return getattr(reward, "tokenizer", None)


def gather(args: RewardReportArguments) -> Any:
    """Load the [`~trl_ext.workbench.reward_report.data.Material`] that the reward is examined on."""
    from . import data

    split = data.split_of(args.dataset_name, args.dataset_split)
    try:
        loaded = data.load_pairs(args.dataset_name, split, args.dataset_config, args.drop_unusable_pairs)
    except ValueError as error:
        hint = "; name the held-out one by `dataset_split`" if "has no split" in str(error) else ""
        raise ValueError(f"{error}{hint}") from error
    pairs, best_of_n, said = loaded
    train, is_named = _training_pairs(args, split), bool(args.train_name or args.train_split)
    pairs, train, trained, known, more = data.held_out_part(pairs, train, trained_pairs(args), is_named)
    said += more
    best_of_n = data.not_seen(best_of_n, trained, "best-of-n rows", said, is_named=False)
    if args.max_pairs and args.max_pairs < len(pairs):
        pairs = pairs.shuffle(seed=args.seed).select(range(args.max_pairs))
        best_of_n = best_of_n[: args.max_pairs]
    found = data.material_of(pairs, train, args.group_columns, train_rows=args.max_train_rows, seed=args.seed)
    found.unknown, found.best_of_n, found.trained_on = said, best_of_n, known
    if args.best_of_n_name:
        _, found.best_of_n, more = data.load_pairs(
            args.best_of_n_name, data.split_of(args.best_of_n_name, None), None, False
        )
        found.unknown += more
        if not found.best_of_n:
            raise ValueError(f"`best_of_n_name` {args.best_of_n_name}: `rejected` must hold lists of answers")
        found.best_of_n = data.not_seen(found.best_of_n, trained, "best-of-n rows", found.unknown)
    if args.ranking_name:
        rankings = data.load_rankings(args.ranking_name, data.split_of(args.ranking_name, None))
        found.rankings = data.not_seen(rankings, trained, "rankings", found.unknown)
    if args.policy_answers:
        found.policy = data.load_answers(args.policy_answers, args.max_policy_rows)
    elif args.policy:
        prompts = data.distinct_prompts(found.chosen, args.max_policy_rows)
        found.policy = data.sample_answers(args.policy, prompts, args.max_new_tokens, args.seed)
    return found


def trained_pairs(args: RewardReportArguments) -> Any:
    """
    Return the pairs that the tested models were trained on, as recorded in their folders.

    The result's `is_complete` is False if a model has no folder or no record, or if the setting `rewards` gives the
    reward.
    """
    from ...data import TrainedPairs

    folders = folders_of(args.model if args.model is not None else args.rewards)
    # An entry of `rewards` may score by other models, too, such as one on a server: their training pairs are not known
    found = TrainedPairs(is_complete=bool(folders) and args.model is not None)
    for folder in folders:
        places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
        known = next((pairs for place in places if (pairs := TrainedPairs.load(place)) is not None), None)
        found |= known or TrainedPairs(is_complete=False)
    return found


def folders_of(named: Any) -> list[Path]:
    """Return the folders of all models in `named`, a name or an entry of `rewards`; an ensemble has its members'."""
    if isinstance(named, dict):
        named = list(named.values())
    if isinstance(named, list):
        return [folder for each in named for folder in folders_of(each)]
    if not isinstance(named, str) or not Path(named).is_dir():
        return []
    if not is_ensemble(named):
        return [Path(named)]
    members = json.loads(Path(named, "ensemble.json").read_text(encoding="utf-8"))["members"]
    return [Path(named, member["folder"]) for member in members]


def _training_pairs(args: RewardReportArguments, held_out: str) -> Any:
    """Load the usable training pairs, named or beside the held-out ones; return None if there are none."""
    from ...data import load_dataset_split, usable_pairs

    name, split = args.train_name or args.dataset_name, args.train_split or "train"
    if (name, split) == (args.dataset_name, held_out):
        if args.train_name or args.train_split:
            raise ValueError(
                f"the split {split!r} of {name} is held out, so it cannot have the training pairs, too: name another "
                "split"
            )
        return None
    config = args.dataset_config if args.train_name is None else None
    try:
        train = load_dataset_split(name, split, config=config, columns=("chosen", "rejected"))
    except ValueError:
        if args.train_name or args.train_split:
            raise
        return None  # a folder with a held-out split alone
    return usable_pairs(train, f"the split {split!r} of the training pairs", True)


def write_reward_report(folder: str | Path, report: dict[str, Any], is_uploaded: bool = False) -> Path:
    """
    Write `reward_report.html` and `reward_report.json`, each whole or not at all; return the path of the page.

    Args:
        folder: folder for both files; take the model's own, so that `trl-ext ppo` finds the report.
        report: result of `examine`. Figures that were measured in training are added from an earlier report in the
            folder.
        is_uploaded: whether the folder is uploaded to the hub. If so, the page is written into the subfolder `_run`,
            which is not uploaded, and the JSON has neither texts nor the values of columns.
    """
    from ...runs import PRIVATE_FOLDER
    from .page import page

    folder = Path(folder)
    earlier = read_report(folder) or {}
    report = {**{name: value for name, value in earlier.items() if name in _OF_TRAINING}, **report}
    shown, data = folder / f"{NAME}.html", {**report}
    if is_uploaded:  # what a Trainer uploads must not tell texts and names
        shown = folder / PRIVATE_FOLDER / f"{NAME}.html"
        data["probes"] = [{name: each[name] for name in each if name != "examples"} for each in report["probes"]]
        for name in ("highest", "lowest", "groups"):
            del data[name]
    texts = page(report), json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    for path, text in zip((shown, folder / f"{NAME}.json"), texts, strict=True):
        write_text(path, text)
    return shown


def read_report(folder: str | Path, name: str = f"{NAME}.json") -> dict[str, Any] | None:
    """Return the report in a reward model's folder; None if there is none that can be read."""
    from ..pages.recorded import read_object

    return read_object(Path(folder, name)) or None


def objections(rewards: "Sequence[Any]") -> list[str]:
    """
    Return what the reports in the folders of reward models object to these models.

    Args:
        rewards: folders of reward models, or reward functions. The reports of rewards within a function, such as an
            ensemble's members, are read, too.

    Returns:
        A text for each report that did not pass: a line that names the report, and a line for each of its first three
        reasons. A reward without a report, or with a report without a verdict, has no text.
    """
    found: dict[str, None] = {}  # each sentence once
    for reward in rewards:
        folder = reward if isinstance(reward, str) else getattr(reward, "path", None)
        report = read_report(folder) if isinstance(folder, str) and Path(folder).is_dir() else None
        said = (report or {}).get("verdict")
        if isinstance(said, dict) and said.get("passed") is False:
            reasons = [str(reason) for reason in said.get("reasons") or []]
            more = [f"and {len(reasons) - _NAMED} more"] if len(reasons) > _NAMED else []
            answer = "says no" if {*reasons} - {*(said.get("not_judged") or [])} else "cannot say yes"
            begin = f"{Path(str(folder), f'{NAME}.json')} {answer} to this reward model:"
            found["\n  - ".join([begin, *reasons[:_NAMED], *more])] = None
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
        held_out, train: usable pairs before tokenization: to measure on, and those that the model was trained on.
        measured: further entries of the report.
        trained: all pairs that the model was trained on, none of them in `held_out`; None if these are `train` alone.
        group_columns: columns to compare the accuracy by; None takes those with a usual name, such as `topic`.
        probe_rows: held-out answers that each probe changes, 0 for no probes. As many training pairs are scored, but
            at least 100.

    Returns:
        The report that was written. If the model cannot be examined, the report is `measured` alone, the reason is
        printed, and nothing is raised, since the model matters more than its report.

    Raises:
        Exception: the weights are sharded, and scoring failed, by lack of memory for example. Without the error, other
            processes would wait for this one for ever.
    """
    from ...data import TrainedPairs, pair_hashes
    from ...rewards import ModelReward, logits_of
    from .data import TrainedOn, material_of, sentences_on
    from .figures import Bounds, Scorer, examine

    folder, begin = Path(trainer.args.output_dir), time.perf_counter()
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    reward = ModelReward(
        model,
        tokenizer=trainer.processing_class,
        score=partial(logits_of, model),
        device=trainer.args.device,
        max_batch_tokens=None,
        batch_size=trainer.args.per_device_eval_batch_size,
        max_length=trainer.args.max_length,
        truncation="left",
        name=folder.resolve().name,
    )
    try:
        material = material_of(held_out, train, group_columns, train_rows=max(probe_rows, 100), seed=trainer.args.seed)
        trained = trained or TrainedPairs.of(train)
        hashes = pair_hashes(held_out)
        shared = int((trained.has_an_answer_of(hashes) & ~trained.has(hashes)).sum())
        material.trained_on = TrainedOn(trained.is_complete, with_a_trained_answer=shared)
        material.unknown += sentences_on(material.trained_on, len(held_out))
        if (long := len(held_out) - len(trainer.eval_dataset)) > 0:
            material.unknown.append(
                f"{long:,} held-out pairs are longer than `max_length`: they are scored without the beginning of the "
                "prompt, and are not in `held_out_scores.json`."
            )
        examined = examine(
            Scorer(reward),
            material,
            Bounds(),
            tokenizer=reward.tokenizer,
            probe_rows=probe_rows,
            seed=trainer.args.seed,
        )
        report = {**measured, **examined, "seconds": time.perf_counter() - begin}
        if trainer.is_world_process_zero():
            write_reward_report(folder, report, is_uploaded=trainer.args.push_to_hub)
    except Exception as error:
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if is_sharded and not isinstance(error.__cause__ or error, ValueError):
            raise  # if a process that ran out of memory went on, the others would wait in their forward for ever
        report = measured
        if trainer.is_world_process_zero():
            print(f"No {NAME}.html: {type(error).__name__}: {' '.join(str(error).split())}")
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
    late_bars()
    with parser.one_line_errors():
        check_output_dir(args.output_dir, "false")
        report, kept = run(args)
    folder = Path(args.output_dir)
    print(accuracy_of(report))
    for sentence in report["unknown"]:
        print(f"Note: {sentence}")
    if kept is not None:
        print(f"The report that was there is now {kept}: {accuracy_of(read_report(folder, kept.name) or {})}")
    print(f"Report: {folder / f'{NAME}.html'}")
    if not report["verdict"]["passed"]:
        for sentence in report["verdict"]["reasons"]:
            print(f"{parser.prog}: {sentence}", file=sys.stderr)
        sys.exit(1)


def accuracy_of(report: dict[str, Any]) -> str:
    """Return a report's accuracy in words, or say that it lacks one, as an ensemble's report may."""
    from ..pages.markup import with_interval
    from .figures import accuracy_name

    accuracy, interval = report.get("accuracy"), report.get("accuracy_interval")
    if not isinstance(accuracy, float) or not isinstance(interval, list):
        return "a report without one accuracy"
    name = accuracy_name(report) if "trained_on" in report else "accuracy"
    return f"{name[0].upper()}{name[1:]} {with_interval(accuracy, interval)} of {report['pairs']:,} pairs"


def keep_earlier(folder: Path) -> Path | None:
    """
    Copy the report in a folder to `reward_report.N.html` and `.json`, with the first N that is free.

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
    Examine the reward and write the report.

    Returns:
        The report; and the path to which an earlier report was copied, None if there was no earlier one.

    Raises:
        ValueError, OSError, ImportError: an input is wrong.
    """
    from .figures import Bounds, Scorer, examine

    begin = time.perf_counter()
    if not args.is_function and not is_ensemble(str(args.model)):
        check_model("MODEL", args.model, tokenizer=True)
    if args.policy:
        check_model("policy", args.policy, tokenizer=True)
    material = gather(args)
    reward, tokenizer = load(args)
    bounds = Bounds(**{each.name: getattr(args, each.name) for each in fields(Bounds)})
    report = examine(
        Scorer(reward, None if args.rewards else str(args.model)),
        material,
        bounds,
        tokenizer=tokenizer,
        probe_rows=args.probe_rows,
        phrases=args.phrases,
        seed=args.seed,
    )
    report |= {"seconds": time.perf_counter() - begin, "settings": redacted(asdict(args))}
    kept = keep_earlier(Path(str(args.output_dir)))
    write_reward_report(str(args.output_dir), report)
    return report, kept


if __name__ == "__main__":
    main()
