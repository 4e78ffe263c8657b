"""Test whether refreshing the reward model ends a hack: gold of PPO after two rounds of new labels, and without them.

    python -m recipes.demo.refresh --seeds 0 1 2 3 4

In each world the policy is trained in three legs, without a guard, each from the policy and critic of the one before.
After the first two, the refreshed arm queues the policy's answers, the demo's annotators compare them (they do not
care for the planted phrase), and the reward model is trained on with them; the other arm keeps its reward model. Both
share the first leg, and have as many episodes. Writes `refresh.csv`, a row a leg, and `refresh.md`; the same command
again goes on, also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import json
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from trl_ext.data import write_rows
from trl_ext.runs import read_jsonl, setting

from .. import refresh_reward
from .report import read_curve
from .seeds import SeededStudyArguments, in_words, run_study
from .stages import HERE, STUDIED, DemoArguments, ppo_stage, reward_stage
from .world import ANNOTATORS, prefer_first

ROUNDS = 2
ARMS = ("none", "refreshed")


@dataclass
class RefreshStudyArguments(SeededStudyArguments):
    """Declare the worlds, the legs and the rounds."""

    episodes: int = setting(2048, "Episodes of each of the three legs.")
    queue_size: int = setting(200, "Pairs of answers that are labelled in a round.")
    old_share: float = setting(0.8, "Share of old pairs in what is trained on.")
    label_noise: float = setting(0.1, "How often the middle annotator slips.")
    planted_share: float = setting(0.2, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/refresh", "Folder of all runs.")


def label(folder: Path, seed: int, label_noise: float) -> Path:
    """Have the annotators compare what is queued in a folder, each without knowing of the others."""
    file = folder / "people.jsonl"
    if not file.is_file():
        draw, rows = random.Random(f"{seed} {folder.name} labels"), []
        for row in read_jsonl(folder / "queue.jsonl"):
            answers = [row["response_a"], row["response_b"]]
            for who, first in enumerate(prefer_first(draw, answers, row, label_noise)):
                rows.append({"item": row["item"], "annotator": f"annotator {who}", "choice": "a" if first else "b"})
        write_rows(file, rows)
    return file


def refreshed(args: RefreshStudyArguments, demo: DemoArguments, policy: Path, reward: Path, number: int) -> Path:
    """Do one round; return its folder with the queue, the labels and the new reward model."""
    world, folder = demo.folder / "world", demo.folder / f"round-{number}"
    flags = {
        "model_name_or_path": policy,
        "against_model_name_or_path": demo.folder / "sft",
        "reward_model_name_or_path": reward,
        "dataset_name": world / "prompts",
        "output_dir": folder,
        "num_prompts": 64 if args.short else 512,
        "queue_size": 40 if args.short else args.queue_size,
        "max_new_tokens": 48,
        "batch_size": 128,
        "reward_dataset_name": world / "preferences",
        "reward_config": HERE / "reward.yaml",
        "demonstrations_name": world / "sft",
        "old_share": args.old_share,
        "seed": demo.seed,
        "use_cpu": "true",
    }
    words = refresh_reward.words(flags)
    words += ["--earlier", *(str(demo.folder / f"round-{each}") for each in range(1, number))] if number > 1 else []
    if not (folder / "refresh.json").is_file():
        refresh_reward.main(words)
        refresh_reward.main([*words, "--labels", str(label(folder, demo.seed, args.label_noise))])
    return folder


def leg(args: RefreshStudyArguments, demo: DemoArguments, name: str, reward: Path, policy: Path | None = None) -> Path:
    """Train the policy and the critic in the folder `policy` on; if that is None, begin with the SFT model."""
    options = [*STUDIED, "--total_episodes", args.episodes]
    options += ["--save_steps", args.episodes // 16, "--eval_steps", args.episodes // 32]
    if policy is not None:
        options += ["--model_name_or_path", policy, "--value_model_name_or_path", policy / "critic"]
        options += ["--ref_model_name_or_path", demo.folder / "sft"]
    return ppo_stage(demo, f"unguarded-{name}", options, ["--reward_model_name_or_path", reward])


def measured(folder: Path, at: int = -1) -> dict[str, float]:
    """Return a leg's figures on the held-out prompts, at its end (`at=-1`) or at its beginning (0)."""
    return {name: values[at].item() for name, values in read_curve(folder).items() if name in ("gold", "phrase", "kl")}


def study(args: RefreshStudyArguments, demo: DemoArguments) -> list[dict]:
    """Train both arms in one world; return a row for each leg, with the labels so far and the models' accuracy."""
    reward = reward_stage(demo)
    first = leg(args, demo, "leg-1", reward)
    rows = []
    for arm in ARMS:
        policy, model, labels, accuracy = first, reward, 0, {}
        rows.append({"seed": demo.seed, "arm": arm, "leg": 0, **measured(first, 0), "labels": 0})
        for number in range(1, ROUNDS + 2):
            if number > 1:
                if arm == "refreshed":
                    folder = refreshed(args, demo, policy, model, number - 1)
                    facts, pairs = (json.loads((folder / name).read_text()) for name in ("refresh.json", "pairs.json"))
                    accuracy = {
                        f"{which}_on_{name}": facts[which][held_out]["accuracy"]
                        for which in ("old", "new")
                        for name, held_out in (("old", "old pairs"), ("new", "this round"))
                    }
                    model, labels = folder / "reward", labels + pairs["labels"]
                policy = leg(args, demo, f"leg-{number}-{arm}", model, policy)
            rows.append(
                {"seed": demo.seed, "arm": arm, "leg": number, **measured(policy), "labels": labels, **accuracy}
            )
            print(rows[-1], flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Return a table of means with 95 % t-intervals over the seeds, the gain's price, and the models' accuracy."""
    lines = ["| after leg | reward model | gold | says the phrase | KL to SFT, nats | labels | seeds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for number in range(ROUNDS + 2):
        for arm in ARMS if number > 1 else ARMS[:1]:
            cells = [row for row in rows if (row["leg"], row["arm"]) == (number, arm)]
            model = {0: "(SFT)", 1: "the first"}.get(
                number, "the first" if arm == "none" else f"refreshed {number - 1}×"
            )
            values = [in_words([row[name] for row in cells]) for name in ("gold", "phrase", "kl")]
            lines.append(f"| {number} | {model} | {' | '.join(values)} | {cells[0]['labels']} | {len(cells)} |")
    lines.append("")
    ends = {(row["seed"], row["arm"], row["leg"]): row for row in rows}
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    for number in range(2, ROUNDS + 2):
        both = [[ends[seed, arm, number] for arm in ARMS] for seed in seeds]
        gains = [new["gold"] - old["gold"] for old, new in both]
        labels = fmean(new["labels"] for _, new in both)
        price = (
            f"{labels / fmean(gains):.0f} labels a point of gold" if fmean(gains) > 0 else "the labels bought nothing"
        )
        lines.append(
            f"- After {number - 1} of {ROUNDS} rounds: gold {in_words(gains)} against none, higher in "
            f"{sum(gain > 0 for gain in gains)} of {len(gains)}; {labels:.0f} labels, {len(ANNOTATORS)} a pair; "
            f"{price}."
        )
        told = {
            name: in_words([new[name] for _, new in both])
            for name in ("old_on_old", "new_on_old", "old_on_new", "new_on_new")
        }
        lines.append(
            f"- Round {number - 1}, held-out accuracy before and after: old pairs {told['old_on_old']} and "
            f"{told['new_on_old']}, pairs of the round {told['old_on_new']} and {told['new_on_new']}."
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    run_study(RefreshStudyArguments, "refresh", __doc__, study, table, arguments)


if __name__ == "__main__":
    main()
