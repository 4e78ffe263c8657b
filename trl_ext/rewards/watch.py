"""What the watches share: reward functions of weight zero that only look."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..jsonl import JSONLWriter


def text_of(completion: Any) -> str:
    """The text of a completion, also of messages."""
    return completion if isinstance(completion, str) else "\n".join(str(turn.get("content")) for turn in completion)


class Watch:
    """
    A reward function, with TRL's signature, that measures completions and rewards nothing: give it weight 0.

    Args:
        folder: where `completions.rank{r}.jsonl` is appended to, a line a completion: step, rank, phase, prompt,
            completion, scores. None: the output directory if [`~trl_ext.callbacks.JSONLCallback`] is in the script,
            else nowhere.
        score: what each completion gets. None takes no part; where no other function scores, TRL wants 0.0.
    """

    __name__ = "watch"
    default_folder: str | None = None  # set by JSONLCallback, for watches without a folder of their own

    def __init__(self, folder: str | os.PathLike[str] | None = None, score: float | None = None):
        self.folder = folder
        self.score = score
        self._writers: dict[Path, JSONLWriter] = {}

    def write(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Append to `{file}.rank{r}.jsonl` in the folder, if there is one."""
        folder = self.folder if self.folder is not None else Watch.default_folder
        if folder is not None and rows:
            path = Path(folder) / f"{file}.rank{PartialState().process_index}.jsonl"
            self._writers.setdefault(path, JSONLWriter(path)).write(*rows)

    def write_completions(self, prompts: list, completions: list, scores: list[Any], trainer_state: Any) -> None:
        step, rank = getattr(trainer_state, "global_step", None), PartialState().process_index
        self.write(
            "completions",
            [
                {
                    "step": step,
                    "rank": rank,
                    "prompt": text_of(prompt),
                    "completion": text_of(completion),
                    "scores": {self.__name__: score},
                }
                for prompt, completion, score in zip(prompts, completions, scores, strict=True)
            ],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writers": {}}  # open files do not pickle


def log_to(log_metric: Callable[[str, float], None] | None, metrics: dict[str, float | None]) -> None:
    """Log what there is. Outside of TRL there is nothing to log to."""
    for name, value in metrics.items():
        if value is not None and log_metric is not None:
            log_metric(name, float(value))
