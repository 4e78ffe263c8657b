"""Load or sample pairs of answers, choose the pairs that people label, and read people's choices."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ...data import answers_alone, check_texts, has_content, load_dataset_split, write_rows
from ...rewards import text_of
from ...runs import write_text
from ..labels.labelling import LABEL_STUDIO_CONFIG, answer_key, argilla_records, label_studio_tasks, read_choices
from ..reports.answers import Sampling, answers_of, free

TEXTS = ("prompt", "response_a", "response_b")


def load_pairs(name: str, split: str, keep: Sequence[str], left_out: Counter[str]) -> list[dict[str, Any]]:
    """
    Return the distinct pairs of a table.

    Args:
        name: a file, a folder or a hub name, with the columns `prompt`, `response_a`, `response_b` and, if wanted,
            `item`, the pair's name.
        split: split to load.
        keep: further columns to keep.
        left_out: counts the rows that are left out, by reason; this function adds to it.

    Returns:
        A dict for each pair, with `prompt`, `response_a`, `response_b`, the columns `keep`, `key`, a hash of the
        texts, and `item`, which is the key if the table has no such column.

    Raises:
        ValueError: a column or a text is missing, or two pairs have the same `item`.
    """
    table = answers_alone(load_dataset_split(name, split, columns=(*TEXTS, *keep)), f"`pairs` {name}", TEXTS)
    check_texts(table, TEXTS, f"`pairs` {name}")
    names = [*TEXTS, *keep, *{"item"}.intersection(table.column_names)]
    rows = _different(({column: row[column] for column in names} for row in table), left_out)
    item, count = Counter(row["item"] for row in rows).most_common(1)[0] if rows else ("", 0)
    if count > 1:
        raise ValueError(f"`pairs` {name}: {count} different pairs have the item {item!r}: give each a unique `item`")
    return rows


def _different(rows: Any, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return distinct pairs with `item` and `key`; count rows with empty, equal or repeated texts in `left_out`."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        prompt, *answers = (row[name] for name in TEXTS)
        key = answer_key(prompt, answers)
        if not (prompt and all(map(has_content, answers))):
            left_out["with an empty text"] += 1
        elif text_of(answers[0]) == text_of(answers[1]):
            left_out["with the same answer twice"] += 1
        elif key in found:
            left_out["given twice"] += 1
        else:
            found[key] = {**row, "item": str(row.get("item", key)), "key": key}
    return list(found.values())


def sample_pairs(prompts: Dataset, args: Any, folder: Path, left_out: Counter[str]) -> list[dict[str, Any]]:
    """
    Have policies answer prompts, and pair the answers to a prompt at random, each answer at most once.

    If the folder has answers of the same policy to the same prompts with the same sampling, these are used.

    Args:
        prompts: dataset with the column `prompt`.
        args: arguments of `trl-ext label`.
        folder: where answers are written.
        left_out: counts the pairs that are left out, by reason; this function adds to it.

    Returns:
        Rows as [`load_pairs`] returns them, with `policy_a` and `policy_b`, the policies that wrote the two answers.
    """
    answers: list[tuple[str, list[dict[str, Any]]]] = []
    for place, policy in enumerate(args.policies):
        for number in range(args.num_samples):
            same = {
                name: getattr(args, name) for name in ("max_completion_length", "temperature", "batch_size", "dtype")
            }
            sampling = Sampling(**same, top_p=1.0, seed=args.seed + number, use_cpu=args.use_cpu)
            rows, was_there = answers_of(policy, prompts, sampling, folder / f"{place}-{number}.jsonl")
            print(f"{policy}: {len(rows)} answers{', read from an earlier run' * was_there}", flush=True)
            answers.append((policy, rows))
            free()

    def drawn() -> Any:
        for place, row in enumerate(prompts):
            order = np.random.default_rng([args.seed, place]).permutation(len(answers))
            for a, b in zip(order[::2], order[1::2], strict=False):
                (policy_a, of_a) = answers[a]
                (policy_b, of_b) = answers[b]
                texts = (row["prompt"], of_a[place]["completion"], of_b[place]["completion"])
                kept = {name: row[name] for name in args.keep_columns or ()}
                yield {**kept, **dict(zip(TEXTS, texts, strict=True)), "policy_a": policy_a, "policy_b": policy_b}

    return _different(drawn(), left_out)


def write_for_people(folder: Path, rows: Sequence[dict[str, Any]], size: int, seed: int) -> None:
    """
    Write at most `size` rows for people to label: for Label Studio (`label_studio.json` and `.xml`), for Argilla
    (`argilla.jsonl`) and as JSON lines (`people.jsonl`).

    The rows are chosen by hashes of their keys and `seed`, so their order does not matter.
    """
    drawn = sorted(rows, key=lambda row: answer_key(row["key"], None, seed))[:size]
    shown = [{name: row[name] for name in ("item", *TEXTS)} for row in drawn]
    write_rows(folder / "people.jsonl", shown)
    write_text(folder / "label_studio.json", json.dumps(label_studio_tasks(shown), ensure_ascii=False, indent=1))
    write_text(folder / "label_studio.xml", LABEL_STUDIO_CONFIG)
    write_rows(folder / "argilla.jsonl", argilla_records([{**row, "round": 0} for row in shown]))


def people_choices(files: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """
    Count people's choices, "a", "b" or "tie", for each pair that they labelled; return the counts by the pair's `key`.

    If a person labelled a pair twice, the last label counts.

    Args:
        files: files that [`read_choices`] reads.
        rows: the pairs, with `item`, the pair's name in the files, and `key`.

    Raises:
        ValueError: a label is of an item that is not among the rows.
    """
    keys = {row["item"]: row["key"] for row in rows}
    said = {}
    for file in files:
        for each in read_choices(file):
            if each["item"] not in keys:
                raise ValueError(
                    f"`labels` {file} has the item {each['item']!r}, which is none of this run's pairs: give labels "
                    "that were made for this run's pairs"
                )
            if each["choice"]:
                said[keys[each["item"]], each["annotator"]] = each["choice"]
    found: dict[str, Counter[str]] = {}
    for (key, _), choice in said.items():
        found.setdefault(key, Counter())[choice] += 1
    return found


def most(votes: Counter[str]) -> str:
    """Return the choice with the most votes; "tie" if several choices have the most."""
    (first, count), *others = votes.most_common()
    return "tie" if others and others[0][1] == count else first
