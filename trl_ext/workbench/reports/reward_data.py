"""Load the data for testing a reward: pairs, best-of-n rows, rankings and a policy's answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from ...data import TrainedPairs, hashes_of_answers, is_text, load_dataset_split, pair_hashes, usable_pairs
from ...rewards import text_of
from ...runs import find

# If no columns are named, the accuracy is split by the values of these
GROUPS = ("topic", "subset", "source", "language", "annotator", "annotators")
_MINED = 5000  # most training pairs that phrases are mined from
_ROWS = 1000  # most answers of the policy that are scored
_NO_COLUMNS = {"prompt", "prompts", "chosen", "rejected", "completion", "completions", "completion_ids", "prompt_ids"}
_NO_COLUMNS |= {"responses", "ranks", "finished", "log_metric", "log_extra", "trainer_state"}


class Answer(NamedTuple):
    """
    Hold a prompt and an answer to it, text or messages; whether the answer is `finished`, not cut off; and the row's
    other `columns`, by name, for a reward function.
    """

    prompt: Any
    completion: Any
    finished: bool
    columns: dict[str, Any]

    def texts(self) -> tuple[str, str]:
        """Return the prompt and the answer as text; the text of messages is their contents."""
        return text_of(self.prompt), text_of(self.completion)


def answer_in(row: dict[str, Any], completion: Any, finished: bool = True) -> Answer:
    """
    Return `completion` as an [`Answer`] to the prompt of `row`; `finished` is False if it was cut off.

    Columns of the row other than prompts and answers are kept for the reward.
    """
    return Answer(row["prompt"], completion, finished, {k: v for k, v in row.items() if k not in _NO_COLUMNS})


Pair = tuple[Answer, Answer]  # the chosen answer, and the rejected one


@dataclass
class Material:
    """
    Hold the data on which a reward is tested.

    Args:
        pairs: the held-out pairs; several may share a prompt.
        train: pairs that the reward was trained on, in random order; empty if none are known.
        group_columns: columns of the pairs; the accuracy is compared between their values.
        trained_on: facts on the pairs that the reward was trained on. `is_known`: whether all of them are known.
            `left_out`: how many of the given pairs are among them. `with_a_trained_answer`: how many of the other
            given pairs share an answer with one of them.
        unknown: sentences for the report on what was left out, or is not known.
        policy: answers of the policy; empty if there are none.
        rankings: for each prompt a tuple of its answers and their ranks, 1 the best.
        best_of_n: for each prompt its answers, the chosen one first.
    """

    pairs: list[Pair]
    train: list[Pair]
    group_columns: list[str]
    trained_on: dict[str, Any]
    unknown: list[str]
    policy: list[Answer] = field(default_factory=list)
    rankings: list[tuple[list[Answer], list[float]]] = field(default_factory=list)
    best_of_n: list[list[Answer]] = field(default_factory=list)


def material_of(
    held_out: Dataset,
    train: Dataset | None,
    trained: TrainedPairs,
    group_columns: Sequence[str] | None = None,
    left_out: int = 0,
    seed: int = 0,
) -> Material:
    """
    Make the [`Material`] from held-out and training pairs.

    Args:
        held_out: usable pairs that the reward was not trained on.
        train: usable pairs that the reward was trained on. At most 5,000 of them are taken.
        trained: all pairs that the reward is known to have been trained on.
        group_columns: columns to compare the accuracy by; None takes those columns of `GROUPS` that the pairs have.
        left_out: number of given pairs that were left out, since the reward was trained on them.
        seed: seed for sampling training pairs.
    """
    if group_columns is None:
        group_columns = [name for name in GROUPS if name in held_out.column_names]
    held_out.select_columns([*group_columns])  # a typo fails here, not after hours of scoring
    hashes = pair_hashes(held_out)
    count = len(held_out)
    shared = int((trained.has_an_answer_of(hashes) & ~trained.has(hashes)).sum())
    said = {
        f"{left_out:,} of {left_out + count:,} pairs are left out: the reward was trained on them.": left_out,
        "It is not known which pairs the reward was trained on. If the tested pairs are among them, its figures are "
        "too good.": not trained.is_complete,
        f"{shared:,} of {count:,} pairs have an answer that is in a training pair, too: the model may remember "
        "it.": shared,
    }
    return Material(
        _answers(held_out),
        _answers(train.shuffle(seed=seed).select(range(min(len(train), _MINED)))) if train is not None else [],
        [*group_columns],
        {"is_known": trained.is_complete, "left_out": left_out, "with_a_trained_answer": shared},
        [sentence for sentence, is_so in said.items() if is_so],
    )


def _answers(pairs: Dataset) -> list[Pair]:
    from trl import extract_prompt

    rows = (row if "prompt" in row else {**row, **extract_prompt(row)} for row in pairs.to_list())
    return [(answer_in(row, row["chosen"]), answer_in(row, row["rejected"])) for row in rows]


def gather(args: Any, trained: TrainedPairs) -> Material:
    """
    Load the [`Material`] on which `trl-ext reward-report` tests a reward.

    Args:
        args: the command's arguments.
        trained: pairs that the reward is known to have been trained on; none of them counts as held out.

    Raises:
        ValueError: the reward was trained on all pairs; or some are unusable, see [`~trl_ext.data.usable_pairs`].
    """
    split = args.dataset_split or default_split(args.dataset_name)
    pairs, best_of_n, said = load_pairs(args.dataset_name, split, args.dataset_config, args.drop_unusable_pairs)
    train = _training_pairs(args, split)
    if train is not None and trained.is_complete:
        train = _selected(train, trained.has(pair_hashes(train)))
    elif train is not None:
        trained |= TrainedPairs.of(train)
    seen = trained.has(pair_hashes(pairs))
    if seen.all():
        raise ValueError(
            f"the reward was trained on all pairs ({len(pairs):,}): give others by `dataset_name` or `dataset_split`"
        )
    train = train or _selected(pairs, seen)
    held_out = pairs.select(np.flatnonzero(~seen))
    if args.max_pairs and args.max_pairs < len(held_out):
        held_out = held_out.shuffle(seed=args.seed).select(range(args.max_pairs))
    found = material_of(held_out, train, trained, args.group_columns, int(seen.sum()), args.seed)
    rankings = load_rankings(args.ranking_name) if args.ranking_name else []
    found.unknown += said
    found.best_of_n = [group for group in best_of_n if not _is_seen(group, trained)][: args.max_pairs]
    found.rankings = [(group, ranks) for group, ranks in rankings if not _is_seen(group, trained)]
    if count := len(rankings) - len(found.rankings):
        found.unknown.append(f"{count:,} of {len(rankings):,} rankings are left out: the reward was trained on them.")
    if args.policy_answers:
        file = args.policy_answers
        columns = ("prompt", "completion")
        rows = load_dataset_split(file, default_split(file), columns=columns)
        rows = rows.select(range(min(len(rows), _ROWS)))
        found.policy = [answer_in(row, row["completion"], bool(row.get("finished", True))) for row in rows]
    return found


def default_split(name: str) -> str:
    """Return `train` for a single file, and `test` for other datasets."""
    return "train" if find(name).is_file() else "test"


def _selected(pairs: Dataset, chosen: np.ndarray) -> Dataset | None:
    return pairs.select(np.flatnonzero(chosen)) if chosen.any() else None


def _is_seen(group: list[Answer], trained: TrainedPairs) -> bool:
    """Return whether any two answers of `group`, which are to one prompt, were trained on as a pair."""
    hashes = hashes_of_answers(group[0].prompt, [answer.completion for answer in group])
    return bool(trained.has(hashes).any())


def _training_pairs(args: Any, held_out: str) -> Dataset | None:
    """
    Load the usable training pairs: those that `args` name, or else the split `train` of the dataset to test on.

    If `args` name none, return None where that split does not exist, or is `held_out`, the split to test on.
    """
    name = args.train_name or args.dataset_name
    split = args.train_split or "train"
    is_named = args.train_name or args.train_split
    if (name, split) == (args.dataset_name, held_out) and not is_named:
        return None
    config = args.dataset_config if args.train_name is None else None
    try:
        train = load_dataset_split(name, split, config=config, columns=("chosen", "rejected"))
    except ValueError:
        if is_named:
            raise
        return None  # a folder with a held-out split alone
    return usable_pairs(train, f"the split {split!r} of the training pairs", True)


def load_pairs(name: str, split: str, config: str | None, drop: bool) -> tuple[Dataset, list[list[Answer]], list[str]]:
    """
    Load pairs. A row with several rejected answers becomes several pairs, and also a best-of-n row.

    Args:
        name: file, folder or hub name.
        split: split to load.
        config: configuration of a hub dataset.
        drop: whether to leave out unusable pairs and print how many there are, instead of raising.

    Returns:
        - the usable pairs;
        - for each best-of-n row its answers, the chosen one first;
        - a list with a sentence on how many rows have several chosen answers; these rows are left out. [] if none has.
    """
    dataset = load_dataset_split(name, split, config=config, columns=("chosen", "rejected"))
    first = next((value for value in dataset["rejected"] if value), None)
    if not isinstance(first, list) or is_text(first):  # a list of messages is one answer, not a list of answers
        return usable_pairs(dataset, f"the split {split!r}", drop), [], []
    rows = []
    best = []
    several = 0
    for row in dataset:
        chosen = row["chosen"]
        if not isinstance(chosen, list) or is_text(chosen):
            chosen = [chosen]
        if len(chosen) > 1:
            several += 1
            continue
        rejected = row["rejected"] or []
        if rejected:
            best.append([answer_in(row, answer) for answer in (*chosen, *rejected)])
        rows += [{**row, "chosen": chosen[0], "rejected": other} for other in rejected or [None]]
    said = [f"Rows with several chosen answers are left out ({several:,} of {len(dataset):,})."] if several else []
    return usable_pairs(Dataset.from_list(rows), f"the split {split!r}", drop), best, said


def load_rankings(name: str) -> list[tuple[list[Answer], list[float]]]:
    """
    Return a tuple of the answers and their ranks for each row.

    Args:
        name: a dataset with the columns `prompt`, `responses` (a list of answers) and `ranks` (one number for each
            answer; 1 is the best).
    """
    rows = load_dataset_split(name, default_split(name), columns=("prompt", "responses", "ranks"))
    return [([answer_in(row, answer) for answer in row["responses"]], [*map(float, row["ranks"])]) for row in rows]
