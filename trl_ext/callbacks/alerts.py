"""Define alerts, and where they go: log, file, trackers of `report_to`, webhooks."""

import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tenacity import Retrying, stop_after_attempt, wait_exponential
from transformers.utils import logging

from ..runs.files import JSONLWriter, finite
from ..runs.redaction import redacted

logger = logging.get_logger(__name__)
Level = Literal["alert", "notice"]
TRACKERS = ("wandb", "tensorboard", "trackio")
NAMES = ("log", "jsonl", *TRACKERS)


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


@dataclass
class NamedSink:
    """
    Send alerts to what a name stands for.

    Args:
        name: `log`, the log of transformers; `jsonl`, the file `alerts.jsonl` in the output directory; or one of the
            trackers `wandb`, `tensorboard` (as text in its run `monitors`) and `trackio`.
        args: the run's training arguments.
    """

    name: str
    args: Any

    def __post_init__(self) -> None:
        self.writer = JSONLWriter(Path(self.args.output_dir) / "alerts.jsonl")  # opened when it first writes

    def send(self, alert: Alert) -> None:
        title = f"{alert.monitor}: {alert.what}"
        severity = "INFO" if alert.level == "notice" else "WARN" if alert.action == "warn" else "ERROR"
        match self.name:
            case "log":
                logger.warning(str(alert), extra={"alert_level": alert.level})
            case "jsonl":
                self.writer.write({"timestamp": time.time(), "type": "alert", **asdict(alert)})
            case "wandb":
                import wandb

                if wandb.run is not None:
                    wandb.alert(title=title, text=str(alert), level=severity)  # type: ignore[attr-defined]
            case "tensorboard":
                with tensorboard_writer(self.args) as writer:
                    writer.add_text(f"alerts/{alert.monitor}", str(alert), alert.step)
            case "trackio":
                import trackio

                if trackio_is_open():
                    trackio.alert(title, str(alert), trackio.AlertLevel[severity])


class WebhookSink:
    """Post alerts as JSON to a URL, each from a thread of its own.

    The JSON has the alert's fields, and `text`, the alert in words, which Slack and similar services show.

    Args:
        url: address to post to, http or https.
        timeout: seconds that one try may take.
        retries: number of further tries after a failed one, with pauses of 1, 2, 4, … seconds.
    """

    def __init__(self, url: str, timeout: float = 5.0, retries: int = 3):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"an alert goes to one of {', '.join(NAMES)}, or to an http or https URL, got {url!r}")
        self.url, self.timeout, self.retries = url, timeout, retries
        self._threads: list[threading.Thread] = []

    def send(self, alert: Alert) -> None:
        """Post the alert in the background."""
        self._threads.append(threading.Thread(target=self._post, args=(alert,), daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Wait until all alerts are posted, but no longer than `timeout`."""
        end = time.monotonic() + self.timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _post(self, alert: Alert) -> None:
        body = json.dumps(finite({"text": str(alert), **asdict(alert)})).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        tries = Retrying(stop=stop_after_attempt(self.retries + 1), wait=wait_exponential(), reraise=True)
        try:
            tries(urllib.request.urlopen, request, timeout=self.timeout).close()
        except Exception as error:  # training goes on, whatever the server does
            url = redacted(self.url, "webhook")
            logger.warning(f"{url} did not take an alert in {self.retries + 1} tries: {redacted(str(error))}")


def make_sinks(sinks: Sequence[Any], args: Any) -> list[Any]:
    """
    Return the sinks of a run: one for each entry of `sinks`, and one for each further tracker of `report_to`.

    An entry is a name, a URL, or an object with `send`, which is returned as it is.
    """
    trackers = [name for name in getattr(args, "report_to", None) or [] if name in TRACKERS and name not in sinks]
    return [
        (NamedSink(sink, args) if sink in NAMES else WebhookSink(sink)) if isinstance(sink, str) else sink
        for sink in [*sinks, *trackers]
    ]


# ---- Trackers ----


@contextmanager
def tensorboard_writer(args: Any) -> Iterator[Any]:
    """
    Open a writer of the TensorBoard run `monitors`, beside the run that transformers writes.

    transformers' own writer cannot be used: callbacks have no access to it, and it is closed when training ends.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # transformers takes the one or the other, too
        from tensorboardX import SummaryWriter  # type: ignore[no-redef]

    folder = Path(os.getenv("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs").expanduser()
    with SummaryWriter(str(folder / "monitors")) as writer:
        yield writer


def trackio_is_open() -> bool:
    """
    Return whether a Trackio run is open.

    When training ends, transformers closes its Trackio run before callbacks that were added later are called.
    """
    import trackio

    return trackio.context_vars.current_run.get() is not None
