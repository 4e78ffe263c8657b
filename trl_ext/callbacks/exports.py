"""Export a run to Prometheus (`grafana.json` in this folder is a dashboard) and as a picture of its curves."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..runs.files import REGISTRY, whole_file
from ..upstream.packages import need
from .metrics import PANELS, draw_alerts, is_training_log, metrics_of, numbers_in
from .monitor import alerts_of

logger = logging.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class PrometheusCallback(TrainerCallback):
    """
    Export the run to Prometheus from the main process, by HTTP or a file for the node exporter's textfile collector.

    It exports:

    - the gauges `trl_ext_step`, `trl_ext_kl`, `trl_ext_entropy`, …, one for each quantity of `METRICS`, in its unit
    - the gauge `trl_ext_log{key=…}`, for every logged number
    - the counter `trl_ext_alerts_total{monitor=…}`

    A number that was never logged is not exported. The package `prometheus-client` is needed.

    >>> trainer.add_callback(PrometheusCallback(textfile="run.prom"))

    Args:
        port: port of the HTTP server. 0 takes a free port, None starts no server.
        textfile: path of the file, ending in `.prom`. None writes no file.
        address: address that the server listens on. The default is reachable from this machine only.
    """

    port: int | None = None
    textfile: str | None = None
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.port is None and not str(self.textfile).endswith(".prom"):
            raise ValueError(
                "`PrometheusCallback` exports to `port=`, or to a `textfile=` that ends in .prom: the collector reads "
                f"no other; got {self.textfile!r}"
            )
        need("prometheus_client", "PrometheusCallback")
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._named: dict[str, tuple[str, float]] = {}  # quantity → its unit and value
        self._numbers: dict[str, float] = {}
        self._alerts: list[dict[str, Any]] = []
        self._server: Any = None

    def collect(self):
        """Yield what Prometheus is given: the collector's interface of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        logs = GaugeMetricFamily("trl_ext_log", "Every number that is logged", labels=["key"])
        alerts = CounterMetricFamily("trl_ext_alerts", "Alerts of the monitors", labels=["monitor"])
        for key, value in self._numbers.copy().items():  # the server has a thread of its own
            logs.add_metric([_label(key)], value)
        for monitor, count in Counter(alert["monitor"] for alert in self._alerts).items():
            alerts.add_metric([_label(monitor)], count)
        gauges = (GaugeMetricFamily(f"trl_ext_{name}", *of) for name, of in self._named.copy().items())
        yield from (*gauges, logs, alerts)

    def on_train_begin(self, args, state, control, **kwargs):
        if self.port is not None and self._server is None and state.is_world_process_zero:
            from prometheus_client import start_http_server

            self._server, _ = start_http_server(self.port, addr=self.address, registry=self.registry)
            self.port = self._server.server_port

    def on_log(self, args, state, control, logs=None, **kwargs):
        numbers = numbers_in(logs or {})
        self._numbers |= numbers
        self._named["step"] = "optimizer steps", state.global_step
        if is_training_log(numbers):
            known = metrics_of(args).items()
            self._named |= {name: (of.unit, numbers[of.key]) for name, of in known if of.key in numbers}
        self._export(state)

    def on_train_end(self, args, state, control, **kwargs):
        self._export(state)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _export(self, state: Any) -> None:
        self._alerts = alerts_of(state)
        if self.textfile is not None and state.is_world_process_zero:
            from prometheus_client import write_to_textfile

            try:
                write_to_textfile(self.textfile, self.registry)
            except OSError as error:
                logger.warning(f"{self.textfile} cannot be written ({error.strerror}): Prometheus gets nothing there.")
                self.textfile = None


def _label(text: str) -> str:
    """Return the text without line ends and lone surrogates, which a Prometheus label cannot hold."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@dataclass(eq=False, kw_only=True)
class MonitoringPlotCallback(TrainerCallback):
    """
    Draw `rlhf_monitoring.png` into the output directory.

    The picture shows scores, KL, entropy, clip fraction, critic and lengths, with the monitors' bounds and alerts.

    >>> trainer.add_callback(MonitoringPlotCallback(steps=50))

    Args:
        steps: optimizer steps from one drawing to the next. The end of training is always drawn.
    """

    steps: int = 100

    def __post_init__(self) -> None:
        need("matplotlib", "MonitoringPlotCallback")
        self._drawn = 0

    def on_log(self, args, state, control, **kwargs):
        if state.global_step - self._drawn >= self.steps:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        self._drawn, path = state.global_step, Path(args.output_dir) / "rlhf_monitoring.png"
        if state.is_world_process_zero:
            try:
                plot_monitoring(state, args, path)
            except OSError as error:
                logger.warning(f"{path} cannot be written ({error.strerror}).")


def plot_monitoring(state: Any, args: Any, path: Path) -> None:
    """Draw a run's log, its monitors' bounds and its alerts into a PNG, from its `TrainerState` and arguments."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

    alerts = alerts_of(state)
    with matplotlib.rc_context({"text.parse_math": False}):  # a `$` in a reward's name begins no formula
        figure = Figure(figsize=(15, 7), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axes, (title, draw) in zip(panels.flat, PANELS.items(), strict=True):
            draw(axes, state.log_history, metrics_of(args), state.stateful_callbacks.get(REGISTRY, {}))
            axes.set(title=title, xlabel="optimizer step")
            axes.grid(alpha=0.3)
            if axes.lines or axes.collections:
                axes.legend(fontsize="small", loc="best")
            else:
                axes.text(0.5, 0.5, "not logged by this trainer", ha="center", transform=axes.transAxes, alpha=0.6)
            draw_alerts(axes, alerts)
        figure.suptitle("▲ alert (orange: warning, red: action)" if alerts else "", fontsize="medium")
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=100, format="png")
