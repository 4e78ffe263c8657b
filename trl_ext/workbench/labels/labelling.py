"""Choose answers to compare, write them for labelling tools, and read the choices that come back."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

CHOICES = ("a", "b", "tie")
_QUESTION = "choice"
LABEL_STUDIO_CONFIG = f"""<View>
  <Style>.htx-text {{ white-space: pre-wrap; }}</Style>
  <Header value="Prompt"/>
  <Text name="prompt" value="$prompt"/>
  <View style="display: flex; gap: 2em">
    <View style="flex: 1"><Header value="Answer a"/><Text name="response_a" value="$response_a"/></View>
    <View style="flex: 1"><Header value="Answer b"/><Text name="response_b" value="$response_b"/></View>
  </View>
  <Header value="Which answer is better?"/>
  <Choices name="{_QUESTION}" toName="prompt" choice="single" showInLine="true" required="true">
    <Choice value="a"/><Choice value="b"/><Choice value="tie"/>
  </Choices>
</View>
"""


def answer_key(prompt: Any, answer: Any, seed: int | None = None) -> str:
    """Hash a prompt and its answer to 16 hexadecimal digits. With a seed, the hash serves as a random number."""
    said = json.dumps([prompt, answer, seed], sort_keys=True, ensure_ascii=True)
    return xxhash.xxh3_64_hexdigest(said.encode())


def answers_to_label(
    prompts: Sequence[Any],
    answers: Sequence[Any],
    scores: Sequence[float | None],
    disagreement: Sequence[float | None] | None,
    size: int,
    shares: Mapping[str, float],
    seed: int = 0,
) -> dict[int, str]:
    """
    Choose answers to label: those with the highest scores, those with the highest disagreement, and some at random.

    Of each prompt at most one answer is chosen: the one with the highest score, or disagreement, or random number. The
    order of the rows does not matter: random numbers made with `seed` decide between equally high answers, and choose
    the random answers.

    Args:
        prompts, answers: (N,) texts or messages.
        scores: (N,) scores of the reward model. An answer with None or NaN is not chosen for its score.
        disagreement: (N,) standard deviation of the scores of an ensemble's members. None without an ensemble: then
            the share of `disagreement` goes to the other two reasons.
        size: how many answers to choose. Fewer are returned if there are too few prompts or scores.
        shares: the share of `size` for each of the reasons `score`, `disagreement` and `random`. The numbers of
            answers for the first two are rounded; `random` gets the rest.
        seed: seed of all random choices.

    Returns:
        A dict from the row's index to the reason why its answer was chosen, in random order.
    """
    score, differs, rest = (shares.get(why, 0.0) for why in ("score", "disagreement", "random"))
    differs *= disagreement is not None
    whole = score + differs + rest
    if not whole:
        raise ValueError("All shares of the queue are 0: raise `score_share` or `random_share`.")
    first = round(size * score / whole)
    second = min(round(size * differs / whole), size - first)
    draws = [answer_key(prompt, answer, seed) for prompt, answer in zip(prompts, answers, strict=True)]
    rows = sorted(range(len(draws)), key=draws.__getitem__)
    chosen: dict[int, str] = {}
    used: set[str] = set()
    parts: list[tuple[str, Sequence[Any], int]] = [
        ("score", scores, first),
        ("disagreement", disagreement or [], second),
        ("random", [0.0] * len(rows), size - first - second),
    ]
    for why, values, quota in parts:
        known = [row for row in rows if values and values[row] is not None and not math.isnan(values[row])]
        for row in sorted(known, key=lambda row: -values[row]):
            if quota and (name := answer_key(prompts[row], None)) not in used:
                used.add(name)
                chosen[row] = why
                quota -= 1
    return dict(sorted(chosen.items(), key=lambda item: draws[item[0]]))


def as_text(value: Any) -> str:
    """Return a prompt or an answer as text that people can read; each of several messages begins with its role."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return str(value[0].get("content"))
    return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)


def label_studio_tasks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Return tasks in Label Studio's import format, for the interface `LABEL_STUDIO_CONFIG`.

    A task has these four columns alone, so people do not see why a pair was chosen to be labelled.

    Args:
        rows: dictionaries with `item`, the pair's name, `prompt`, `response_a` and `response_b`; other keys are left
            out. Texts and messages both become text.
    """
    texts = ("prompt", "response_a", "response_b")
    return [{"data": {"item": row["item"], **{name: as_text(row[name]) for name in texts}}} for row in rows]


def argilla_records(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Return records in the flat form that Argilla's `dataset.records.log` takes.

    Each record has an `id` (the item), the fields `prompt`, `response_a` and `response_b`, and the metadata
    `round`, the number of the round of labelling.

    Args:
        rows: dictionaries with `item`, `round`, `prompt`, `response_a` and `response_b`.
    """
    return [
        {"id": task["data"]["item"], **{k: v for k, v in task["data"].items() if k != "item"}, "round": row["round"]}
        for task, row in zip(label_studio_tasks(rows), rows, strict=True)
    ]


def read_choices(path: str | Path) -> list[dict[str, Any]]:
    """
    Read who chose which answer, from a file that annotators wrote, or from an export of Label Studio or Argilla.

    - A file that annotators wrote is JSON lines, a JSON list or CSV, with the columns `item`, `choice` and, if wanted,
      `annotator`. Label Studio's `JSON-MIN` has this form.
    - An export of Label Studio is one in the format `JSON`.
    - An export of Argilla is what `records.to_list(flatten=True)` gives, as a JSON list or as JSON lines.

    A label that was skipped, discarded or not submitted has the choice None.

    Args:
        path: the file. If a row names no annotator, its annotator is the file's name without the suffix.

    Returns:
        A dict with `item`, `annotator` and `choice` for each label; the choice is "a", "b", "tie" or None.

    Raises:
        OSError: there is no such file, or it cannot be opened.
        ValueError: the file is not UTF-8, or is no valid JSON; or a row, which the message names, has no item, or a
            choice other than these.
        KeyError: a row of an export lacks a key that exports have, such as `result` in an annotation.
    """
    path = Path(path)
    found = []
    for number, row in enumerate(_rows(path)):
        for item, annotator, choice in _labels_in(row):
            # People type spaces that they do not see
            item, who, choice = ("" if value is None else str(value).strip() for value in (item, annotator, choice))
            if not item or choice not in ("", *CHOICES):
                raise ValueError(
                    f"{path}, row {number}, has the item {item!r} and the choice {choice[:40]!r}, but it needs an "
                    f"item and one of the choices {', '.join(CHOICES)}: see docs/refresh.md for the format"
                )
            found.append({"item": item, "annotator": who or path.stem, "choice": choice or None})
    return found


def _rows(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]  # a text may have other line separators


def _labels_in(row: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield for each label in a row its item, its annotator and its choice; None where a choice was not submitted."""
    if "annotations" in row:  # Label Studio
        for each in row["annotations"]:
            by = each.get("completed_by")
            said = [] if each.get("was_cancelled") else each["result"]
            choices = [result["value"]["choices"][0] for result in said if result["from_name"] == _QUESTION]
            if isinstance(by, dict):
                by = by["email"]
            yield row["data"].get("item"), by, choices[0] if choices else None
    elif f"{_QUESTION}.responses" in row:  # Argilla, flattened
        names = (f"{_QUESTION}.responses{end}" for end in ("", ".users", ".status"))
        for said, who, status in zip(*(row[name] or [] for name in names), strict=True):
            yield row["id"], who, said if status == "submitted" else None
    else:
        yield row.get("item"), row.get("annotator"), row.get(_QUESTION)
