"""Draw the curves of a run, with bounds and alerts, into one picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..runs.files import REGISTRY, whole_file
from ..upstream.packages import need
from .drawing import PANELS, draw_panel
from .metrics import Metric, metrics_of
from .monitor import alerts_of
from .trackers import send_picture

logger = logging.get_logger(__name__)
FILE = "rlhf_monitoring.png"


@dataclass(eq=False, kw_only=True)
class MonitoringPlotCallback(TrainerCallback):
    """
    Draw `rlhf_monitoring.png` into the output directory, and send it to the trackers of `report_to`.

    The picture shows scores, KL, entropy, clip fraction, critic and lengths, with the monitors' bounds and alerts.
    Of the trackers, W&B, TensorBoard (in its run `monitors`) and Trackio receive it.

    >>> trainer.add_callback(MonitoringPlotCallback(steps=50))

    Args:
        steps: optimizer steps from one drawing to the next. The end of training is always drawn.
    """

    steps: int = 100

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"`steps` must be 1 or more, got {self.steps}")
        need("matplotlib", "MonitoringPlotCallback")
        self._drawn = 0
        self._has_ended = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        # Draw at the last log: at `on_train_end`, a tracker's own callback may have closed its run already
        if state.global_step - self._drawn >= self.steps or "train_runtime" in (logs or {}):
            self._draw(args, state)
            self._has_ended = "train_runtime" in (logs or {})

    def on_train_end(self, args, state, control, **kwargs):
        if not self._has_ended:
            self._draw(args, state)

    def _draw(self, args: Any, state: Any) -> None:
        self._drawn = state.global_step
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / FILE
        try:
            registry = state.stateful_callbacks.get(REGISTRY, {})
            plot_monitoring(state.log_history, metrics_of(args), path, alerts_of(state), registry)
        except OSError as error:
            logger.warning(f"{path} cannot be written ({error.strerror}).")
            return
        try:
            send_picture(args, path.stem, path, state.global_step)
        except Exception as error:  # a tracker that fails must not end a run
            logger.warning(f"The picture could not be sent: {error}")


def plot_monitoring(
    history: list[dict[str, Any]],
    metrics: dict[str, Metric],
    path: Path,
    alerts: list[dict[str, Any]] = (),  # type: ignore[assignment]
    registry: dict[str, Any] | None = None,
) -> None:
    """
    Draw a run's log into a PNG.

    Args:
        history: the run's `log_history`.
        metrics: the quantities of its trainer, from `trl_ext.callbacks.metrics`.
        path: path of the PNG.
        alerts: alerts to mark at the foot of every panel.
        registry: states of the monitors, as in `TrainerState.stateful_callbacks`. The bounds to draw are read from
            them.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

    with matplotlib.rc_context({"text.parse_math": False}):  # a `$` in a reward's name begins no formula
        figure = Figure(figsize=(15, 7), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axes, title in zip(panels.flat, PANELS, strict=True):
            if not draw_panel(axes, title, history, metrics, registry or {}, alerts):
                axes.text(0.5, 0.5, "not logged by this trainer", ha="center", transform=axes.transAxes, alpha=0.6)
        for axes in panels[1]:
            axes.set_xlabel("optimizer step")
        figure.suptitle("▲ alert (orange: warning, red: action)" if alerts else "", fontsize="medium")
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=100, format="png")
