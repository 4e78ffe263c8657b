"""Define the base class of watches: reward functions of weight 0 that measure, and write completions to a file."""

import math
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState

from ...runs.jsonl import JSONLWriter
from ...upstream.terminal import hide_none_logged
from ..texts import recorded, text_of


class Watch:
    """
    Measure completions without rewarding them: the base class of reward functions of weight 0.

    Args:
        folder: folder of the file `completions.rank{r}.jsonl`. Each completion is appended to the file as one line,
            which has the scores of all watches: timestamp, step, rank, prompt, completion, scores. A completion with
            tool calls or several messages is written as messages, any other one as text. None: the folder of
            [`~trl_ext.callbacks.JSONLCallback`]; without that callback nothing is written.
        score: score that each completion gets. None: this function takes no part in the reward. Give 0.0 if no other
            function gives a score, since TRL needs one.
    """

    __name__ = "watch"
    default_folder: str | None = None  # set by JSONLCallback, for watches without a folder of their own
    # File → where the rows of the last rollout begin and end in it, and these rows
    _newest: ClassVar[dict[Path, tuple[int, int, list[dict[str, Any]]]]] = {}

    def __init__(self, folder: str | os.PathLike[str] | None = None, score: float | None = None):
        self.folder = folder
        self.score = score
        hide_none_logged()
        self._writers: dict[Path, JSONLWriter] = {}

    def write(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to `{file}.rank{r}.jsonl` in the folder; do nothing if there is no folder."""
        if (path := self._path(file)) is not None:
            self._writers.setdefault(path, JSONLWriter(path)).write(*rows)

    def _path(self, file: str) -> Path | None:
        folder = self.folder if self.folder is not None else Watch.default_folder
        return None if folder is None else Path(folder) / f"{file}.rank{PartialState().process_index}.jsonl"

    def write_completions(self, prompts: list, completions: list, scores: list[Any], trainer_state: Any) -> None:
        """Append completions to `completions.rank{r}.jsonl`, each with its score under this watch's name."""
        step = getattr(trainer_state, "global_step", None)
        self.write_rows(prompts, completions, [{self.__name__: score} for score in scores], step)

    def write_rows(self, prompts: list, completions: list, scores: list[dict[str, Any]], step: int | None) -> None:
        """
        Append completions to `completions.rank{r}.jsonl`, each with a mapping from names to scores.

        If another watch has just written some of the same completions, its lines get these scores, too.
        """
        if (path := self._path("completions")) is None:
            return
        head = {"timestamp": time.time(), "step": step, "rank": PartialState().process_index}
        rows = [
            {**head, "prompt": text_of(prompt), "completion": recorded(completion), "scores": named}
            for prompt, completion, named in zip(prompts, completions, scores, strict=True)
        ]
        size = path.stat().st_size if path.is_file() else 0
        begin, end, written = Watch._newest.get(path, (0, -1, []))
        same = defaultdict(list)
        for row in written if end == size else []:  # else something else has written since
            same[_answer(row)].append(row)
        new = []
        for row in rows:
            if old := same[_answer(row)]:
                first = old.pop(0)["scores"]
                first |= row["scores"] | first
            else:
                new.append(row)
        if len(new) < len(rows):
            os.truncate(path, begin)
            size, rows = begin, written + new
        self.write("completions", rows)
        Watch._newest[path] = size, path.stat().st_size if path.is_file() else 0, rows

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writers": {}}  # open files do not pickle


def _answer(row: dict[str, Any]) -> tuple[Any, str, str]:
    return row["step"], row["prompt"], str(row["completion"])


def numbers_of(scores: Any) -> list[float | None]:
    """Convert scores, such as NumPy's or torch's, to Python's floats, and NaN, the score of a failed row, to None."""
    numbers = [None if score is None else float(score) for score in scores]
    return [None if number is None or math.isnan(number) else number for number in numbers]
