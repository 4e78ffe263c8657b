"""Define alerts, and the sinks (log, file, trackers, webhook) that receive them."""

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tenacity import Retrying, stop_after_attempt, wait_exponential
from transformers.utils import logging

from ..runs.jsonl import JSONLWriter, finite
from ..runs.redaction import redacted
from .trackers import tensorboard_writer, trackio_is_open

logger = logging.get_logger(__name__)
Level = Literal["alert", "notice"]


@dataclass
class Alert:
    """
    Describe one problem that a monitor found.

    The level `notice` is for a problem of the monitor itself, such as having nothing to watch. A notice is sent like
    an alert, but is not counted as one.

    Args:
        monitor: class name of the monitor.
        what: the problem, in words.
        step: optimizer step.
        value: the measured number, if there is one.
        bound: the limit that `value` has passed, if there is one.
        baseline: the number from the start of the run that `value` is compared with, if there is one.
        advice: what to do, in a sentence.
        action: what the monitor does: `warn`, `save`, `stop` or `raise_kl`.
        runbook: file and section of the documentation on this problem.
        level: `alert` or `notice`.
    """

    monitor: str
    what: str
    step: int
    value: float | None
    bound: float | None
    baseline: float | None
    advice: str
    action: str
    runbook: str
    level: Level = "alert"

    def __str__(self) -> str:
        numbers = {"value": self.value, "bound": self.bound, "baseline": self.baseline}
        shown = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items() if number is not None)
        what = f"{self.what} ({shown})" if shown else self.what
        return f"{self.monitor}, step {self.step}: {what}. {self.advice} See {self.runbook}."


def _severity(alert: Alert) -> str:
    return "INFO" if alert.level == "notice" else "WARN" if alert.action == "warn" else "ERROR"


class LogSink:
    """Write alerts to the log of transformers, as warnings."""

    def send(self, alert: Alert) -> None:
        """Write the alert."""
        logger.warning(str(alert), extra={"alert_level": alert.level})


class JSONLSink:
    """
    Append alerts to a file, one line each.

    Args:
        path: the file.
    """

    def __init__(self, path: str):
        self.writer = JSONLWriter(path)

    def send(self, alert: Alert) -> None:
        """Append the alert."""
        self.writer.write({"timestamp": time.time(), "type": "alert", **asdict(alert)})


class WandbSink:
    """Send alerts to the open W&B run by `wandb.alert`, if there is one."""

    def send(self, alert: Alert) -> None:
        """Send the alert."""
        import wandb

        if wandb.run is not None:
            title = f"{alert.monitor}: {alert.what}"
            wandb.alert(title=title, text=str(alert), level=_severity(alert))  # type: ignore[attr-defined]


class TensorBoardSink:
    """
    Write alerts as text into TensorBoard's run `monitors`, beside the run's own.

    Args:
        args: the run's training arguments. Their output directory holds TensorBoard's folder `runs`, unless the
            environment variable `TENSORBOARD_LOGGING_DIR` names another.
    """

    def __init__(self, args: Any):
        self.args = args

    def send(self, alert: Alert) -> None:
        """Write the alert."""
        with tensorboard_writer(self.args) as writer:
            writer.add_text(f"alerts/{alert.monitor}", str(alert), alert.step)


class TrackioSink:
    """Send alerts to the open Trackio run by `trackio.alert`, if there is one."""

    def send(self, alert: Alert) -> None:
        """Send the alert."""
        import trackio

        if trackio_is_open():
            trackio.alert(f"{alert.monitor}: {alert.what}", str(alert), trackio.AlertLevel[_severity(alert)])


class WebhookSink:
    """Post alerts as JSON to a URL, from a thread of its own.

    The JSON has the alert's fields, and `text`, the alert in words, which Slack and similar services show.

    Args:
        url: address to post to, http or https.
        timeout: seconds that one try may take.
        retries: number of further tries after a failed one, with pauses of 1, 2, 4, … seconds.
        pending: number of alerts that may wait to be posted. Further alerts are dropped, with a warning.
    """

    def __init__(self, url: str, timeout: float = 5.0, retries: int = 3, pending: int = 100):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a webhook's URL must begin with http:// or https://, got {url!r}")
        if timeout <= 0 or retries < 0:
            raise ValueError(f"`timeout` must be above 0 and `retries` 0 or more, got {timeout} and {retries}")
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self._queue: queue.Queue[Alert] = queue.Queue(maxsize=pending)
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Queue the alert for the thread that posts alerts."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="trl-ext-webhook")
            self._thread.start()
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            logger.warning(f"{self} is too slow: an alert was dropped.")

    def __str__(self) -> str:
        return str(redacted(self.url, "webhook"))

    def close(self) -> None:
        """Wait until all pending alerts are posted, but no longer than `timeout`."""
        end = time.monotonic() + self.timeout
        while self._thread is not None and self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.02)

    def _run(self) -> None:
        while True:
            alert = self._queue.get()
            try:
                self._post(json.dumps(finite({"text": str(alert), **asdict(alert)})).encode())
            except Exception as error:  # training goes on, whatever the server does
                logger.warning(f"{self} did not take an alert in {self.retries + 1} tries: {redacted(str(error))}")
            finally:
                self._queue.task_done()

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        tries = Retrying(stop=stop_after_attempt(self.retries + 1), wait=wait_exponential(), reraise=True)
        with tries(urllib.request.urlopen, request, timeout=self.timeout):
            pass


_MAKERS: dict[str, Callable[[Any], Any]] = {  # name → how to make the sink for a run's `args`
    "log": lambda args: LogSink(),
    "jsonl": lambda args: JSONLSink(str(Path(args.output_dir) / "alerts.jsonl")),
    "wandb": lambda args: WandbSink(),
    "tensorboard": TensorBoardSink,
    "trackio": lambda args: TrackioSink(),
}
_TRACKERS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "trackio": TrackioSink}


def make_sinks(sinks: Sequence[Any], args: Any) -> list[Any]:
    """
    Return the sinks of a run: one for each entry of `sinks`, and one for each further tracker of `report_to`.

    An entry is a name, a URL, or an object with `send`, which is returned as it is.
    """

    def is_given(tracker: str) -> bool:
        return any(sink == tracker or isinstance(sink, _TRACKERS[tracker]) for sink in sinks)

    trackers = [name for name in getattr(args, "report_to", None) or [] if name in _TRACKERS and not is_given(name)]
    return [_make_sink(sink, args) for sink in [*sinks, *trackers]]


def _make_sink(sink: Any, args: Any) -> Any:
    if not isinstance(sink, str):
        return sink
    return _MAKERS[sink](args) if sink in _MAKERS else WebhookSink(sink)


def check_sinks(sinks: Sequence[Any]) -> None:
    """Raise a ValueError if an entry of `sinks` is neither a known name, nor a URL, nor an object with `send`."""
    for sink in [sinks] if isinstance(sinks, str) else sinks:
        is_named = isinstance(sink, str) and (sink in _MAKERS or sink.startswith(("http://", "https://")))
        if isinstance(sinks, str) or not (hasattr(sink, "send") or is_named):
            names = ", ".join(f'"{name}"' for name in _MAKERS)
            raise ValueError(f"`sinks` must be a list of {names}, URLs, or objects with `send`; got {sink!r}")
