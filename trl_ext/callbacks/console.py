"""Show a run on the terminal: a progress bar, and a table with a row for each log."""

import logging
import shutil
import sys
import time
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from .metrics import is_training_log, metrics_of, numbers_in

# Heading → quantity of `trl_ext.callbacks.metrics`, or key that every Trainer logs; in the order of the columns. A
# narrow terminal shows only the first of them, the progress bar the first two
COLUMNS = {
    "score": "reward",
    "KL": "kl",
    "accuracy": "accuracy",
    "loss": "loss",
    "margin": "margin",
    "entropy": "entropy",
    "length": "length",
    "cut": "length_clipped",
    "clip": "clip_fraction",
    "s/step": "seconds",
    "episodes": "episodes",
    "lr": "learning_rate",
    "grad": "grad_norm",
    "epoch": "epoch",
}
_TRAINER_KEYS = ("loss", "learning_rate", "seconds", "epoch")  # every Trainer logs them, or they are measured here
_CONSOLES = (ProgressCallback, PrinterCallback)  # transformers' own; a subclass is a user's
_BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}{postfix}]"
_alerts = logging.getLogger(f"{__package__}.monitor")  # where an alert's sink `log` writes


class ConsoleCallback(ProgressCallback):
    """
    Show a run as a progress bar with ETA and the two main numbers, and as a table with one row for each log.

    trl_ext's trainers use it. For any other trainer:

    >>> ConsoleCallback.replace(trainer)

    This replaces transformers' own `ProgressCallback` or `PrinterCallback`, but not a notebook's progress bar or a
    user's subclass. (`trainer.add_callback` would keep transformers' own, and the run would be shown twice.)

    Rows begin with `train`, `eval` or another prefix of an evaluation's metrics, `log` (numbers that a script logs),
    `done`, `notice` or `alert`. Notices and alerts go to stderr, other rows to stdout. Only the main process prints.
    Bars are shown only on a terminal, and `disable_tqdm` turns them off. A narrow terminal gets fewer columns. `-`
    means that the log does not have the number.

    Units are those of `METRICS` (`metrics.py`):

    - `score`: in the unit of the reward functions
    - `KL/compl` (PPO), `KL/tok` (GRPO, RLOO): nats per completion or per token
    - `entropy`: nats per token
    - `length`: tokens of a completion
    - `cut`: share of completions that were cut off at the maximum length
    - `clip`: share of tokens (in RLOO, of completions) whose probability ratio was clipped
    - `accuracy`: share of pairs; in SFT, share of tokens
    - `margin`: a chosen completion's score minus the rejected one's; in DPO and KTO, of their implicit rewards
    - `lr`: learning rate; in PPO the scheduled one times `learning_rate/factor`
    - `s/step`: seconds of an optimizer step, its rollout included, mean since the last log
    - `grad`: norm of the gradient
    """

    def __init__(self) -> None:
        super().__init__()
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0
        self._columns: set[str] = set()  # headings that had a number so far
        self._last: dict[str, float] = {}  # the newest number under each heading; some logs cover no rollout
        self._kl = "KL"  # the heading, by the unit of the trainer's KL
        self._header, self._rows = "", 0  # the last header, and how many rows ago
        self._began, self._seconds = 0.0, [0.0]  # when this optimizer step began; what those since the last log took

    @classmethod
    def replace(cls, trainer: Any) -> None:
        """
        Replace transformers' own progress bar or printed logs in a trainer; do nothing if it has neither.

        The new callback is called before all other callbacks, so that monitors' alerts are on separate lines.
        """
        handler = trainer.callback_handler
        others = [callback for callback in handler.callbacks if type(callback) not in _CONSOLES]
        if len(others) < len(handler.callbacks):
            handler.callbacks = [cls(), *others]

    # ---- Bars ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._seconds = []
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.on_train_end(args, state, control)  # a run before may have been interrupted
            self.training_bar = _bar(args, total=state.max_steps, initial=state.global_step, desc="train ")
            _alerts.addFilter(self._show_alert)

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()
        if self.training_bar is not None:
            self.training_bar.refresh()  # what came after the last log has been written by now

    def on_step_end(self, args, state, control, **kwargs):
        self._seconds.append(time.monotonic() - self._began)
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_world_process_zero and self.prediction_bar is None and has_length(eval_dataloader):
            self.prediction_bar = _bar(args, total=len(eval_dataloader), desc="eval  ", leave=False)
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        _alerts.removeFilter(self._show_alert)
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    # ---- Rows ----

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or logs is None:
            return
        numbers = numbers_in(logs)
        metrics = metrics_of(args)
        keys = {head: metrics[name].key for head, name in COLUMNS.items() if name in metrics}
        keys |= {head: name for head, name in COLUMNS.items() if name in _TRAINER_KEYS or not metrics}

        def row(prefix: str = "") -> dict[str, float]:
            return {head: numbers[prefix + key] for head, key in keys.items() if prefix + key in numbers}

        prefix = next((key.removesuffix("runtime") for key in logs if key.endswith("_runtime")), "eval_")
        unit = metrics["kl"].unit if "kl" in metrics else ""
        self._kl = {"nats per completion": "KL/compl", "nats per token": "KL/tok"}.get(unit, "KL")
        if "train_runtime" in logs:
            self._write(f"done   step {state.global_step} of {state.max_steps}, {_shown(numbers['train_runtime'])} s")
        elif evaluated := row(prefix):
            self._row(prefix[:-1], state, evaluated)
        elif is_training_log(logs):
            if self._seconds:
                numbers["seconds"] = sum(self._seconds) / len(self._seconds)
            self._seconds = []
            self._row("train", state, row())
        elif others := [f"{key} {_shown(number)}" for key, number in numbers.items() if key != "epoch"]:  # a script's
            self._write(f"log    {', '.join(others)}")

    def _row(self, kind: str, state: Any, values: dict[str, float]) -> None:
        """Write a row of `values`, numbers by heading, that begins with `kind`, such as `train`; no empty row."""
        if not values:
            return
        self._columns |= values.keys()
        room = (shutil.get_terminal_size((120, 24)).columns - 14) // 10  # 120 in a file
        heads = [head for head in COLUMNS if head in self._columns][:room]
        header = f"{'step':>13}" + "".join(f"{self._kl if head == 'KL' else head:>10}" for head in heads)
        if header != self._header or self._rows >= 20:
            self._write(header)
            self._header = header
            self._rows = 0
        self._rows += 1
        self._write(f"{kind:6}{state.global_step:>7}" + "".join(f"{_shown(values.get(head)):>10}" for head in heads))
        if kind == "train" and self.training_bar is not None:
            self._last |= values
            shown = [f"{head} {_shown(self._last[head])}" for head in COLUMNS if head in self._last]
            self.training_bar.set_postfix_str(", ".join(shown[:2]), refresh=False)

    def _write(self, line: str, file: Any = None) -> None:
        self._clear()
        print(line, file=file, flush=True)  # to stdout by default

    def _clear(self) -> None:
        """Remove the progress bars from the terminal; each reappears at its next step."""
        for bar in filter(None, (self.prediction_bar, self.training_bar)):
            bar.clear()

    def _show_alert(self, record: logging.LogRecord) -> bool:
        """Print an alert's `record`, unless the script has a log handler: a filter that returns whether to log it."""
        if _alerts.hasHandlers():
            self._clear()  # else the handler would write into a bar
            return True
        self._write(f"{getattr(record, 'alert_level', 'notice'):6} {record.getMessage()}", sys.stderr)
        return False  # Python would log it to stderr a second time


def _bar(args: Any, **kwargs: Any) -> tqdm:
    disable = args.disable_tqdm or not sys.stderr.isatty()
    return tqdm(**kwargs, bar_format=_BAR, disable=disable, dynamic_ncols=True)


def _shown(number: float | None) -> str:
    """Return a number as a text of nine characters or less; "-" for None."""
    if number is None:
        return "-"
    return f"{number:.0f}" if number % 1 == 0 and abs(number) < 1e7 else f"{number:.3g}"
