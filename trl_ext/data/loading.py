"""Load one split of a dataset from a file, a folder or the Hugging Face hub."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict, ReadInstruction, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from ..runs.nearest import near_path
from ..runs.shipped import find
from .splits import hold_out_prompts

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_dataset_split(
    name: str | os.PathLike[str],
    split: str = "train",
    *,
    config: str | None = None,
    columns: Sequence[str] = ("prompt",),
) -> Dataset:
    """Load one split of a dataset and check that it has the columns that a trainer needs.

    A single file is one split, `train`. In a folder of files the splits come from the files' names, as on the hub:
    `train.jsonl`, `test.jsonl`. All columns are kept: reward functions receive those that the trainer does not use.

    Args:
        name: a `.jsonl`, `.json`, `.parquet` or `.csv` file; a folder of such files; a folder written by
            `save_to_disk`; a folder that ships with the package, such as `recipes/tinystories/prompts`; or else a
            dataset on the Hugging Face hub.
        split: name of the split, or a part of it, such as `train[:50%]` or `train[1000:]`.
        config: configuration of a hub dataset (`name` in `datasets.load_dataset`).
        columns: columns that must be there, such as `("prompt", "chosen", "rejected")`.

    Raises:
        FileNotFoundError: there is no such dataset, neither locally nor on the hub.
        ValueError: the file type, split or column is unknown: the message lists those that exist. Or a file cannot be
            read, or is not UTF-8: the message names the line.
    """
    splits = _load_splits(find(name), str(name), config)
    whole, _, part = split.partition("[")
    if whole not in splits:
        raise ValueError(f"dataset {str(name)!r} has no split {whole!r}; it has {', '.join(map(repr, splits))}")
    dataset = splits[whole]
    if part:
        try:
            (rows,) = ReadInstruction.from_spec(split).to_absolute({whole: len(dataset)})
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"{split!r} is not a part of a split: write it as 'train[:50%]' or 'train[10:20]'"
            ) from error
        dataset = dataset.select(range(rows.from_, rows.to))
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ValueError(
            f"dataset {str(name)!r}, split {split!r}, lacks the column(s) {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, dataset.column_names))}. Rename one with `Dataset.rename_column`."
        )
    return dataset


def held_out_rows(
    train: Dataset, load_held_out: Callable[[], Dataset], eval_size: int | None, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and the rows to evaluate on or None.

    Args:
        train: the training split.
        load_held_out: loads the held-out split; called only if `eval_size` is None.
        eval_size: about how many rows to cut from the training split for evaluation, see [`hold_out_prompts`]. 0: no
            evaluation. None: evaluate on the held-out split.
        seed: seed of the random cut.

    Raises:
        ValueError: there is no held-out split, or `eval_size` leaves nothing to train on.
    """
    if eval_size is None:
        try:
            return train, load_held_out()
        except ValueError as error:
            raise ValueError(f"{error}; or set `eval_size` to hold out rows of the training split") from error
    return hold_out_prompts(train, eval_size, seed)


def _load_splits(path: Path, name: str, config: str | None) -> dict[str, Dataset]:
    is_saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if path.is_file() and path.suffix not in _BUILDERS:
        raise ValueError(f"dataset file {name!r} ends in {path.suffix!r}; it must end in {', '.join(_BUILDERS)}")
    if config is not None and (path.is_file() or is_saved):
        raise ValueError(f"dataset {name!r} is local and has no configurations: leave out {config!r}")
    if path.exists():
        try:
            splits = _load_local(path, config, is_saved)
            for dataset in splits.values():
                dataset.data.validate(full=True)  # Arrow reads a file without looking whether it is UTF-8
        except (ValueError, OSError, DatasetsError, StopIteration) as error:
            raise ValueError(f"dataset {name!r} cannot be read: {_why(path, error)}") from error
        for dataset in splits.values():
            (first, *others) = dataset.column_names or [""]
            if path.suffix == ".csv" and not others and (found := re.search("[;\t|]", first)):
                raise ValueError(f"dataset {name!r} separates its columns by {found[0]!r}: save it with commas")
        return splits
    # A hub name is `name` or `owner/name`; anything else can only have been meant as a path.
    if path.suffix in _BUILDERS or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"dataset {name!r}: no such file or folder{near_path(path)}; the working directory is {Path.cwd()}"
        )
    try:
        return load_dataset(name, name=config)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"dataset {name!r}: no such file or folder in {Path.cwd()}{near_path(path)}, and no such dataset on the "
            f"hub: {error}"
        ) from error


def _load_local(path: Path, config: str | None, is_saved: bool) -> dict[str, Dataset]:
    if path.is_file():
        return load_dataset(_BUILDERS[path.suffix], data_files=str(path))
    if is_saved:
        saved = load_from_disk(str(path))
        return saved if isinstance(saved, DatasetDict) else {"train": saved}
    return load_dataset(str(path.resolve()), name=config)  # a bare "." has no name to derive a builder from


def _why(path: Path, error: BaseException) -> str:
    """Return why a file cannot be read: the first line at fault and what is wrong with it, or else `error`'s cause."""
    for file in [path] if path.is_file() else sorted(path.glob("*.json*")):
        if file.suffix == ".jsonl":
            with open(file, "rb") as rows:
                for number, row in enumerate(rows, 1):
                    try:
                        json.loads(row.strip() or b"0")
                    except UnicodeDecodeError:
                        return (
                            f"line {number} of {file.name} is not UTF-8, {row[:60]!r}: convert the file, for example "
                            "with `iconv -f latin1 -t utf-8`"
                        )
                    except ValueError:
                        return f"line {number} of {file.name} is not valid JSON, {row[:60]!r}"
    while error.__cause__ or (error.__context__ and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    if "Invalid UTF8" in str(error):
        return "it holds text that is not UTF-8: convert the file, for example with `iconv -f latin1 -t utf-8`"
    # What `datasets` raises for files without a row
    is_empty = isinstance(error, StopIteration) or "corresponds to no data" in str(error)
    return "it has no rows" if is_empty else str(error)
