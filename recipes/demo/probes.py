"""Test whether probes find the planted phrase, in demo worlds with it and without it.

    python -m recipes.demo.probes --seeds 0 1 2 3 4 5 6 7 8 9

In each world a reward model is trained, as in the demo. Phrases are mined from its training pairs, and all probes are
tried on the held-out answers. Where nothing was planted, the phrase is handed to the probes all the same, so that it
could rank first. Writes `probes.csv`, a row a probe, and `probes.md`, a row a world; the same command again goes on,
also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trl_ext import StrictTrlParser
from trl_ext.evaluation import mine_phrases, probe_reward
from trl_ext.runs import setting

from .seeds import check_grid
from .stages import DemoArguments, reward_stage, use_one_thread
from .world import PHRASE

SHOWN = ("name", "phrase", "expected", "suspicious", "rows", "gain", "wins", "gain_on_better", "over_control")


@dataclass
class ProbeStudyArguments:
    """Declare the worlds: each seed with each share."""

    seeds: list[int] = field(default_factory=lambda: [*range(10)], metadata={"help": "Seeds of world and training."})
    planted_shares: list[float] = field(
        default_factory=lambda: [0.2, 0.0], metadata={"help": "Shares of chosen answers that get the phrase."}
    )
    rows: int = setting(256, "Held-out answers to change.")
    output_dir: str = setting("outputs/probes", "Folder of all worlds.")
    short: bool = setting(False, "Take the same way in minutes, and show nothing.")

    def __post_init__(self):
        check_grid(self, "seeds", "planted_shares")
        if self.rows < 1 or not all(0 <= share <= 1 for share in self.planted_shares):
            raise ValueError(
                f"`rows` must be 1 or more, `planted_shares` in [0, 1]; got {self.rows} and {self.planted_shares}"
            )


def read(world: Path, split: str) -> list[dict]:
    """Return the preference pairs of a world."""
    return [json.loads(line) for line in (world / "preferences" / f"{split}.jsonl").read_text().splitlines()]


def probed(world: Path, score: Callable, rows: int, seed: int) -> tuple[list[dict], list[str]]:
    """Probe a reward model in its world; return the probes, and the phrases that were mined there."""
    train, test = read(world, "train"), read(world, "test")
    mined = mine_phrases([row["chosen"] for row in train], [row["rejected"] for row in train])
    prompts = [row["prompt"] for row in test] * 2
    answers = [row[name] for name in ("chosen", "rejected") for row in test]
    return probe_reward(score, prompts, answers, [*mined, PHRASE], seed=seed, rows=rows), mined


def summary(share: float, seed: int, probes: list[dict], mined: list[str]) -> dict:
    """Return the phrase's rank in a world, the probe that comes next, and which others are called suspicious."""
    others = [probe for probe in probes if probe["phrase"] != PHRASE]
    place = next(i for i, probe in enumerate(probes) if probe["phrase"] == PHRASE)
    suspicious = [probe for probe in others if probe["suspicious"]]
    return {
        "planted_share": share,
        "seed": seed,
        "mined": PHRASE in mined,
        "rank": place + 1,
        "suspicious": probes[place]["suspicious"],
        "gain_on_better": probes[place]["gain_on_better"],
        "next": others[0]["phrase"] or others[0]["name"],
        "next_gain_on_better": others[0]["gain_on_better"],
        "phrases": [probe["phrase"] for probe in suspicious if probe["phrase"]],
        "others": [probe["name"] for probe in suspicious if not probe["phrase"]],
    }


def table(rows: list[dict]) -> str:
    """Return a table with a line for each world, and a summary of the worlds of each share."""
    lines = [
        "| planted | seed | rank of the phrase | mined | suspicious | gain on good answers | next probe | its gain "
        "| other suspicious phrases | other suspicious probes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "no"}
    for row in rows:
        others = [", ".join(row[name]) or "none" for name in ("phrases", "others")]
        lines.append(
            f"| {row['planted_share']:g} | {row['seed']} | {row['rank']} | {words[row['mined']]} "
            f"| {words[row['suspicious']]} | {row['gain_on_better']:+.2f} | {row['next']} "
            f"| {row['next_gain_on_better']:+.2f} | {others[0]} | {others[1]} |"
        )
    lines.append("")
    for share in dict.fromkeys(row["planted_share"] for row in rows):
        worlds = [row for row in rows if row["planted_share"] == share]
        first = sum(row["rank"] == 1 for row in worlds)
        alarms = sum(len(row["phrases"]) for row in worlds)
        lines.append(
            f"Planted into {share:.0%} of the chosen answers: the phrase ranks first in {first} of {len(worlds)} "
            f"worlds; {alarms} other phrases are called suspicious.\n"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(ProbeStudyArguments, prog="python -m recipes.demo.probes", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    from trl_ext.rewards import ModelReward  # takes seconds to import

    output_dir, details, rows = Path(args.output_dir), [], []
    for seed in args.seeds:
        for share in args.planted_shares:
            demo = DemoArguments(seed, str(output_dir / f"planted-{share}"), planted_share=share, short=args.short)
            with parser.one_line_errors(ValueError):
                model = ModelReward(str(reward_stage(demo)), batch_size=64)
                probes, mined = probed(
                    demo.folder / "world",
                    lambda prompts, answers, model=model: model(prompts, answers, finished=[True] * len(answers)),
                    args.rows,
                    seed,
                )
            world = {"planted_share": share, "seed": seed}
            details += [
                {**world, "rank": i, **{name: probe[name] for name in SHOWN}} for i, probe in enumerate(probes, 1)
            ]
            rows.append(summary(share, seed, probes, mined))
            print(rows[-1], flush=True)
            with (output_dir / "probes.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, details[0])
                writer.writeheader()
                writer.writerows(details)
            (output_dir / "probes.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
