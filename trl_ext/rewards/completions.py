"""Read prompts and completions, which are text or messages, as text, and append them to the file of a run."""

import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..runs.files import append_jsonl
from ..upstream.packages import hide_none_logged

# File → where the rows of the last rollout begin and end in it, and these rows
_newest: dict[Path, tuple[int, int, list[dict[str, Any]]]] = {}
_lock = threading.Lock()  # watches of rewards in the background write from threads


def text_of(completion: Any) -> str:
    """
    Return a prompt or completion, a text or messages, as one text; the messages of tools are left out.

    >>> text_of([{"role": "user", "content": "Tea?"}])
    'Tea?'
    >>> text_of([{"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "At noon."}])
    'At noon.'
    """
    if isinstance(completion, str):
        return completion
    contents = (turn.get("content") for turn in completion if turn.get("role") != "tool")
    return "\n".join(str(content) for content in contents if content not in (None, ""))


def well_formed(value: Any) -> Any:
    """
    Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD in a text, or in all texts of a list or mapping.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, (list, tuple)) else value


def recording_folder(state: Any) -> str | None:
    """
    Return the folder in which the run with this trainer's `state` records completions; None without `JSONLCallback`,
    which chooses the folder.
    """
    return getattr(state, "trl_ext_folder", None)


def record_completions(
    folder: str | os.PathLike[str] | None,
    prompts: list,
    completions: list,
    scores: list[dict[str, Any]],
    step: int | None,
) -> None:
    """
    Append completions to `completions.rank{r}.jsonl` in a folder, each with its prompt, the step (None: unknown) and
    its entry of `scores`, a mapping from names to scores.

    If the last call for this file wrote some of the same completions, add the scores to the lines that it wrote. With
    None for the folder nothing is written.
    """
    hide_none_logged()
    if folder is None:
        return
    path = Path(folder, f"completions.rank{PartialState().process_index}.jsonl")
    with _lock:
        head = {"timestamp": time.time(), "step": step, "rank": PartialState().process_index}
        size = path.stat().st_size if path.is_file() else 0
        begin, end, written = _newest.get(path, (0, -1, []))
        same = defaultdict(list)
        for row in written if end == size else []:  # else something else has written since
            same[_key(row)].append(row)
        new = []
        for prompt, completion, named in zip(prompts, completions, scores, strict=True):
            row = {**head, "prompt": text_of(prompt), "completion": recorded(completion), "scores": named}
            if old := same[_key(row)]:
                first = old.pop(0)["scores"]
                first |= named | first
            else:
                new.append(row)
        if len(new) < len(scores):
            os.truncate(path, begin)
            size = begin
            new = written + new
        append_jsonl(path, *new)
        _newest[path] = size, path.stat().st_size if path.is_file() else 0, new


def recorded(completion: Any) -> str | list[dict[str, Any]]:
    """
    Return a completion in the form that files store: its messages if it has several or a tool call, else its text.
    """
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    return completion


def _key(row: dict[str, Any]) -> tuple[Any, str, str]:
    return row["step"], row["prompt"], str(row["completion"])
