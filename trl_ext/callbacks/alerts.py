"""Alerts, and the sinks that they are sent to."""

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging

from ..jsonl import JSONLWriter, finite
from ..redaction import redacted

logger = logging.get_logger(__name__)
RUNBOOK = "docs/runbook.md"
Level = Literal["alert", "notice"]


@dataclass
class Alert:
    """
    One thing that a monitor found.

    With the level `notice` it is of the monitor itself, as that it has nothing to watch: it is sent like an alert, and
    not counted among them.

    Args:
        monitor: class name of who found it.
        what: what was found, in words.
        step: optimizer step.
        value: what was measured, if it is a number.
        bound: what it was not to pass.
        baseline: what it was at first.
        advice: what to do, in a sentence.
        action: what the monitor does about it: `warn`, `save`, `stop`, `raise_kl` or `rollback`.
        runbook: file and section that say more.
        level: `alert`, or `notice`.
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


def is_notice(alert: dict[str, Any]) -> bool:
    """Return whether an alert tells of the monitor, not of the run: it has nothing to watch."""
    return alert.get("level") == "notice"


class LogSink:
    """Writes alerts to the log of transformers, as warnings."""

    def send(self, alert: Alert) -> None:
        """Write the alert."""
        logger.warning(str(alert))


class JSONLSink:
    """
    Appends alerts to a file, one line each.

    Args:
        path: the file.
    """

    def __init__(self, path: str):
        self.writer = JSONLWriter(path)

    def send(self, alert: Alert) -> None:
        """Append the alert."""
        self.writer.write({"timestamp": time.time(), "type": "alert", **asdict(alert)})


class WandbSink:
    """Sends alerts to the open W&B run by `wandb.alert`, if there is one."""

    def send(self, alert: Alert) -> None:
        """Send the alert."""

        import wandb

        if wandb.run is not None:
            level = "INFO" if alert.level == "notice" else "WARN" if alert.action == "warn" else "ERROR"
            wandb.alert(title=f"{alert.monitor}: {alert.what}", text=str(alert), level=level)  # type: ignore[attr-defined]


class WebhookSink:
    """Posts alerts as JSON to a URL, from a thread of its own.

    The JSON has `text`, which Slack and its like show, and the alert's fields.

    Args:
        url: address to post to, http or https.
        timeout: seconds that one try may take.
        retries: tries after the first, after 1, 2, 4, … seconds.
        pending: alerts that may wait. Further ones are dropped with a warning.
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
        """Queue the alert: the thread posts it."""
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
        """Wait for pending alerts, for at most the time of one try."""
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
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout):
                    return
            except Exception:
                if attempt == self.retries:
                    raise
                time.sleep(2.0**attempt)


def make_sinks(sinks: Sequence[Any], args: Any) -> list[Any]:
    """Make sinks from "log", "jsonl", "wandb" and URLs. Objects with `send` stay as they are."""
    made: list[Any] = []
    for sink in sinks:
        match sink:
            case "log":
                made.append(LogSink())
            case "jsonl":
                made.append(JSONLSink(str(Path(args.output_dir) / "alerts.jsonl")))
            case "wandb":
                made.append(WandbSink())
            case str():
                made.append(WebhookSink(sink))
            case _:
                made.append(sink)
    if "wandb" in (getattr(args, "report_to", None) or []) and not any(isinstance(s, WandbSink) for s in made):
        made.append(WandbSink())
    return made


def check_sinks(sinks: Sequence[Any]) -> None:
    """Raise a ValueError before training if one of them is no sink."""
    for sink in [sinks] if isinstance(sinks, str) else sinks:
        if isinstance(sinks, str) or not (
            hasattr(sink, "send") or sink in ("log", "jsonl", "wandb") or str(sink).startswith(("http://", "https://"))
        ):
            raise ValueError(
                f'`sinks` must be a list of "log", "jsonl", "wandb", URLs, or objects with `send`; got {sink!r}'
            )
