"""Show a run on the terminal: a progress bar, and a table with a row for each log."""

import logging
import math
import os
import shutil
import sys
import textwrap
import time
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from .metrics import is_training_log, metrics_of, numbers_in

# Heading → quantity of `trl_ext.callbacks.metrics`, or key of the Trainer's own; from left to right
COLUMNS = {
    "episodes": "episodes",
    "score": "reward",
    "KL": "kl",
    "accuracy": "accuracy",
    "margin": "margin",
    "entropy": "entropy",
    "length": "length",
    "cut": "length_clipped",
    "clip": "clip_fraction",
    "loss": "loss",
    "lr": "learning_rate",
    "s/step": "seconds",
    "grad": "grad_norm",
    "epoch": "epoch",
}
# On a narrow terminal the columns at the end of this list are left out first
IMPORTANCE = "score KL accuracy loss margin entropy length cut clip s/step episodes lr grad epoch".split()
_TRAINER_KEYS = ("loss", "learning_rate", "seconds", "epoch")  # every Trainer logs them, or they are measured here
_CONSOLES = (ProgressCallback, PrinterCallback)  # transformers' own; a subclass is a user's
_IN_BAR = ("score", "KL", "accuracy", "margin", "loss")  # the bar shows the first two of these that the run logs
_KL_IN = {"nats per response": "KL/resp", "nats per token": "KL/tok"}  # unit of the KL → what heads its column
_WIDTH = 7  # characters of a number
_ROWS_A_HEADER = 20
_NO_TERMINAL = 120  # characters of a row in a file
_BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}{postfix}]"
_STYLES = {"header": "2", "eval": "1", "alert": "1;33"}  # of ANSI terminals: dim, bold, bold yellow
_alerts = logging.getLogger(f"{__package__}.alerts")  # where LogSink writes


class ConsoleCallback(ProgressCallback):
    """
    Show a run as a bar with score, KL and ETA, and as a table with one row for each log.

    PPOTrainer, DPOTrainer and the recipes use it. For any other trainer:

    >>> ConsoleCallback.replace(trainer)

    This replaces transformers' own `ProgressCallback` or `PrinterCallback`, but not a notebook's progress bar or a
    user's subclass. (`trainer.add_callback` would keep transformers' own, and the run would be shown twice.)

    Rows begin with `train`, `eval`, `greedy` (an evaluation by PPOTrainer that decodes greedily), `log` (numbers that
    a script logs), `note`, `done`, `notice` or `alert`. Notices and alerts go to stderr, other rows to stdout. Only
    the main process shows anything. Bars and colours are shown on a terminal alone. The setting `disable_tqdm` turns
    bars off; the environment variable `NO_COLOR` turns colours off. A narrow terminal gets fewer columns. `-` means
    that the log lacks this number.

    Units are those of `METRICS` (`metrics.py`):

    - `score`: as the reward functions give it
    - `KL/resp` (PPO), `KL/tok` (GRPO, RLOO): nats per response or per token
    - `entropy`: nats per token
    - `length`: tokens of an answer
    - `cut`: share of answers that were cut off at the maximum length
    - `clip`: share of clipped tokens
    - `accuracy`: share of pairs; in SFT, share of tokens
    - `margin`: as the trainer's loss defines it
    - `lr`: learning rate
    - `s/step`: seconds of an optimizer step, its rollout included
    - `grad`: norm of the gradient
    """

    def __init__(self) -> None:
        super().__init__()
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0
        self._is_lifted = False  # whether the bar is removed from the terminal, until the next step begins
        self._kinds = ["greedy"]  # how rows begin; the longest gives the width
        self._kl = "KL"  # how the KL is headed
        self._columns: set[str] = set()  # headings that had a number so far
        self._last: dict[str, float] = {}  # the newest number under each heading; some logs cover no rollout
        self._header, self._rows = "", 0  # the last header, and how many rows ago
        self._began, self._seconds, self._steps = 0.0, 0.0, 0  # of the optimizer steps since the last log

    @classmethod
    def replace(cls, trainer: Any) -> None:
        """
        Replace transformers' own progress bar or printed logs in a trainer; do nothing if it has neither.

        The new callback is called before all other callbacks, so that monitors' alerts get lines of their own.
        """
        handler = trainer.callback_handler
        others = [callback for callback in handler.callbacks if type(callback) not in _CONSOLES]
        if len(others) < len(handler.callbacks):
            handler.callbacks = [cls(), *others]

    # ---- Bars ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._seconds, self._steps = 0.0, 0
        if state.is_world_process_zero:
            self._close()
            self.training_bar = _bar(args, total=state.max_steps, initial=state.global_step, desc="train ")
            _alerts.addFilter(self._show_alert)
        self.current_step = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()
        if self.training_bar is not None and self._is_lifted:
            self.training_bar.refresh()  # what came after the last log has been written by now
        self._is_lifted = False

    def on_step_end(self, args, state, control, **kwargs):
        self._seconds, self._steps = self._seconds + time.monotonic() - self._began, self._steps + 1
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            if self.training_bar is not None:
                self.training_bar.refresh()
            self.prediction_bar = _bar(args, total=len(eval_dataloader), desc="eval  ", leave=False)
        self.prediction_bar.update()
        if self.prediction_bar.n >= self.prediction_bar.total:
            self.on_predict(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        self._close()

    def _close(self) -> None:
        _alerts.removeFilter(self._show_alert)
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _clear(self) -> None:
        for bar in filter(None, (self.prediction_bar, self.training_bar)):
            bar.clear()
        self._is_lifted = True

    # ---- Rows ----

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or logs is None:
            return
        numbers, keys = numbers_in(logs), _keys(args)
        self._kl = _KL_IN.get(getattr(metrics_of(args).get("kl"), "unit", ""), "KL")
        prefix = next((key.removesuffix("runtime") for key in logs if key.endswith("_runtime")), "eval_")
        parts = {prefix[:-1]: prefix, "greedy": f"{prefix}greedy/"}
        rows = {kind: {head: numbers.get(part + key) for head, key in keys.items()} for kind, part in parts.items()}
        evaluated = {kind: row for kind, row in rows.items() if {*row.values()} != {None}}
        if "train_runtime" in logs:
            self._write_text("done", _done(numbers, state))
            if (cut := self._last.get("cut", 0)) > 0.9:
                penalty = ", or punish it with `--missing_eos_penalty`" * hasattr(args, "missing_eos_penalty")
                how = f"raise `--max_completion_length` ({args.max_completion_length}){penalty}"
                self._write_text("note", f"{cut:.0%} of the last answers were cut off: {how}")
        elif evaluated:
            for kind, row in evaluated.items():
                self._row(kind, state, row)
        elif is_training_log(logs):
            if self._steps:
                numbers["seconds"] = self._seconds / self._steps
            self._seconds, self._steps = 0.0, 0
            values = {head: numbers.get(key) for head, key in keys.items()}
            if episodes := values.get("episodes"):
                values["episodes"] = int(episodes)  # TRL averages what it logs
            self._row("train", state, values)
            if self.training_bar is not None:
                self._last |= {head: value for head, value in values.items() if value is not None}
                heads = [head for head in _IN_BAR if head in self._last]
                shown = [f"{self._head(head)} {_shown(self._last[head])}" for head in heads]
                self.training_bar.set_postfix_str(", ".join(shown[:2]), refresh=False)
        elif own := [f"{key} {_shown(number)}" for key, number in numbers.items() if key != "epoch"]:  # a script's
            self._write_text("log", ", ".join(own))

    def _row(self, kind: str, state: Any, values: dict[str, float | None]) -> None:
        self._columns |= {head for head, value in values.items() if value is not None}
        if kind not in self._kinds:
            self._kinds.append(kind)
        first = max(map(len, self._kinds))
        heads, room = [], shutil.get_terminal_size((_NO_TERMINAL, 24)).columns - first - 8
        for head in filter(self._columns.__contains__, IMPORTANCE):
            room -= _width(head)
            if room > 0:
                heads.append(head)
        heads = [head for head in COLUMNS if head in heads]
        header = f"{'':{first}}{'step':>7}" + "".join(f"{self._head(head):>{_width(head)}}" for head in heads)
        if header != self._header or self._rows >= _ROWS_A_HEADER:
            self._write(header, "header")
            self._header, self._rows = header, 0
        self._rows += 1
        row = f"{kind:{first}}{state.global_step:>7}"
        row += "".join(f"{_shown(values.get(head)):>{_width(head)}}" for head in heads)
        self._write(row, "" if kind == "train" else "eval")

    def _head(self, head: str) -> str:
        return self._kl if head == "KL" else head

    def _write_text(self, kind: str, text: str, style: str = "", file: Any = None) -> None:
        """Write a line that is not part of the table; on a terminal, wrap it."""
        line = f"{kind:{max(map(len, self._kinds))}} {text}"
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        self._write(line, style, file)

    def _write(self, line: str, style: str = "", file: Any = None) -> None:
        file = file or sys.stdout
        if style and file.isatty() and "NO_COLOR" not in os.environ:
            line = f"\033[{_STYLES[style]}m{line}\033[0m"
        self._clear()  # it comes again when the next step begins
        print(line, file=file, flush=True)

    def _show_alert(self, record: logging.LogRecord) -> bool:
        """
        Remove the bar from its line, and write an alert there, unless a log handler of the script will write it.

        Return whether a handler will: this is a filter of the alerts' logger.
        """
        if _alerts.hasHandlers():
            self._clear()
            return True
        self._write_text(getattr(record, "alert_level", "notice"), record.getMessage(), "alert", sys.stderr)
        return False


def _bar(args: Any, **kwargs: Any) -> tqdm:
    disable = args.disable_tqdm or not sys.stderr.isatty()
    return tqdm(**kwargs, bar_format=_BAR, disable=disable, dynamic_ncols=True)


def _keys(args: Any) -> dict[str, str]:
    """Return a mapping from each heading of the table to its key in the logs."""
    known = metrics_of(args)
    return {
        head: known[name].key if name in known else name
        for head, name in COLUMNS.items()
        if name in known or name in _TRAINER_KEYS or not known
    }


def _width(head: str) -> int:
    return max(len(head), _WIDTH) + 1


def _shown(number: float | None) -> str:
    """Return a number as a short text for a column of the table; "-" for None."""
    if number is None:
        return "-"
    if isinstance(number, int) or not math.isfinite(number) or number == 0:
        return f"{number:.0f}" if math.isfinite(number) and abs(number) < 1e8 else f"{number:.1e}"
    if abs(number) < 1e-3 or abs(number) >= 1e6:
        return f"{number:.1e}" if number > 0 else f"{number:.0e}"
    if abs(number) < 1e-2:
        return f"{number:.4f}"
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:#.3g}".rstrip(".")


def _done(numbers: dict[str, float], state: Any) -> str:
    loss = f", mean loss {_shown(numbers['train_loss'])}" if "train_loss" in numbers else ""
    return f"step {state.global_step} of {state.max_steps}, {_shown(numbers['train_runtime'])} s{loss}"
