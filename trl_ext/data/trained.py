"""Record which pairs and prompts a model was trained on, as hashes in small files in the model's folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..evaluation.words import normalised, text_hash
from ..runs.files import PRIVATE_FOLDER, whole_file
from .messages import content_of, is_messages, is_text, without_system

TRAINED_PAIRS = "trained_pairs.npz"
TRAINED_PROMPTS = "trained_prompts.npy"
_NO_PAIRS = np.zeros((0, 2), np.uint64)


@dataclass(frozen=True)
class TrainedPairs:
    """
    Hold the pairs that a model was trained on, as hashes.

    Each completion is kept as a hash of 64 bits, so a pair takes 16 bytes. Texts that differ only in case or white
    space count as the same, and so do pairs that differ only in which completion is the chosen one.

    Args:
        pairs: (N, 2) hashes of each pair's two completions, each hashed with the prompt. The smaller hash comes first,
            and each pair occurs once.
        is_complete: True if these are all pairs that the model was ever trained on, including those of earlier runs.
    """

    pairs: np.ndarray = field(default_factory=lambda: _NO_PAIRS)
    is_complete: bool = True

    @classmethod
    def of(cls, *datasets: Dataset) -> "TrainedPairs":
        """Return the pairs of these datasets, hashed by [`pair_hashes`]."""
        return cls(np.unique(np.concatenate([_NO_PAIRS, *map(pair_hashes, datasets)]), axis=0))

    def __or__(self, other: "TrainedPairs") -> "TrainedPairs":
        """Return the union of this and another set of pairs; it is complete if both are complete."""
        pairs = np.unique(np.concatenate([self.pairs, other.pairs]), axis=0)
        return TrainedPairs(pairs, self.is_complete and other.is_complete)

    def __len__(self) -> int:
        return len(self.pairs)

    def has(self, pairs: np.ndarray) -> np.ndarray:
        """Return for each of M pairs, (M, 2) hashes of their completions, whether it was trained on: (M,) bool."""
        known = set(map(tuple, self.pairs.tolist()))
        return np.array([tuple(pair) in known for pair in pairs.tolist()], bool)

    def has_an_answer_of(self, pairs: np.ndarray) -> np.ndarray:
        """
        Return for each of M pairs, (M, 2) hashes of their completions, whether one of its completions was trained on,
        in any pair: (M,) bool.
        """
        return np.asarray(np.isin(pairs, self.pairs).any(1))

    def save(self, folder: str | Path, is_uploaded: bool = False) -> None:
        """
        Write the pairs to a file in a model's folder, atomically.

        If the folder is uploaded to the hub (`is_uploaded`), the file is in the subfolder `_run`, which is not
        uploaded.
        """
        path = _place(folder, TRAINED_PAIRS, is_uploaded)
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, pairs=self.pairs, is_complete=self.is_complete)

    @classmethod
    def load(cls, folder: str | Path) -> "TrainedPairs | None":
        """Load the pairs from a model's folder; None if the folder has no such file."""
        if (path := _found(folder, TRAINED_PAIRS)) is None:
            return None
        with np.load(path, allow_pickle=False) as found:
            return cls(found["pairs"], bool(found["is_complete"]))


def pair_hashes(dataset: Dataset) -> np.ndarray:
    """
    Hash both completions of each pair, together with the prompt.

    Args:
        dataset: rows with `chosen` and `rejected`, text or messages, and with `prompt` unless `chosen` and `rejected`
            contain it.

    Returns:
        (N, 2) unsigned hashes of 64 bits, the smaller one of each pair first.
    """
    names = [name for name in ("prompt", "chosen", "rejected") if name in dataset.column_names]
    hashes = [
        [completion_hash(row.get("prompt"), row[name]) for name in ("chosen", "rejected")]
        for row in dataset.select_columns(names)
    ]
    return np.sort(np.array(hashes, np.uint64).reshape(-1, 2), axis=1)


def not_trained_on(held_out: Dataset, trained: TrainedPairs) -> Dataset:
    """
    Return the pairs of `held_out` without those that were trained on.

    Raises:
        ValueError: all held-out pairs were trained on.
    """
    seen = trained.has(pair_hashes(held_out))
    if seen.all():
        raise ValueError(
            f"the model was trained on every held-out pair ({len(seen):,} in all): hold out pairs that it has not seen"
        )
    return held_out.select(np.flatnonzero(~seen)) if seen.any() else held_out


def completion_hash(prompt: Any, completion: Any) -> int:
    """
    Hash a prompt with its completion, texts or messages. One of them may be None, such as the prompt of a completion
    that contains it.

    Only the text is hashed: a string, a message with that string, and a message with that string in a content block
    have the same hash.
    """
    parts = [part for part in (prompt, completion) if part is not None]
    text = "".join(part if isinstance(part, str) else "".join(map(content_of, part)) for part in parts)
    return text_hash(normalised(text))


def hashes_of_answers(prompt: Any, answers: Sequence[Any]) -> np.ndarray:
    """Hash all K pairs that the completions of one prompt form; return (K, 2) hashes, the smaller hash first."""
    hashes = np.array([completion_hash(prompt, completion) for completion in answers], np.uint64)
    one, other = np.triu_indices(len(hashes), 1)
    return np.sort(np.stack([hashes[one], hashes[other]], 1), axis=1)


def prompt_of(row: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    """
    Return the prompt of a row, text or messages: the column `prompt`, or the messages before the last one in
    `messages` or `chosen`; None if there are none.
    """
    if (prompt := row.get("prompt")) and is_text(prompt):
        return prompt
    turns: Any = row.get("messages") or row.get("chosen")
    return (turns[:-1] or None) if is_messages(turns) else None


def first_prompts(rows: Any, count: int) -> list[str | list[dict[str, Any]]]:
    """Return the prompts of the first `count` rows of a list, dataset or stream; leave out rows without a prompt."""
    return [prompt for row in islice(rows or (), count) if (prompt := prompt_of(row)) is not None]


def prompt_hashes(dataset: Dataset) -> np.ndarray:
    """
    Hash the prompt of each row: (N,) unsigned hashes of 64 bits, 0 for a row whose prompt is not known.

    The prompt is in the column `prompt`; or it is the messages before the last one in `messages` or `chosen`. A system
    message is left out, unless the prompt has nothing else.
    """
    names = [name for name in ("prompt", "messages", "chosen") if name in dataset.column_names]
    if not names:
        return np.zeros(len(dataset), np.uint64)
    prompts = map(prompt_of, dataset.select_columns(names))
    asked = [(without_system(prompt) or prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
    return np.array([0 if prompt is None else completion_hash(prompt, None) for prompt in asked], np.uint64)


def save_trained_prompts(folder: str | Path, rows: Any, start: str | None = None, is_uploaded: bool = False) -> None:
    """
    Write hashes of the prompts that a run trains on to a file in the run's folder.

    Args:
        folder: output directory of the run. The file of an earlier run in it is deleted, even if no new one is
            written.
        rows: training rows. Nothing is written if they are a stream, or if the prompt of any row is not known.
        start: the model that the run starts from. If its folder has hashes of the prompts that it was trained on, they
            are added.
        is_uploaded: whether the folder is uploaded to the hub. If so, the file is in the subfolder `_run`, which is
            not uploaded.
    """
    before = load_trained_prompts(start) if start else None  # read first: it may be the file that is deleted below
    path = _place(folder, TRAINED_PROMPTS, is_uploaded)
    # Hashes are sorted: a first one of 0 says that some prompt is unknown
    if isinstance(rows, Dataset) and len(rows) and (hashes := np.unique(prompt_hashes(rows)))[0]:
        save_prompt_hashes(path.parent, hashes if before is None else np.union1d(hashes, before))


def save_prompt_hashes(folder: str | Path, hashes: np.ndarray) -> None:
    """Write hashes of prompts, (N,) as [`prompt_hashes`] returns them, to a file in a folder, atomically."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with whole_file(Path(folder, TRAINED_PROMPTS)) as temporary, temporary.open("wb") as file:
        np.save(file, hashes)


def load_trained_prompts(folder: str | Path) -> np.ndarray | None:
    """
    Return the (N,) hashes of the prompts that a run's model was trained on, see [`prompt_hashes`]; None if there are
    none.

    Args:
        folder: output directory of the run, or one of its checkpoints.
    """
    path = _found(folder, TRAINED_PROMPTS)
    if path is None and Path(folder).name.startswith("checkpoint-"):
        path = _found(Path(folder).parent, TRAINED_PROMPTS)
    return None if path is None else np.load(path, allow_pickle=False)


def _place(folder: str | Path, name: str, is_uploaded: bool) -> Path:
    """Return the path for a new file, after making its folder and deleting the file of an earlier run."""
    while earlier := _found(folder, name):
        earlier.unlink()
    path = Path(folder, PRIVATE_FOLDER if is_uploaded else "", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _found(folder: str | Path, name: str) -> Path | None:
    places = (Path(folder, place, name) for place in ("", PRIVATE_FOLDER))
    return next(filter(Path.is_file, places), None)
