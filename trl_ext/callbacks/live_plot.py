"""Draw curves in a notebook during training."""

import io
import time
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ..runs.files import REGISTRY
from ..upstream.packages import need
from .drawing import draw_panel
from .metrics import metrics_of
from .monitor import alerts_of


@dataclass(eq=False, kw_only=True)
class LivePlotCallback(TrainerCallback):
    """
    Draw curves below the notebook cell that trains, and redraw them at each log.

    transformers shows a table below that cell, with a column for each number of an evaluation. To see the curves
    alone, call `trainer.remove_callback(transformers.utils.notebook.NotebookProgressCallback)`.

    The packages IPython and matplotlib are needed.

    >>> trainer.add_callback(LivePlotCallback(panels=("scores", "loss"), seconds=5))

    Args:
        panels: what to draw: panels of [`MonitoringPlotCallback`], such as "entropy, nats per token", or keys of the
            logs, such as "loss".
        seconds: shortest time between two drawings. The end of training is always drawn.
    """

    panels: tuple[str, ...] = ("scores", "KL to the reference, nats")
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for package in ("IPython", "matplotlib"):
            need(package, "LivePlotCallback")
        if not self.panels or isinstance(self.panels, str):
            raise ValueError(f"`panels` must be a list of panels or keys, got {self.panels!r}")
        self._shown: Any = None
        self._drawn = 0.0
        self._is_training = False  # an evaluation by hand, in a cell of its own, draws nothing

    def on_train_begin(self, args, state, control, **kwargs):
        self._shown, self._is_training = None, state.is_world_process_zero

    def on_log(self, args, state, control, **kwargs):
        if self._is_training and time.monotonic() - self._drawn >= self.seconds:
            self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        if self._is_training:
            self._draw(args, state)
        self._is_training = False

    def _draw(self, args: Any, state: Any) -> None:
        from IPython.display import Image, display

        picture = Image(data=self._png(args, state), format="png")
        if self._shown is None:
            self._shown = display(picture, display_id=True)
        else:
            self._shown.update(picture)
        self._drawn = time.monotonic()

    def _png(self, args: Any, state: Any) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook's

        registry, file = state.stateful_callbacks.get(REGISTRY, {}), io.BytesIO()
        with matplotlib.rc_context({"text.parse_math": False}):
            figure = Figure(figsize=(5 * len(self.panels), 3.2), layout="constrained")
            for axes, name in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
                draw_panel(axes, name, state.log_history, metrics_of(args), registry, alerts_of(state))
                axes.set(xlabel="optimizer step", xlim=(0, max(state.max_steps, 1)))
            figure.savefig(file, dpi=100)
        return file.getvalue()
