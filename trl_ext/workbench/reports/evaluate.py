"""Compare policies by what they answer to the same held-out prompts: scores, win rates, KL, length, diversity.

    trl-ext evaluate RUN… --prompts PROMPTS --rewards REWARD… --judge JUDGE

RUN is the folder of an SFT, DPO or PPO run, of a model or of an adapter, or a hub name. PROMPTS has the column
`prompt`, text or messages; prompts that a run is known to have been trained on are refused. All answer with the same
seed and sampling, one policy in memory at a time. `evaluation.html` and `evaluation.json` have the figures,
`answers/NAME.jsonl` the answers; the same command again reuses answers of the same policy to the same prompts with the
same settings. `trl-ext report RUN… --evaluation FILE` shows the figures beside the runs' curves. A wrong input gives
exit status 2.
"""

import json
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...cli.parser import entry_of, parse_and_run
from ...runs import check_settings, redacted, setting, write_text

PROMPTS = 10  # that the page shows, each with the answers of all policies


@dataclass
class EvaluateArguments:
    """Declare the arguments of `trl-ext evaluate`: the policies, the prompts, who scores, and the sampling."""

    policies: list[str] = field(
        default_factory=list,
        metadata={"help": "Folders of runs, models or adapters, or hub names. They may come first, without the flag."},
    )
    prompts: str = setting("", "Held-out prompts: a .jsonl, .parquet or .csv file, a folder, a hub name. (required)")
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str | None = setting(None, "Split of the prompts; if unset, `train` of a single file, else `test`.")
    max_prompts: int | None = setting(
        None, "Number of prompts to answer, from the first on; all if unset.", range=">= 1"
    )
    rewards: list[str] | None = setting(
        None,
        "Rewards that score each answer: file.py:function, or an entry as in a configuration of `trl-ext ppo`.",
    )
    judge: str | None = setting(
        None,
        "One reward that compares with the baseline's answer, in the column `baseline`: file.py:function, or a "
        "`JudgeReward` with `compare: baseline`.",
    )
    baseline: str | None = setting(None, "The policy that the others are compared with; the first if unset.")
    ref_model_name_or_path: str | None = setting(None, "Reference of the KL; the first policy if unset.")
    max_completion_length: int = setting(256, "Tokens after which an answer is cut off.", range=">= 1")
    temperature: float = setting(1.0, "Temperature of the sampling; 0 always takes the likeliest token.", range=">= 0")
    top_p: float = setting(
        1.0, "Sample only from the likeliest tokens with this total probability (top-p).", range="in (0, 1]"
    )
    batch_size: int = setting(16, "Number of prompts in one batch.", range=">= 1")
    seed: int = setting(0, "Seed of the sampling.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of the policies' weights; `auto` keeps the saved one."
    )
    use_cpu: bool = setting(False, "Do not use a GPU, even if there is one.")
    output_dir: str = setting("evaluation", "Folder of the page, the JSON and the answers.")

    def __post_init__(self) -> None:
        check_settings(self)
        if not (self.policies and self.prompts):
            raise ValueError(
                "name policies before the flags, and give `--prompts`, a dataset with the column `prompt`"
            )
        self.baseline = self.baseline or self.policies[0]
        self.ref_model_name_or_path = self.ref_model_name_or_path or self.policies[0]
        if self.baseline not in self.policies:
            raise ValueError(f"`baseline` {self.baseline} is not one of the policies: add it to the policies")


def run(args: EvaluateArguments) -> dict[str, Any]:
    """
    Sample and score each policy's answers; write them, `evaluation.html` and `evaluation.json` into the output folder.

    Returns:
        The content of `evaluation.json`.
    """
    from ...data import write_rows
    from ...rewards import Member, distinct as distinct_names, load_rewards
    from .. import objections
    from ..pages.compare import named
    from .answers import (
        OWN,
        Sampling,
        answers_of,
        check_held_out,
        free,
        judged,
        kl_of,
        load_prompts,
        margins,
        policy_figures,
        scores,
        win_rate,
    )

    # Before anything is generated, which may take long: a mistyped reward is refused here
    functions, _ = load_rewards(entry_of(args.rewards))
    judge = load_rewards([entry_of(args.judge)])[0][0] if args.judge else None
    by_name = named(list(map(Path, args.policies)))
    paths = {name.replace("/", "--"): str(path) for name, path in by_name.items()}
    baseline = next(name for name, path in paths.items() if Path(path) == Path(str(args.baseline)))
    reference = str(args.ref_model_name_or_path)
    rows = load_prompts(args.prompts, args.dataset_config, args.dataset_split, args.max_prompts)
    notes = check_held_out(paths, rows)
    sampling = Sampling(**{each.name: getattr(args, each.name) for each in fields(Sampling)})
    answers = {}
    folder = Path(args.output_dir)
    for name, policy in paths.items():
        answers[name], was_there = answers_of(policy, rows, sampling, folder / "answers" / f"{name}.jsonl")
        print(f"{name}: {len(rows)} answers{', read from an earlier run' if was_there else ''}", flush=True)
        free()
    kl = kl_of(reference, {name: (paths[name], answers[name]) for name in paths}, sampling)
    free()

    names = distinct_names([Member(function).name for function in functions])
    columns = {name: rows[name][:] for name in rows.column_names if name not in OWN}
    keys = [json.dumps(row["prompt"], sort_keys=True) for row in answers[baseline]]
    scored = {
        name: dict(zip(names, (scores(function, answered, columns) for function in functions), strict=True))
        for name, answered in answers.items()
    }
    policies: dict[str, Any] = {}
    for name in paths:
        better = {reward: margins(values, scored[baseline][reward]) for reward, values in scored[name].items()}
        if judge is not None and name != baseline:
            better["the judge"] = judged(judge, answers[name], answers[baseline], columns)
        policies[name] = {
            "policy": str(Path(paths[name]).resolve()) if Path(paths[name]).is_dir() else paths[name],
            **policy_figures(answers[name], scored[name], kl[name]),
            "win_rates": {} if name == baseline else {by: win_rate(each, keys) for by, each in better.items()},
        }
        for place, row in enumerate(answers[name]):
            row["kl"] = None if kl[name] is None else kl[name][place]
            row["scores"] = {reward: values[place] for reward, values in scored[name].items()}
    found = {
        "prompts": len(rows),
        "baseline": baseline,
        "reference": reference,
        "judge": Member(judge).name if judge is not None else None,
        "policies": policies,
        "notes": [*notes, *_notes(args, policies, scored), *objections(functions)],
        "settings": redacted(asdict(args)),
    }
    for name, answered in answers.items():
        write_rows(folder / "answers" / f"{name}.jsonl", answered)
    write_text(folder / "evaluation.json", json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(folder / "evaluation.html", _page(found, answers))
    return found


def _page(found: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> str:
    """Return the HTML page of an evaluation; the policies' answers must be to the same prompts in the same order."""
    from ..pages.compare import evaluation_rows
    from ..pages.markup import render

    return render(
        Path(__file__).with_name("evaluate.html.j2"),
        title="Evaluation",
        found=found,
        figures=evaluation_rows(list(found["policies"].values())),
        answers=[[rows[0]["prompt"], *rows] for rows in zip(*answers.values(), strict=True)][:PROMPTS],
    )


def _notes(args: EvaluateArguments, policies: dict[str, Any], scored: dict[str, Any]) -> list[str]:
    """Return sentences on what the figures lack: an exact KL, or any; a reward or a judge; scores of some answers."""
    notes = [
        f"{name} and the reference {args.ref_model_name_or_path} have different vocabularies, so {name} has no KL."
        for name, of in policies.items()
        if of["kl"] is None
    ]
    if not (args.rewards or args.judge):
        notes.append("No `rewards` and no `judge` were given, so nothing says whose answers are better.")
    if args.top_p < 1 or args.temperature == 0:
        notes.append(
            "The KL is a rough estimate, since answers were not sampled from a policy's whole distribution: that "
            "needs `top_p` 1 and `temperature` above 0."
        )
    for name, by_reward in scored.items():
        for reward, values in by_reward.items():
            if none := values.count(None):
                notes.append(
                    f"{reward} has no score for {none} of {len(values)} answers of {name}, which are left out."
                )
    return notes


def main(arguments: list[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--policies", *arguments]
    args, found = parse_and_run(EvaluateArguments, __doc__, run, arguments)
    from ..pages.compare import evaluation_rows

    table = [["", *found["policies"]], *evaluation_rows(list(found["policies"].values()))]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for label, *cells in table:
        print("  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip())
    for sentence in found["notes"]:
        print(f"Note: {sentence}")
    print(f"Page: {Path(args.output_dir) / 'evaluation.html'}")


if __name__ == "__main__":
    main()
