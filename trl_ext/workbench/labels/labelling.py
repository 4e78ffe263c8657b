"""Choose answers to compare, write them for labelling tools, and read the choices that come back."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

CHOICES = ("a", "b", "tie")
REASONS = ("score", "disagreement", "random")
_PAIRWISE = {"left": "a", "right": "b"}  # what Label Studio's tag <Pairwise> says
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
    Choose answers to label: those with the highest scores, then those with the highest disagreement, then some at
    random.

    Of each prompt at most one answer is chosen: the one with the highest score, or disagreement, or random number. The
    order of the rows does not matter: numbers drawn with `seed` decide between equally high answers, and choose the
    random ones.

    Args:
        prompts, answers: (N,) texts or messages.
        scores: (N,) scores of the reward model. An answer with None or NaN is not chosen for its score.
        disagreement: (N,) standard deviation of the scores of an ensemble's members. None without an ensemble: then
            the share of `disagreement` goes to the other two reasons.
        size: how many answers to choose. Fewer are returned if there are too few prompts or scores.
        shares: reason, one of `REASONS` → its share of `size`, 0 or more; at least one is above 0. The numbers of
            answers for `score` and `disagreement` are rounded; `random` gets the rest.
        seed: seed of all random choices.

    Returns:
        Row → why its answer was chosen, one of `REASONS`. The rows are in random order.

    Raises:
        ValueError: `size` is below 1, a share is below 0, or no share is above 0.
    """
    shares = {why: shares.get(why, 0.0) * (why != "disagreement" or disagreement is not None) for why in REASONS}
    if size < 1 or min(shares.values()) < 0 or not sum(shares.values()) > 0:
        raise ValueError(
            f"a queue needs a size of 1 or more and shares >= 0, one above 0, got size {size} and {shares}"
        )
    whole = sum(shares.values())
    first = round(size * shares["score"] / whole)
    second = min(round(size * shares["disagreement"] / whole), size - first)
    quotas = {"score": first, "disagreement": second, "random": size - first - second}
    names = [answer_key(prompt, None) for prompt in prompts]
    draws = [answer_key(prompt, answer, seed) for prompt, answer in zip(prompts, answers, strict=True)]
    ranks: dict[str, Sequence[float | None]] = {"score": scores, "disagreement": disagreement or []}
    chosen: dict[int, str] = {}
    used: set[str] = set()
    for why, quota in quotas.items():
        rank = ranks.get(why, [0.0] * len(draws))
        rows = [row for row, value in enumerate(rank) if value is not None and not math.isnan(value)]
        taken = 0
        for row in sorted(rows, key=lambda row: (-(rank[row] or 0.0), draws[row])):
            if taken == quota:
                break
            if names[row] not in used:
                used.add(names[row])
                chosen[row] = why
                taken += 1
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
    Return tasks as Label Studio imports them, for `LABEL_STUDIO_CONFIG`.

    The tasks do not say which of their two answers was chosen for the queue, or why.

    Args:
        rows: dictionaries with `item`, `prompt`, `response_a` and `response_b`.
    """
    texts = ("prompt", "response_a", "response_b")
    return [{"data": {"item": row["item"], **{name: as_text(row[name]) for name in texts}}} for row in rows]


def argilla_records(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Return records in the flat form that Argilla's `dataset.records.log` takes.

    Each record has an `id` (the item), the fields `prompt`, `response_a` and `response_b`, and the metadata `round`.

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

    - A file of one's own is JSON lines, a JSON list or CSV, with the columns `item`, `choice` and, if wanted,
      `annotator`.
    - Label Studio exports `JSON` or `JSON-MIN`.
    - Argilla exports what `records.to_list(flatten=True)` gives, as a JSON list or as JSON lines.

    A label that was skipped, discarded or not submitted has the choice None.

    Args:
        path: the file. If a row names no annotator, its annotator is the file's name without the suffix.

    Returns:
        `{"item", "annotator", "choice"}` of each label; `choice` is one of `CHOICES` or None.

    Raises:
        ValueError: the file is not UTF-8, has none of these forms or holds no label; or a row, which the message
            names, has no item or a choice that is not one of `CHOICES`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: convert it, for example with `iconv -f latin1 -t utf-8`") from error
    found = []
    for number, row in enumerate(_rows(path, text)):
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}, row {number}, must be an object with names and values, got {str(row)[:40]!r}")
        for each in _labels_in(row, path):  # people type spaces that they do not see
            item, annotator, said = (value.strip() if isinstance(value, str) else value for value in each)
            said = None if said == "" else said
            choice = _PAIRWISE.get(said, said) if isinstance(said, str) else said
            if item is None or not (choice is None or choice in CHOICES):
                what = (
                    f"the choice {str(said)[:40]!r}, not one of {', '.join(CHOICES)}"
                    if item is not None
                    else "no `item`"
                )
                raise ValueError(f"{path}, row {number}, has {what}: see docs/refresh.md for the format")
            found.append({"item": str(item), "annotator": str(annotator), "choice": choice})
    if not any(row["choice"] for row in found):
        raise ValueError(f"{path} holds no label: export what was labelled, or leave the file out")
    return found


def _rows(path: Path, text: str) -> list[Any]:
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {line[:40]!r}") from error
    return rows


def _labels_in(row: Mapping[str, Any], path: Path) -> list[tuple[Any, Any, Any]]:
    """Return for each label in a row its item, its annotator and its choice."""
    if "annotations" in row:  # Label Studio, JSON
        item = (row.get("data") or {}).get("item")
        return [(item, _who(each), _chosen(each)) for each in row["annotations"]]
    if "annotation_id" in row:  # Label Studio, JSON-MIN
        said = row.get(_QUESTION)
        return [(row.get("item"), row.get("annotator"), said.get("selected") if isinstance(said, dict) else said)]
    if f"{_QUESTION}.responses" in row:  # Argilla, flattened
        said = row[f"{_QUESTION}.responses"] or []
        people = row.get(f"{_QUESTION}.responses.users") or [path.stem] * len(said)
        status = row.get(f"{_QUESTION}.responses.status") or [None] * len(said)
        counts = [value if state in (None, "submitted") else None for value, state in zip(said, status, strict=True)]
        return [(row.get("id"), who, choice) for who, choice in zip(people, counts, strict=True)]
    if "responses" in row:  # Argilla, with drafts and discarded answers that nothing tells apart
        raise ValueError(
            f"{path} does not say which answers were submitted: export with `records.to_list(flatten=True)`"
        )
    return [(row.get("item"), row.get("annotator") or path.stem, row.get(_QUESTION) or None)]


def _who(annotation: Mapping[str, Any]) -> Any:
    by = annotation.get("completed_by")
    return by.get("email") or by.get("id") if isinstance(by, Mapping) else by


def _chosen(annotation: Mapping[str, Any]) -> Any:
    """Return the choice in an annotation of Label Studio; None if it was skipped."""
    for result in [] if annotation.get("was_cancelled") else annotation.get("result") or []:
        if result.get("from_name") == _QUESTION:
            value = result.get("value") or {}
            return value.get("selected") or next(iter(value.get("choices") or []), None)
    return None
