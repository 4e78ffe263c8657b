"""Export a run's metrics to Prometheus. `grafana.json` in this folder is a dashboard for them."""

from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..runs.files import is_notice
from ..upstream.packages import need
from .metrics import is_training_log, metrics_of, numbers_in
from .monitor import alerts_of

logger = logging.get_logger(__name__)

GAUGES = {
    "step": "Optimizer steps",
    "kl": "KL to the reference, in the trainer's unit (trl_ext.callbacks.metrics)",
    "entropy": "Entropy, nats per token",
    "clip_fraction": "Share of clipped updates",
    "reward": "Mean reward",
    "reward_std": "Standard deviation of single rewards",
    "length": "Mean length of completions, tokens",
    "explained_variance": "Explained variance of the critic",
    "value_loss": "Value loss",
    "grad_norm": "Gradient norm",
}


@dataclass(eq=False, kw_only=True)
class PrometheusCallback(TrainerCallback):
    """
    Export the run to Prometheus from the main process, by HTTP or a file for the node exporter's textfile collector.

    It exports:

    - the gauges `trl_ext_kl`, `trl_ext_entropy`, …, one for each of `GAUGES`
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
        if self.port is None and self.textfile is None:
            raise ValueError("`PrometheusCallback` needs `port=` or `textfile=` to export to; got neither")
        if self.textfile is not None and not self.textfile.endswith(".prom"):
            raise ValueError(f"`textfile` must end in .prom, which the collector reads; got {self.textfile!r}")
        need("prometheus_client", "PrometheusCallback")
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}  # made when first measured: a new gauge would export 0
        self._gauge = Gauge
        self._log = Gauge("trl_ext_log", "Every number that is logged", ["key"], registry=self.registry)
        self._alerts = Counter("trl_ext_alerts", "Alerts of the monitors", ["monitor"], registry=self.registry)
        self._counted = 0
        self._server: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._counted = len(alerts_of(state))  # Prometheus counters start at 0 in each process
        if self.port is not None and self._server is None and state.is_world_process_zero:
            from prometheus_client import start_http_server

            try:
                self._server, _ = start_http_server(self.port, addr=self.address, registry=self.registry)
                self.port = self._server.server_port
            except OSError as error:
                logger.warning(
                    f"Prometheus gets nothing from this run: {self.address}:{self.port} cannot be opened ({error}). "
                    "Choose another `port`."
                )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not state.is_world_process_zero:
            return
        self._set("step", state.global_step)
        numbers = numbers_in(logs)
        for key, value in numbers.items():
            self._log.labels(key=_label(key)).set(value)
        if is_training_log(logs):
            for name, metric in metrics_of(args).items():
                if name in GAUGES and metric.key in numbers:
                    self._set(name, numbers[metric.key])
        self._export(state)

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._gauge(f"trl_ext_{name}", GAUGES[name], registry=self.registry)
        self._gauges[name].set(value)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._export(state)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _export(self, state: Any) -> None:
        alerts = alerts_of(state)
        for alert in alerts[self._counted :]:
            if not is_notice(alert):
                self._alerts.labels(monitor=_label(alert["monitor"])).inc()
        self._counted = len(alerts)
        if self.textfile is None:
            return
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self.textfile, self.registry)
        except OSError as error:
            logger.warning(f"{self.textfile} cannot be written ({error.strerror}): Prometheus gets nothing there.")
            self.textfile = None


def _label(text: str) -> str:
    """Return the text without line ends and lone surrogates, which a Prometheus label cannot hold."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
