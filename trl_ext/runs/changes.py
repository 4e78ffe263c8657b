"""Describe in words how the settings of two runs differ, even those that are hashes of models, rows or functions."""

import re
from collections.abc import Iterator
from typing import Any

import torch

_HASH = re.compile(r"\b(?:xxh3:)?[0-9a-f]{12,32}\b")
_WORDS = {  # fact -> what it is about
    "model": "the model's weights",
    "model_config": "the model's configuration",
    "model_name_or_path": "the model",
    "tokenizer": "the tokenizer",
    "data_collator": "the data collator",
    "compute_loss_func": "the loss function",
    "optimizer_cls_and_kwargs": "the optimizer's class or arguments",
    "reference": "the reference's weights",
    "value_model": "the critic's weights",
    "train_data": "the dataset's rows",
    "held_out_data": "the held-out rows",
    "dataset": "the dataset's rows",
}
_MOST = 4  # details of one fact
Names = dict[str, dict[str, Any]]


def differences(
    before: dict[str, Any],
    now: dict[str, Any],
    names_before: Names | None = None,
    names_now: Names | None = None,
) -> list[str]:
    """
    Describe each setting that differs between two runs, in a few words.

    Args:
        before, now: settings of the earlier and the present run, as JSON by name.
        names_before, names_now: descriptions of those settings that are hashes, as JSON by name. Old checkpoints have
            none.
    """
    different = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if "use_cpu" in different and not torch.accelerator.is_available():
        different.remove("use_cpu")  # there is nothing else to use
    rewards = [name for name in different if name.startswith("reward ")]
    if "train_data" in different and "train_rows" in different:
        different.remove("train_rows")  # `train_data` says it
    if rewards and "rewards" in different:
        different.remove("rewards")
    were, are = ({name.split()[1] for name in each if name.startswith("adapter ")} for each in (before, now))
    whole = were ^ are  # the names of adapters that came or went
    of_whole = tuple(f"adapter {name} " for name in whole)
    plain = [name for name in different if name not in rewards and not name.startswith(of_whole)]
    return [
        *(f"adapter {name!r} is {'gone' if name in were else 'new'}" for name in sorted(whole)),
        *(_changed(name, before, now, names_before or {}, names_now or {}) for name in plain),
        *(_rewards(before, now) if rewards else ()),
    ]


def _changed(name: str, before: dict[str, Any], now: dict[str, Any], *names: Names) -> str:
    a, b = before.get(name), now.get(name)
    if not any(_HASH.search(str(value)) for value in (a, b)):
        return f"{name}: {a!r} → {b!r}"
    details = [f"none {when}" for value, when in ((a, "before"), (b, "now")) if value in (None, [])]
    if isinstance(a, list) and isinstance(b, list) and len(a) != len(b):
        details = [f"{len(a)} before, {len(b)} now"]
    elif not details and (beside := (_without_hashes(a), _without_hashes(b)))[0] != beside[1]:
        details = [f"{beside[0] or 'another'} before, {beside[1] or 'another'} now"]
    rows = before.get("train_rows"), now.get("train_rows")
    if name == "train_data" and None not in rows:
        same = f"{rows[0]} rows before and now, but other rows or in another order"
        details.append(same if rows[0] == rows[1] else f"{rows[0]} rows before, {rows[1]} now")
    details += _details(*(each[name] if isinstance(each.get(name), dict) else {} for each in names))
    in_brackets = f" ({'; '.join(details)})" if details else ""
    return f"{_WORDS.get(name, name)} changed{in_brackets}"


def _details(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe how two descriptions of the same thing differ, at the keys that both have."""
    details = [
        f"another {key}"
        if _HASH.search(str(before[key]))
        else f"{key} {_text(before[key])} before, {_text(now[key])} now"
        for key in before
        if key in now and before[key] != now[key]
    ]
    return details if len(details) <= _MOST else [*details[:_MOST], f"and {len(details) - _MOST} more"]


def _rewards(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reward that was added, removed or changed; rewards are counted from 1."""
    lists = [[name for name in settings if name.startswith("reward ")] for settings in (before, now)]
    for i in range(max(map(len, lists))):
        old, new = (names[i] if i < len(names) else None for names in lists)
        was, becomes = (name and f"`{name.removeprefix('reward ')}`" for name in (old, new))
        if old is None:
            yield f"reward {i + 1}, {becomes}, is new"
        elif new is None:
            yield f"reward {i + 1}, {was}, is gone"
        elif old != new:
            yield f"reward {i + 1} is now {becomes}, was {was}"
        elif before[old] != now[old]:
            yield f"reward {i + 1}, {was}, has changed: {_part(str(before[old]), str(now[old]))}"


def _part(before: str, now: str) -> str:
    """
    Return words on which part of a reward differs between two identities.

    If both identities begin with the same hash, the tokenizer differs; else the weights, the source or the settings.
    """
    hashes = [identity.split() for identity in (before, now) if _HASH.match(identity)]
    is_tokenizer = len(hashes) == 2 and hashes[0][0] == hashes[1][0]
    return "its tokenizer" if is_tokenizer else "its weights, source or settings"


def _text(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _without_hashes(value: Any) -> str:
    """
    Return a text without the hashes in it; "" for a value that is no text.

    Words remain, such as the kind of attention in a model's identity.
    """
    return " ".join(_HASH.sub("", value).split()) if isinstance(value, str) else ""
