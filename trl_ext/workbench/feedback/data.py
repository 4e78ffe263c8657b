"""Load pairs of answers or sample them, choose rows for people, and read what people chose."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ...data import answers_alone, check_texts, has_content, load_dataset_split, write_rows
from ...rewards import text_of
from ...runs import write_text
from ..evaluate.data import Sampling, answers_of, free
from ..labels import FIRST, SECOND, Columns, Labels, read_labels
from ..labels.labelling import LABEL_STUDIO_CONFIG, answer_key, argilla_records, label_studio_tasks, read_choices

ANSWERS = ("response_a", "response_b")
TEXTS = ("prompt", *ANSWERS)


def load_pairs(name: str, split: str, keep: Sequence[str], left_out: dict[str, int]) -> list[dict[str, Any]]:
    """
    Return the different pairs of a table, each with an `item` and with a `key` that is a hash of its texts.

    Args:
        name: a file, a folder or a hub name, with `prompt`, `response_a`, `response_b`, and maybe `item`. Without
            `item` the key is taken.
        split: split to load.
        keep: further columns to keep.
        left_out: dictionary to fill: reason → number of rows that are left out.

    Raises:
        ValueError: a column or a text is missing, or two pairs have the same `item`.
    """
    table = answers_alone(load_dataset_split(name, split, columns=(*TEXTS, *keep)), f"`pairs` {name}", TEXTS)
    check_texts(table, TEXTS, f"`pairs` {name}")
    has_item, found, items = "item" in table.column_names, {}, set()
    for row in table:
        kept = {column: row[column] for column in (*TEXTS, *keep)}
        key = answer_key(row["prompt"], [row[answer] for answer in ANSWERS])
        why = _useless(row) or ("given twice" if key in found else "")
        if why:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        item = str(row["item"]) if has_item else key
        if item in items:
            raise ValueError(f"`pairs` {name}: two different pairs have the `item` {item!r}: give each its own name")
        items.add(item)
        found[key] = {"item": item, "key": key, **kept}
    return list(found.values())


def _useless(row: dict[str, Any]) -> str:
    a, b = (row[answer] for answer in ANSWERS)
    if not (row["prompt"] and has_content(a) and has_content(b)):
        return "with an empty text"
    return "with the same answer twice" if text_of(a) == text_of(b) else ""


def sample_pairs(
    prompts: Dataset, args: Any, sampling: Sampling, folder: Path, keep: Sequence[str], left_out: dict[str, int]
) -> list[dict[str, Any]]:
    """
    Have policies answer prompts, and draw pairs of two different answers to the same prompt, in random order.

    If the folder has answers of the same policy to the same prompts with the same sampling, these are used.

    Args:
        prompts: data set with the column `prompt`.
        args: arguments of `trl-ext label`: `policies`, `temperatures`, `num_samples` and `pairs_per_prompt` are read.
        sampling: how answers are sampled; its temperature is replaced by each of `temperatures`, and for each further
            sample its seed is raised by 1.
        folder: where answers are written.
        keep: further columns to keep.
        left_out: dictionary to fill: reason → number of pairs that are left out.

    Returns:
        Rows as [`load_pairs`] returns them, with `policy_a`, `policy_b`, `temperature_a`, `temperature_b`.
    """
    answers: list[tuple[str, float, list[dict[str, Any]]]] = []
    for place, policy in enumerate(args.policies):
        for temperature in args.temperatures:
            for number in range(args.num_samples):
                how = Sampling(**{**vars(sampling), "temperature": temperature, "seed": sampling.seed + number})
                path = folder / f"{place}-{temperature:g}-{number}.jsonl"
                rows, was_there = answers_of(policy, prompts, how, path)
                said = ", made before" if was_there else ""
                print(f"{policy} at temperature {temperature:g}: {len(rows)} answers{said}", flush=True)
                answers.append((policy, temperature, rows))
                free()
    found: dict[str, dict[str, Any]] = {}
    for place, row in enumerate(prompts):
        generator = np.random.default_rng([sampling.seed, place])
        every = [*combinations(range(len(answers)), 2)]
        for chosen in generator.permutation(len(every))[: args.pairs_per_prompt]:
            a, b = (answers[each] for each in generator.permutation(every[chosen]))
            pair = {"prompt": row["prompt"], "response_a": a[2][place]["completion"]}
            pair["response_b"] = b[2][place]["completion"]
            key = answer_key(pair["prompt"], [pair[answer] for answer in ANSWERS])
            why = _useless(pair) or ("given twice" if key in found else "")
            if why:
                left_out[why] = left_out.get(why, 0) + 1
                continue
            of = {"policy_a": a[0], "policy_b": b[0], "temperature_a": a[1], "temperature_b": b[1]}
            found[key] = {"item": key, "key": key, **pair, **of, **{name: row[name] for name in keep}}
    return list(found.values())


def rows_for_people(rows: Sequence[dict[str, Any]], share: float, least: int, seed: int) -> list[dict[str, Any]]:
    """Draw a share of the rows, but at least `least`, by the hashes of their keys: their order does not matter."""
    size = min(max(round(share * len(rows)), least), len(rows))
    return sorted(rows, key=lambda row: answer_key(row["key"], None, seed))[:size]


def write_for_people(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows for people to label: for Label Studio, for Argilla and as JSON lines, with nothing from a judge."""
    shown = [{name: row[name] for name in ("item", *TEXTS)} for row in rows]
    write_rows(folder / "people.jsonl", shown)
    write_text(folder / "label_studio.json", json.dumps(label_studio_tasks(shown), ensure_ascii=False, indent=1))
    write_text(folder / "label_studio.xml", LABEL_STUDIO_CONFIG)
    write_rows(folder / "argilla.jsonl", argilla_records([{**row, "round": 0} for row in shown]))


def people_choices(files: Sequence[str], rows: Sequence[dict[str, Any]]) -> tuple[dict[str, str], Labels]:
    """
    Read people's labels of these rows.

    Args:
        files: files that [`read_choices`] reads.
        rows: the pairs, with `item`.

    Returns:
        Two values: key of a pair → the choice of most people, "a", "b" or "tie" ("tie", too, if two choices have
        equally many votes); and all labels, to measure how far people agree with each other.

    Raises:
        ValueError: a label is of an item that is not among the rows, or there is no label.
    """
    by_item, table = {row["item"]: row for row in rows}, []
    for file in files:
        for each in read_choices(file):
            if each["item"] not in by_item:
                raise ValueError(
                    f"`labels` {file} has the item {each['item']!r}, which is not one of the pairs: give the labels "
                    "of these pairs"
                )
            if each["choice"]:
                row = by_item[each["item"]]
                table.append({**{name: row[name] for name in ("item", *TEXTS)}, **each})
    labels = read_labels(Dataset.from_list(table), Columns())
    keys, counts = [by_item[table[row]["item"]]["key"] for row in labels.cells[:, 0] // 2], labels.counts()
    return {key: _most(count) for key, count in zip(keys, counts, strict=True) if count.any()}, labels


def _most(counts: np.ndarray) -> str:
    best = np.flatnonzero(counts == counts.max())
    return "tie" if len(best) > 1 else {FIRST: "a", SECOND: "b"}.get(int(best[0]), "tie")
