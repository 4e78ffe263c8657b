"""Load the data for testing a reward: pairs, best-of-n rows, rankings and a policy's answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from ...data import (
    TrainedPairs,
    check_texts,
    has_content,
    hashes_of_answers,
    is_text,
    load_dataset_split,
    pair_hashes,
    usable_pairs,
)
from ...rewards import text_of
from ...runs import find, is_finite_number

# If no columns are named, the accuracy is split by the values of these
GROUPS = ("topic", "subset", "source", "language", "annotator", "annotators")
_MINED = 20_000  # most training pairs that phrases are mined from
_NO_COLUMNS = {"prompt", "prompts", "chosen", "rejected", "completion", "completions", "completion_ids", "prompt_ids"}
_NO_COLUMNS |= {"responses", "ranks", "finished", "log_metric", "log_extra", "trainer_state"}


@dataclass
class Answers:
    """Hold prompts and their answers, as text or messages, with the columns that a reward function reads."""

    prompts: list[Any] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    columns: list[dict[str, Any]] = field(default_factory=list)

    def add(self, prompt: Any, completion: Any, finished: bool = True, row: dict[str, Any] | None = None) -> None:
        """Add one answer. Columns of its `row` that hold no prompt or answer are kept for the reward function."""
        self.prompts.append(prompt)
        self.completions.append(completion)
        self.finished.append(finished)
        self.columns.append({name: value for name, value in (row or {}).items() if name not in _NO_COLUMNS})

    def extend(self, other: "Answers") -> None:
        """Add the answers of another set."""
        for name, values in vars(self).items():
            values.extend(getattr(other, name))

    def texts(self) -> list[tuple[str, str]]:
        """Return (prompt, answer) for each answer, both as text; the text of messages is their contents."""
        return [(text_of(p), text_of(c)) for p, c in zip(self.prompts, self.completions, strict=True)]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass
class TrainedOn:
    """
    Say what is known of the pairs that a reward was trained on.

    Args:
        is_known: whether all training pairs are known, so that any other pair is held out.
        left_out: number of given pairs that were left out since the reward was trained on them.
        with_a_trained_answer: number of the other given pairs with an answer that occurs in a training pair.
    """

    is_known: bool = False
    left_out: int = 0
    with_a_trained_answer: int = 0


@dataclass
class Material:
    """
    Hold the data on which a reward is tested.

    Args:
        chosen, rejected: the answers of each held-out pair; several pairs may share a prompt.
        groups: column → its value for each pair; the accuracy is compared between these values.
        train_chosen, train_rejected: the answers of each training pair; empty if there are none.
        mined: two lists of texts, chosen and rejected answers, from which phrases for probes are mined.
        policy: answers of the policy; empty if there are none.
        rankings: for each prompt its answers and their ranks, 1 the best.
        best_of_n: for each prompt its answers, the chosen one first.
        trained_on: what is known of the pairs that the reward was trained on.
        unknown: sentences for the report on what was left out, or is not known.
    """

    chosen: Answers = field(default_factory=Answers)
    rejected: Answers = field(default_factory=Answers)
    groups: dict[str, list[Any]] = field(default_factory=dict)
    train_chosen: Answers = field(default_factory=Answers)
    train_rejected: Answers = field(default_factory=Answers)
    mined: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    policy: Answers = field(default_factory=Answers)
    rankings: list[tuple[Answers, list[float]]] = field(default_factory=list)
    best_of_n: list[Answers] = field(default_factory=list)
    trained_on: TrainedOn = field(default_factory=TrainedOn)
    unknown: list[str] = field(default_factory=list)


def split_of(name: str, split: str | None) -> str:
    """Return `split`; if it is None, return `train` for a single file and `test` for other data sets."""
    return split or ("train" if find(name).is_file() else "test")


def material_of(
    held_out: Dataset,
    train: Dataset | None = None,
    group_columns: Sequence[str] | None = None,
    *,
    train_rows: int = 1000,
    seed: int = 0,
) -> Material:
    """
    Make the [`Material`] from held-out and training pairs.

    Args:
        held_out: usable pairs that the reward was not trained on.
        train: usable pairs that the reward was trained on; without them phrases are mined from the held-out pairs.
        group_columns: columns to compare the accuracy by; None takes those columns of `GROUPS` that the pairs have.
        train_rows: most training pairs that are scored.
        seed: seed for drawing training pairs.

    Raises:
        ValueError: the held-out pairs lack one of the `group_columns`.
    """
    wanted = [name for name in GROUPS if name in held_out.column_names] if group_columns is None else group_columns
    if missing := [name for name in wanted if name not in held_out.column_names]:
        raise ValueError(
            f"`group_columns`: the held-out pairs have no column {missing[0]!r}; they have "
            f"{', '.join(map(repr, held_out.column_names))}"
        )
    found = Material(groups={name: list(held_out[name]) for name in wanted})
    for row in held_out.to_list():
        _add_pair(found.chosen, found.rejected, row)
    if train is not None:
        drawn = train.shuffle(seed=seed).select(range(min(len(train), max(train_rows, _MINED))))
        sides = Answers(), Answers()
        for row in drawn.to_list():
            _add_pair(*sides, row)
        found.mined = ([text for _, text in sides[0].texts()], [text for _, text in sides[1].texts()])
        for part, side in zip((found.train_chosen, found.train_rejected), sides, strict=True):
            part.extend(Answers(*(values[:train_rows] for values in vars(side).values())))
    else:
        found.mined = ([text for _, text in found.chosen.texts()], [text for _, text in found.rejected.texts()])
    return found


def _add_pair(chosen: Answers, rejected: Answers, row: dict[str, Any]) -> None:
    from trl import extract_prompt

    pair = row if "prompt" in row else {**row, **extract_prompt(row)}  # the answers contain the prompt
    chosen.add(pair["prompt"], pair["chosen"], True, row)
    rejected.add(pair["prompt"], pair["rejected"], True, row)


def held_out_part(
    pairs: Dataset, train: Dataset | None, trained: TrainedPairs, is_named: bool
) -> tuple[Dataset, Dataset | None, TrainedPairs, TrainedOn, list[str]]:
    """
    Leave out the pairs that the reward was trained on.

    Args:
        pairs: usable pairs to measure on.
        train: usable pairs that the reward may have been trained on. If all training pairs are known, pairs of `train`
            that are not among them are left out; else all of `train` count as trained on.
        trained: the pairs that the reward is known to have been trained on.
        is_named: whether the user named `train`, so that a sentence says how much of it is left out; else it was found
            beside `pairs`.

    Returns:
        Five values:

        - the held-out pairs: `pairs` without those that were trained on.
        - the training pairs: what is left of `train`, or else the part of `pairs` that was trained on, or else None.
        - all pairs that count as trained on.
        - what is known of the training pairs.
        - sentences for the report on what was left out, and on what is not known.

    Raises:
        ValueError: the reward was trained on all `pairs`.
    """
    said = []
    if train is not None and trained.is_complete:
        is_trained = trained.has(pair_hashes(train))
        if is_named and not is_trained.all():
            others = f"{(~is_trained).sum():,} of {len(train):,} named training pairs"
            said.append(f"{others} are left out: they were not trained on.")
        train = train.select(np.flatnonzero(is_trained)) if is_trained.any() else None
    elif train is not None:
        trained |= TrainedPairs.of(train)
    hashes = pair_hashes(pairs)
    seen = trained.has(hashes)
    if seen.all():
        raise ValueError(
            f"all {len(pairs):,} pairs were trained on: give others, such as the split that was held out, by "
            "`dataset_name` and `dataset_split`"
        )
    known = TrainedOn(trained.is_complete, int(seen.sum()), int((trained.has_an_answer_of(hashes) & ~seen).sum()))
    said += sentences_on(known, len(pairs))
    if train is None and seen.any():
        train = pairs.select(np.flatnonzero(seen))
    return pairs.select(np.flatnonzero(~seen)) if seen.any() else pairs, train, trained, known, said


def sentences_on(known: TrainedOn, given: int) -> list[str]:
    """
    Return sentences for the report on the pairs that the reward was trained on.

    Args:
        known: what is known of the training pairs.
        given: number of given pairs, with those that were left out.
    """
    said, left = [], given - known.left_out
    if known.left_out:
        said.append(f"{known.left_out:,} of {given:,} pairs are left out: they were trained on.")
    if not known.is_known:
        said.append(
            "It is not known which pairs the reward was trained on. If these are among them, its figures are too good."
        )
    if known.with_a_trained_answer:
        said.append(
            f"{known.with_a_trained_answer:,} of {left:,} pairs have an answer that is in a training pair, too: the "
            "model may remember it."
        )
    return said


def not_seen(
    groups: Sequence[Any], trained: TrainedPairs, what: str, said: list[str], is_named: bool = True
) -> list[Any]:
    """
    Return `groups` without the prompts that have both answers of a training pair.

    Args:
        groups: for each prompt its answers, or a tuple whose first element is the answers.
        trained: the pairs that the reward was trained on.
        what: name of the groups, for messages.
        said: list of sentences for the report, to which a sentence on the removed prompts is added.
        is_named: whether the user named this data, so that at least one prompt must remain.

    Raises:
        ValueError: the user named this data, and no prompt remains.
    """
    kept = []
    for group in groups:
        answers = group[0] if isinstance(group, tuple) else group
        if not trained.has(hashes_of_answers(answers.prompts[0], answers.completions)).any():
            kept.append(group)
    if is_named and groups and not kept:
        raise ValueError(f"all {len(groups):,} {what} were trained on: give others, or leave them out")
    if len(kept) < len(groups):
        said.append(f"{len(groups) - len(kept):,} of {len(groups):,} {what} are left out: they were trained on.")
    return kept


def load_pairs(name: str, split: str, config: str | None, drop: bool) -> tuple[Dataset, list[Answers], list[str]]:
    """
    Load pairs. A row with several rejected answers becomes a pair for each of them, and a best-of-n row, too.

    Args:
        name: file, folder or hub name.
        split: split to load.
        config: configuration of a hub data set.
        drop: whether to leave out rows that are no usable pairs, instead of raising.

    Returns:
        Three values: the usable pairs; the best-of-n rows, the chosen answer first; sentences on what was left out.

    Raises:
        ValueError: the data cannot be read, or some rows are no usable pairs and `drop` is False.
    """
    dataset = load_dataset_split(name, split, config=config, columns=("chosen", "rejected"))
    if not _has_several(dataset):
        return usable_pairs(dataset, f"the split {split!r}", drop), [], []
    rows, best, several = [], [], 0
    for place, row in enumerate(dataset):
        chosen, others = row["chosen"], row["rejected"]
        if isinstance(chosen, list) and chosen and all(is_text(each) for each in chosen):
            several += len(chosen) > 1
            if len(chosen) > 1:
                continue
            chosen = chosen[0]
        if not isinstance(others, list) or not others or not all(has_content(each) for each in [chosen, *others]):
            raise ValueError(
                f"dataset {name!r}: row {place} must have a chosen answer and a list of rejected ones, none empty; "
                "correct or leave out such rows"
            )
        if not is_text(row.get("prompt")):
            raise ValueError(
                f"dataset {name!r}: row {place} of a list of rejected answers needs a text or messages as `prompt`"
            )
        best.append(Answers())
        for answer in (chosen, *others):
            best[-1].add(row["prompt"], answer, True, row)
        rows += [{**row, "chosen": chosen, "rejected": other} for other in others]
    if not rows:
        raise ValueError(f"dataset {name!r} has no row with one chosen answer and several rejected ones")
    said = [f"{several:,} rows with several chosen answers are left out."] if several else []
    return usable_pairs(Dataset.from_list(rows), f"the split {split!r}", drop), best, said


def _has_several(dataset: Dataset) -> bool:
    """Return whether a row has a list of rejected answers. A list of messages is one answer, not a list of answers."""
    first = next((value for value in dataset["rejected"] if value), None)
    return isinstance(first, list) and not is_text(first) and is_text(first[0])


def load_rankings(name: str, split: str) -> list[tuple[Answers, list[float]]]:
    """
    Load rankings: a table with `prompt`, `responses` (a list) and `ranks` (as many numbers, 1 the best).

    Returns:
        For each row its answers and their ranks.

    Raises:
        ValueError: a column is missing, or a row is of another form.
    """
    dataset = load_dataset_split(name, split, columns=("prompt", "responses", "ranks"))
    check_texts(dataset, ("prompt",), f"dataset {name!r}")
    found = []
    for place, row in enumerate(dataset):
        answers, ranks = row["responses"], row["ranks"]
        are_lists = isinstance(answers, list) and isinstance(ranks, list) and len(answers) == len(ranks) >= 2
        if not (are_lists and all(map(is_text, answers)) and all(map(is_finite_number, ranks))):
            raise ValueError(
                f"dataset {name!r}: row {place} must have two or more `responses` and as many numbers as `ranks`, "
                f"got {repr(answers)[:60]} and {repr(ranks)[:60]}"
            )
        found.append((Answers(), list(map(float, ranks))))
        for answer in answers:
            found[-1][0].add(row["prompt"], answer, True, row)
    return found


def load_answers(name: str, most: int) -> Answers:
    """
    Load a policy's answers: a table with `prompt`, `completion` and maybe `finished`, as `trl-ext generate` writes it.

    Args:
        name: file, folder or hub name.
        most: rows to take from the beginning.

    Raises:
        ValueError: a column is missing, or holds no text.
    """
    dataset = load_dataset_split(name, split_of(name, None), columns=("prompt", "completion"))
    dataset = dataset.select(range(min(len(dataset), most)))
    check_texts(dataset, ("prompt", "completion"), f"dataset {name!r}")
    found = Answers()
    for row in dataset:
        found.add(row["prompt"], row["completion"], bool(row.get("finished", True)), row)
    return found


def sample_answers(policy: str, prompts: Sequence[Any], max_new_tokens: int | None, seed: int) -> Answers:
    """
    Sample a policy's answer to each prompt, at temperature 1.

    Args:
        policy: folder or hub name of a causal language model, or of an adapter.
        prompts: texts or messages.
        max_new_tokens: tokens after which an answer is cut off; None takes 256, or fewer if the context has less room.
        seed: seed of the sampling.

    Raises:
        ValueError: a prompt leaves no room for an answer.
    """
    from ...models import answer_texts, eos_token_ids, load_model, load_tokenizer, prompt_token_ids, sample
    from ...upstream import is_conversational

    model, tokenizer = load_model(policy), load_tokenizer(policy)
    ids, ends = prompt_token_ids(tokenizer, prompts), eos_token_ids(model, tokenizer)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = context - max(map(len, ids)) if context else 256
    if room < (max_new_tokens or 1):
        raise ValueError(
            f"`policy` {policy} has a context of {context} tokens, and the longest prompt leaves room for {room}: "
            "lower `max_new_tokens`, or give answers by `policy_answers`"
        )
    drawn = sample(model, ids, ends, max_new_tokens=max_new_tokens or min(room, 256), batch_size=16, seed=seed)
    found = Answers()
    for prompt, answer, said in zip(prompts, drawn, answer_texts(tokenizer, drawn, ends), strict=True):
        is_chat = is_conversational({"prompt": prompt})
        completion = [{"role": "assistant", "content": said}] if is_chat else said
        found.add(prompt, completion, bool(answer) and answer[-1] in ends)
    return found


def distinct_prompts(answers: Answers, most: int) -> list[Any]:
    """Return the first `most` different prompts."""
    return [*{text_of(prompt): prompt for prompt in answers.prompts}.values()][:most]
