"""Define `MonitorCallback`, the base class of monitors, which tests changes for significance and sends alerts."""

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.request import Request, urlopen

from tenacity import Retrying, stop_after_attempt, wait_exponential
from transformers import TrainerCallback
from transformers.utils.logging import get_logger

from ..runs.control import (
    STOPPED,
    Stopped,
    forbid_saving,
    read_stop,
    request_kl_scale,
    request_rate_scale,
    saving_forbidden,
    write_stop,
)
from ..runs.files import REGISTRY, RUNBOOK, append_jsonl, finite, from_first, on_first
from ..runs.redaction import redacted
from .metrics import Metric, completions_in_log, is_training_log, metrics_of, numbers_in, rollout_steps
from .trend import Series

logger = get_logger(__name__)
Action = Literal["warn", "save", "stop", "raise_kl", "lower_rate"]
Level = Literal["alert", "notice"]
TRACKERS = ("wandb", "tensorboard", "trackio")
NAMES = ("log", "jsonl", *TRACKERS)


@dataclass
class Finding:
    """
    Describe one problem that `watch` found. `MonitorCallback` makes an [`Alert`] of each finding.

    Args:
        what: the problem, in words.
        advice: what to do, in a sentence.
        value: the measured number, if there is one.
        bound: the limit that `value` exceeds or falls below, if any.
        baseline: the earlier number that `value` is compared with, if any.
        acts: whether the monitor takes its `action`; if False, it only warns.
        level: `alert` for a problem of the run, `notice` for a problem of the monitor.
    """

    what: str
    advice: str
    value: float | None = None
    bound: float | None = None
    baseline: float | None = None
    acts: bool = True
    level: Level = "alert"


@dataclass
class Alert(Finding):
    """
    Hold a [`Finding`] in the form in which it is sent. A notice is sent like an alert, but does not count as one.

    Args:
        monitor: class name of the monitor.
        step: optimizer step.
        action: what the monitor does, see [`MonitorCallback`].
        runbook: file and section of the documentation on this problem.
        others: see [`Finding`].
    """

    monitor: str = ""
    step: int = 0
    action: str = "warn"
    runbook: str = ""

    def __str__(self) -> str:
        numbers = {"value": self.value, "bound": self.bound, "baseline": self.baseline}
        shown = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items() if number is not None)
        what = f"{self.what} ({shown})" if shown else self.what
        return f"{self.monitor}, step {self.step}: {what}. {self.advice} See {self.runbook}."


def send_to(name: str, alert: Alert, args: Any) -> None:
    """
    Send an alert to the sink called `name`, or post it if `name` is a URL.

    `log` is the log of transformers, `jsonl` the file `alerts.jsonl` in the output directory. Others are trackers;
    TensorBoard shows alerts as text of its run `monitors`. A URL gets JSON: the alert's fields, and `text`, the alert
    in words, which Slack and similar services show. wandb and trackio raise an error if no run of theirs is open.

    `args` are the trainer's arguments, which have the output directory.
    """
    title = f"{alert.monitor}: {alert.what}"
    severity = "INFO" if alert.level == "notice" else "WARN" if alert.action == "warn" else "ERROR"
    match name:
        case "log":
            logger.warning(str(alert), extra={"alert_level": alert.level})
        case "jsonl":
            row = {"timestamp": time.time(), "type": "alert", **asdict(alert)}
            append_jsonl(f"{args.output_dir}/alerts.jsonl", row)
        case "wandb":
            import wandb

            wandb.alert(title=title, text=str(alert), level=severity)  # type: ignore[attr-defined]
        case "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter  # transformers' own writer is closed by the end
            except ImportError:  # as transformers does
                from tensorboardX import SummaryWriter  # type: ignore[no-redef]

            folder = os.getenv("TENSORBOARD_LOGGING_DIR") or f"{args.output_dir}/runs"
            with SummaryWriter(f"{folder}/monitors") as writer:
                writer.add_text(f"alerts/{alert.monitor}", str(alert), alert.step)
        case "trackio":
            import trackio

            trackio.alert(title, str(alert), trackio.AlertLevel[severity])
        case url:  # in the background; the process waits for it before it ends
            body = json.dumps(finite({"text": str(alert), **asdict(alert)})).encode()
            threading.Thread(target=_post, args=(Request(url, body, {"Content-Type": "application/json"}),)).start()


def _post(request: Request) -> None:
    """Post the `request` of an alert, with up to four tries; training continues even if all fail."""
    try:
        tries = Retrying(stop=stop_after_attempt(4), wait=wait_exponential(), reraise=True)
        tries(urlopen, request, timeout=5).close()
    except Exception as error:
        url = redacted(request.full_url, "webhook")
        logger.warning(f"An alert could not be posted to {url}: {redacted(str(error))}")


def trackio_is_open() -> bool:
    """
    Return whether a Trackio run is open.

    When training ends, transformers closes its Trackio run before it calls callbacks that were added later.
    """
    import trackio

    return trackio.context_vars.current_run.get() is not None


# ---- Monitors ----


class Memory(dict):
    """
    Hold a monitor's state, which is saved in checkpoints.

    If `state.stateful_callbacks` holds a plain dict in place of a `Memory`, that dict was read from a checkpoint, and
    a new monitor takes it over.
    """


@dataclass(eq=False, kw_only=True)
class MonitorCallback(TrainerCallback):
    """
    Read the training logs, and raise alerts: the base class of monitors.

    A subclass is a dataclass that defines `watch(logs)`. All processes make the same decision, by the main process's
    numbers. Where a monitor counts `rollouts`, it counts the logs that have its quantity; a log covers several
    rollouts if `logging_steps` is larger than a rollout.

    A monitor that ends a run leaves the file `stopped.json`. The same command then reports this and does not train. To
    resume, set `resume_anyway` in trl_ext's trainers; with any other trainer, delete the file.

    >>> from dataclasses import dataclass
    >>> @dataclass(eq=False, kw_only=True)
    ... class LossCallback(MonitorCallback):
    ...     limit: float = 5.0
    ...
    ...     def watch(self, logs):
    ...         losses = self.follow("loss", logs["loss"])
    ...         if found := losses.above(plus=self.limit):  # the mean and the limit
    ...             yield Finding("the loss is high", "Lower the learning rate.", *found)
    >>> trainer.add_callback(LossCallback(limit=4, action="stop"))

    Args:
        action: what an alert does besides being sent.

            - `warn`: nothing more.
            - `save`: write a checkpoint at this step.
            - `stop`: write a checkpoint and end training.
            - `raise_kl`: raise the KL coefficient ([`~trl_ext.callbacks.request_kl_scale`]); only PPOTrainer does so.
            - `lower_rate`: lower the learning rates; only PPOTrainer does so.
        sinks: where alerts go: "log", "jsonl" (`alerts.jsonl` in the output directory), "wandb", "tensorboard",
            "trackio", a webhook's URL, or objects with `send(alert)`. The trackers that the run reports to are added.
        repeat_steps: number of optimizer steps for which an alert is not repeated. An alert that ends the run is never
            held back.
        kl_factor: factor by which `raise_kl` multiplies the KL coefficient.
        rate_factor: factor by which `lower_rate` multiplies the learning rates; with `step_kl_target` above 0, that
            target is multiplied by the factor's square instead.
        keys: mapping from a quantity to its key in the logs, for trainers and metrics that
            `trl_ext.callbacks.metrics` does not know.
    """

    action: Action = "warn"
    sinks: list[Any] = field(default_factory=lambda: ["log", "jsonl"])
    repeat_steps: int = 100
    kl_factor: float = 2.0
    rate_factor: float = 0.5
    keys: dict[str, str] = field(default_factory=dict)

    runbook = ""  # the heading of this monitor's section in the runbook
    saves = True  # whether `stop` writes a checkpoint; if not, the weights are not saved at all

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):  # it would only warn, without a word
            raise ValueError(f"`action` must be one of {', '.join(get_args(Action))}; got {self.action!r}")
        names = {each for each in self.sinks if isinstance(each, str) and not each.startswith("http")}
        if unknown := names.difference(NAMES):  # no alert would arrive
            known = ", ".join(NAMES)
            raise ValueError(f"`sinks` are URLs, objects with a method `send`, or names: {known}; got {unknown}")
        self.memory: dict[str, Any] = Memory()  # all that is not an argument, as JSON
        self.step = 0
        self._args: Any = None
        self._logging_steps = 1
        self._logs: dict[str, Any] = {}
        self._known: dict[str, Metric] = {}
        self._notes: list[Finding] = []  # of problems beside those that `watch` yields
        self._is_training: bool | None = None  # None before the first training
        self._owes_save = False  # `save` or `stop` waits for a checkpoint, which `save_strategy="best"` may skip

    # ---- State ----

    def on_train_begin(self, args, state, control, **kwargs):
        registry = state.stateful_callbacks.setdefault(REGISTRY, {})
        name = type(self).__name__
        if stopped := on_first(read_stop, args.output_dir, f"delete {STOPPED}"):  # our trainers have asked before
            raise Stopped(f"{stopped}.")
        if name in registry:
            memory = registry[name]["attributes"]["memory"]
            if isinstance(memory, Memory) and memory is not self.memory:
                raise ValueError(
                    f"There are two {name}s among the callbacks, which would share one state: remove one."
                )
            self.memory = Memory(memory)
        elif self._is_training is not None:
            self.memory = Memory()  # another run begins: what the previous run's logs showed does not apply to it
        self._is_training = True
        self._owes_save = False
        plain = (str, int, float, list, tuple, dict, type(None))
        arguments = {}
        for argument in fields(self):
            value = getattr(self, argument.name)
            if isinstance(value, plain):
                arguments[argument.name] = value
        # The registry holds the memory itself, not a copy, so that each checkpoint saves it as it is by then
        registry[name] = {"args": redacted(finite(arguments)), "attributes": {"memory": self.memory}}
        self._begin(args, state, {})
        if self.action in ("raise_kl", "lower_rate") and "episodes" not in self._known:
            self._note(f"`{self.action}` has no effect: only PPOTrainer does this", "Choose another action.")

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_step_end(self, args, state, control, **kwargs):
        """
        Request a checkpoint again, at the end of each step and of each epoch, until the one that the monitor asked for
        is written.

        transformers resets requests when a step begins, and may request a checkpoint when an epoch ends. If the
        weights must not be saved, a stop without a checkpoint is requested instead.
        """
        if saving_forbidden(state):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = control.should_log = False
        elif self._owes_save:
            control.should_save = True

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._owes_save = False

    # ---- Reading ----

    def watch(self, logs: dict[str, Any]) -> Iterator[Finding]:
        """Yield a [`Finding`] for each problem that a log of training steps shows; `logs` has the log's numbers."""
        return iter(())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not is_training_log(logs):
            return
        # A number may differ between processes
        self._begin(args, state, from_first(numbers_in(logs)))
        self._handle(self.watch(self._logs), state, control)

    def _begin(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        self.step = state.global_step
        self._args = args
        self._logs = logs
        self._known = metrics_of(args)
        # Below 1, `logging_steps` is a share of all steps
        self._logging_steps = int(args.logging_steps if args.logging_steps >= 1 else state.logging_steps)

    def read(self, quantity: str, key: str | None = None, optional: bool = False) -> float | None:
        """
        Return a quantity's number in this log; None if the log has no such number, or if the number is not finite.

        A number that is not finite raises an alert. A quantity that no log has had for longer than a rollout raises
        one notice, unless it is `optional`.

        Args:
            quantity: a name in `METRICS`, or any name if `key` is given.
            key: the quantity's key in the logs, if it is not in `METRICS`, such as a reward function's metric.
            optional: whether the quantity may be missing from all logs.
        """
        metric = self._known.get(quantity)
        seen = self.memory.setdefault("seen", {})
        key = self.keys.get(quantity) or (metric.key if metric else key)
        value = self._number(key, self._logs)
        if value is not None:
            seen[quantity] = self.step
        elif not optional:
            rollout = rollout_steps(self._args)
            # Nothing is logged of the policy while the critic alone is trained
            warm_up = rollout * (getattr(self._args, "critic_warmup_rollouts", None) or 0)
            since = max(warm_up, seen.setdefault(quantity, max(0, self.step - self._logging_steps)))
            if self.step - since > rollout + self._logging_steps:
                seen[quantity] = 10**12  # said once: no step comes after this one
                self._note(
                    f"nothing to watch: no log has had `{key or quantity}` since step {since}",
                    f"Tell the monitor the key in the logs, `keys={{'{quantity}': …}}`, or remove the monitor.",
                )
        return value

    def _number(self, key: str | None, logs: dict[str, Any]) -> float | None:
        """Return the number under a key; None if it is missing or not finite. If it is not finite, raise an alert."""
        value = logs.get(key or "")
        if not isinstance(value, (int, float)):
            return None
        if math.isfinite(value):
            return value
        advice = f"It is {value}: look for NaN in the losses, lower the learning rate, go back to a checkpoint."
        # Whatever the bound is, +∞ is beyond it
        self._notes.append(Finding(f"`{key}` is not finite", advice, acts=value == math.inf))
        return None

    def _note(self, what: str, advice: str) -> list[Finding]:
        """Queue a notice of `what` was found, with `advice` on what to do; it is sent with the next findings."""
        self._notes.append(Finding(what, advice, acts=False, level="notice"))
        return []  # for a caller that has no finding to send

    def read_kl(self) -> float | None:
        """
        Return this log's KL in nats per completion; a KL per token is multiplied by the mean length, the last known
        one if the log has none.

        Return None if the log has no KL, or if no log has had the length that is needed.
        """
        kl = self.read("kl")
        if not self.kl_is_per_token:
            return kl
        self.memory["length"] = length = self.read("length") or self.memory.get("length")
        return None if kl is None or length is None else kl * length

    @property
    def kl_is_per_token(self) -> bool:
        """
        Return whether the trainer logs the KL per token, which must be multiplied by a completion's length; False if
        `keys` names the KL's key.
        """
        metric = self._known.get("kl")
        return metric is not None and metric.unit == "nats per token" and "kl" not in self.keys

    # ---- Noise ----

    def follow(
        self, name: str, value: float | None, first: int = 0, size: int = 1, logs: int = 1, **noise: Any
    ) -> Series:
        """
        Add one log's value to the series of its quantity, and return the series.

        Return an empty series, which crosses no bound, if `value` is None, or before the last of the `logs` logs.

        Args:
            name: name of the series. Unless `**noise` gives the error of `value`, it is computed from the standard
                deviation that the trainer logs for the quantity of this name. If the trainer logs none, the error is
                estimated from the scatter of the values.
            value: the quantity's mean in this log; None if the log has none.
            first: number of first values that make the baseline; 0 for no baseline.
            size: number of values in the shortest of the means that are tested.
            logs: number of successive logs that measure the same completions. Their mean is added to the series, as
                one value, once the last of them has come.
            **noise: further arguments of `Series.add`, about the error of `value`.
        """
        if value is None:
            return Series({})
        noise = noise or self.noise(name)
        if logs > 1:
            parts = self.memory.setdefault("parts", {}).setdefault(name, [])
            parts.append([value, noise.get("error")])
            if len(parts) < logs:
                return Series({})
            values, errors = zip(*self.memory["parts"].pop(name), strict=True)
            value = sum(values) / logs
            if "error" in noise:  # all logs measure the same completions, so more logs do not lessen the error
                noise["error"] = None if None in errors else max(errors)
        series = Series(self.memory.setdefault("series", {}).setdefault(name, {}), first, size)
        series.add(value, **noise)
        return series

    def follow_best(self, name: str, value: float | None, **settings: Any) -> tuple[Series, bool]:
        """
        Follow a quantity as `follow` does, but restart the series when the quantity rises, so that its best is the
        baseline. `settings` are the other arguments of `follow`.

        Returns:
            The series, and whether the quantity has risen in this log. Only a significant rise counts: the highest of
            many values is partly chance.
        """
        series = self.follow(name, value, **settings)
        if not series.above(1):
            return series, False
        del self.memory["series"][name]
        return self.follow(name, value, **settings), True

    def windows(self, steps: int) -> dict[str, Any]:
        """
        Return the arguments `logs` and `size` of `follow` for averaging a quantity over `steps` optimizer steps.

        - `logs`: number of logs in one rollout. Their mean is one value of the series.
        - `size`: number of such values that cover `steps`.
        """
        logs = math.ceil(rollout_steps(self._args) / self._logging_steps)
        return {"logs": logs, "size": max(1, math.ceil(steps / (logs * self._logging_steps)))}

    @property
    def completions_per_log(self) -> float | None:
        """Return how many completions a log measures, those of one prompt counted as one; None if unknown."""
        return completions_in_log(self._args, self._logging_steps)

    def noise(self, quantity: str) -> dict[str, Any]:
        """
        Return two keyword arguments of `follow`: `error`, the standard error of a quantity's mean in this log, and
        `dof`, its degrees of freedom; {} if the error is unknown.
        """
        metric = self._known.get(quantity)
        spread = self._logs.get(metric.std) if metric and metric.std and quantity not in self.keys else None
        return error_of_mean(spread, self.completions_per_log)

    # ---- Acting ----

    def _handle(self, findings: Iterable[Finding], state: Any, control: Any) -> None:
        """Raise an alert for each finding, and take the monitor's action."""
        findings, self._notes = [*findings, *self._notes], []  # reading the findings may add notes
        raised = self.memory.setdefault("raised", {})
        for finding in findings:
            # An action that ends a run has nothing to end outside of training
            action: Action = self.action if finding.acts and self._is_training else "warn"
            is_due = self.step - raised.get(finding.what, -math.inf) >= self.repeat_steps
            if is_due or (action == "stop" and not self._owes_save):  # PPO stops at the end of the rollout
                raised[finding.what] = self.step
                self._send(self._alert(finding, action), state)
                self._act(action, finding.what, state, control)

    def _alert(self, finding: Finding, action: Action) -> Alert:
        where = f"{RUNBOOK}#{self.runbook}"
        found = vars(finding)
        return Alert(**found, monitor=type(self).__name__, step=self.step, action=action, runbook=where)

    def _act(self, action: Action, what: str, state: Any, control: Any) -> None:
        if action == "raise_kl":
            request_kl_scale(state, self.kl_factor)
        if action == "lower_rate":
            request_rate_scale(state, self.rate_factor)
        if action == "stop":
            control.should_training_stop = True
            if not self.saves:
                how = "find the cause, then resume from the newest checkpoint"
                forbid_saving(state, f"{type(self).__name__} ended this run at step {self.step} ({what}): {how}.")
                control.should_evaluate = False
            if self._args.should_save:
                write_stop(self._args.output_dir, type(self).__name__, self.step, what)
        if action in ("save", "stop"):  # after `forbid_saving`; another monitor may have forbidden it, too
            control.should_save = self._owes_save = not saving_forbidden(state)

    def _send(self, alert: Alert, state: Any) -> None:
        alert = Alert(**redacted(vars(alert)))  # it may cite the error of a judge behind a URL
        state.stateful_callbacks.setdefault(REGISTRY, {}).setdefault("alerts", []).append(finite(vars(alert)))
        trackers = [name for name in TRACKERS if name in self._args.report_to and name not in self.sinks]
        for sink in [*self.sinks, *trackers] if state.is_world_process_zero else []:
            try:
                send_to(sink, alert, self._args) if isinstance(sink, str) else sink.send(alert)
            except Exception as error:  # a sink that fails must not end a run
                name = sink if sink in NAMES else type(sink).__name__
                logger.warning(f"The sink {name} could not send an alert: {redacted(str(error))}")


def alerts_of(state: Any) -> list[dict[str, Any]]:
    """
    Return all monitors' alerts, including those before a resume, each as a dict with the fields of an [`Alert`];
    notices are left out. `state` is the trainer's state.
    """
    sent = state.stateful_callbacks.get(REGISTRY, {}).get("alerts", [])
    return [alert for alert in sent if alert.get("level", "alert") == "alert"]


def spread_key(key: str) -> str:
    """
    Return the key under which an evaluation logs the standard deviation that belongs to the mean under `key`: `…/std`
    for `…/mean`, else `{key}_std`.
    """
    return key.removesuffix("/mean") + "/std" if key.endswith("/mean") else f"{key}_std"


def error_of_mean(spread: float | None, count: float | None) -> dict[str, Any]:
    """
    Return a dict with `error`, the standard error of a mean over `count` completions, and `dof`, its degrees of
    freedom.

    `spread` is the standard deviation of single completions. Return {} if `spread` or `count` is None, or if `spread`
    is not finite.
    """
    if spread is None or count is None or not math.isfinite(spread):
        return {}
    return {"error": spread / math.sqrt(count), "dof": max(count - 1, 1)}


def number_of_rows(dataloader: Any) -> int | None:
    """
    Return the number of rows in an evaluation's data; None if there are none, or if `dataloader` does not tell it.

    If the data has a column `held_out`, count only the rows that it marks.
    """
    dataset: Any = getattr(dataloader, "dataset", None)
    if "held_out" in (getattr(dataset, "column_names", None) or ()):
        return sum(map(bool, dataset["held_out"])) or None
    return len(dataset) or None if hasattr(dataset, "__len__") else None
