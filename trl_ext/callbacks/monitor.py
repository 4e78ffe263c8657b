"""Define `MonitorCallback`, the base class of monitors: it reads logs, tells changes from noise, and raises alerts."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from transformers import TrainerCallback
from transformers.utils import logging

from ..runs.control import kl_scale_is_pending, request_kl_scale, take_kl_scale
from ..runs.files import REGISTRY, RUNBOOK
from ..runs.halts import STOPPED, Stopped, spoil, spoilt, stop_of, write_stop
from ..runs.jsonl import finite
from ..runs.processes import from_first, on_first
from ..runs.redaction import redacted
from .alerts import Alert, Level, check_sinks, make_sinks
from .metrics import Metric, answers_in_log, is_gathered, is_training_log, metrics_of, rollout_steps
from .trend import Series

logger = logging.get_logger(__name__)
Action = Literal["warn", "save", "stop", "raise_kl"]
# Rules for the arguments of monitors: in words, and as a test
POSITIVE = ("above 0", lambda x: x > 0)
ABOVE_ONE = ("above 1", lambda x: x > 1)
AT_LEAST_ONE = ("1 or more", lambda x: x >= 1)
NOT_NEGATIVE = ("0 or more", lambda x: x >= 0)
SHARE = ("in (0, 1)", lambda x: 0 < x < 1)


class Memory(dict):
    """
    Hold what a running monitor remembers.

    If `state.stateful_callbacks` holds a plain dict in place of a `Memory`, that dict was read from a checkpoint, and
    a new monitor takes it over.
    """


@dataclass
class Finding:
    """
    Describe one problem that `watch` found. `MonitorCallback` makes an [`Alert`] of each finding.

    Args:
        what: the problem, in words.
        value: the measured number, if there is one.
        bound: the limit that `value` has passed, if there is one.
        advice: what to do, in a sentence.
        baseline: the number from the start of the run that `value` is compared with, if there is one.
        acts: whether the monitor takes its `action`; if False, it only warns.
        level: `alert` for a problem of the run, `notice` for a problem of the monitor itself.
    """

    what: str
    value: float | None
    bound: float | None
    advice: str
    baseline: float | None = None
    acts: bool = True
    level: Level = "alert"


@dataclass(eq=False, kw_only=True)
class MonitorCallback(TrainerCallback):
    """
    Read the training logs, and raise alerts: the base class of monitors. A subclass defines `watch(logs)`.

    All processes decide alike: where a logged number differs between processes, all use the main process' number.

    A monitor that ended a run leaves `stopped.json`. The same command then says so and trains no step: our trainers go
    on with `resume_anyway`, a stock trainer once that file is deleted.

    >>> from dataclasses import dataclass
    >>> @dataclass(eq=False, kw_only=True)
    ... class LossCallback(MonitorCallback):
    ...     limit: float = 5.0
    ...
    ...     def watch(self, logs):
    ...         losses = self.follow("loss", logs["loss"])
    ...         if (mean := losses.above(plus=self.limit)) is not None:
    ...             yield Finding("the loss is high", mean, self.limit, "Lower the learning rate.")
    >>> trainer.add_callback(LossCallback(limit=4, action="stop"))

    Args:
        action: what an alert does besides being sent. `warn` does nothing more. `save` writes a checkpoint at this
            step. `stop` writes a checkpoint and ends training. `raise_kl` asks the trainer to raise its KL coefficient
            ([`~trl_ext.callbacks.request_kl_scale`]), which PPOTrainer does.
        sinks: where alerts go: "log", "jsonl" (`alerts.jsonl` in the output directory), "wandb", "tensorboard",
            "trackio", a webhook's URL, or objects with `send(alert)`. The trackers that the run reports to are added.
        repeat_steps: optimizer steps for which the same alert is not raised again. With `stop` the alert is always
            raised, and always acts.
        kl_factor: factor that `raise_kl` multiplies the KL coefficient by.
        keys: mapping from a quantity to its key in the logs, for trainers and metrics that
            `trl_ext.callbacks.metrics` does not know.
    """

    action: Action = "warn"
    sinks: list[Any] = field(default_factory=lambda: ["log", "jsonl"])
    repeat_steps: int = 100
    kl_factor: float = 2.0
    keys: dict[str, str] = field(default_factory=dict)

    runbook = ""  # the heading of this monitor's section in the runbook
    saves = True  # whether `stop` writes a checkpoint; if not, the weights are not saved at all
    ranges = {  # argument → its rule; the rules of the base classes hold, too
        "repeat_steps": AT_LEAST_ONE,
        "kl_factor": ("above 1 to raise the KL coefficient", lambda x: x > 1),
    }

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"`action` must be one of {', '.join(get_args(Action))}; got {self.action!r}")
        # Not by `check_settings`: a user's monitor may have annotations that cannot be resolved
        for rules in [vars(cls).get("ranges", {}) for cls in reversed(type(self).__mro__)]:
            for name, (rule, is_valid) in rules.items():
                if not is_valid(getattr(self, name)):
                    raise ValueError(f"`{name}` must be {rule}, got {getattr(self, name)}")
        check_sinks(self.sinks)
        self.memory: dict[str, Any] = Memory()  # all that is not an argument, as JSON
        self.step = 0
        self._args: Any = None
        self._logging_steps = 1
        self._logs: dict[str, Any] = {}
        self._known: dict[str, Metric] = {}
        self._infinite: dict[str, bool] = {}  # keys of this log whose numbers are not finite: whether they are +∞
        self._opened: list[Any] | None = None
        self._has_trained = False
        self._is_training = False
        self._owes_save = False  # `save` or `stop` waits for a checkpoint, which `save_strategy="best"` may skip

    # ---- State ----

    def _arguments(self) -> dict[str, Any]:
        """Return the monitor's arguments that can be written as JSON, without credentials."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return redacted({name: json.loads(json.dumps(value)) for name, value in values.items() if _is_json(value)})

    def on_train_begin(self, args, state, control, **kwargs):
        registry = state.stateful_callbacks.setdefault(REGISTRY, {})
        name = type(self).__name__
        stopped, _ = on_main_process(lambda: stop_of(args.output_dir, f"delete {STOPPED}"))
        if stopped:  # our trainers have asked before
            raise Stopped(f"{stopped}.")
        if name in registry:
            memory = registry[name]["attributes"]["memory"]
            if isinstance(memory, Memory) and memory is not self.memory:
                raise ValueError(
                    f"There are two {name}s among the callbacks, which would share one memory: remove one."
                )
            self.memory = Memory(memory)
        elif self._has_trained:
            self.memory = Memory()  # another run begins: what the previous run's logs showed does not apply to it
        self._has_trained = self._is_training = True
        self._owes_save = False
        # The registry holds the memory itself, not a copy, so that each checkpoint saves it as it is by then
        registry[name] = {"args": self._arguments(), "attributes": {"memory": self.memory}}
        self._begin(args, state, {})

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False
        for sink in self._opened or []:
            if hasattr(sink, "close"):
                sink.close()

    def on_step_end(self, args, state, control, **kwargs):
        """
        Repeat the monitor's requests to stop or to save, at the end of each step and of each epoch.

        transformers resets requests when a step begins, and requests a checkpoint of its own when an epoch ends.
        """
        if spoilt(state):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = control.should_log = False
        elif self._owes_save:
            control.should_save = True

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._owes_save = False

    # ---- Reading ----

    def watch(self, logs: dict[str, Any]) -> Iterator[Finding]:
        """Yield a [`Finding`] for each problem that one log of training steps shows."""
        return iter(())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and is_training_log(logs):
            self._begin(args, state, logs)
            self._check_kl_request(state)
            self._handle(self.watch(logs), state, control)

    def _begin(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        self.step, self._args, self._logs, self._known = state.global_step, args, logs, metrics_of(args)
        self._infinite = {}
        if self._opened is None:
            self._opened = make_sinks(self.sinks, args) if state.is_world_process_zero else []
        # Below 1, `logging_steps` is a share of all steps
        self._logging_steps = int(args.logging_steps if args.logging_steps >= 1 else state.logging_steps)

    def read(self, quantity: str, optional: bool = False) -> float | None:
        """
        Return a quantity's number in this log; None if the log has no such number, or if the number is not finite.

        A number that is not finite raises an alert. A quantity that no log has for longer than a rollout raises one
        notice, unless it is `optional`.
        """
        metric = self._known.get(quantity)
        key = self.keys.get(quantity) or (metric.key if metric else None)
        value = None if key is None else self._number(key, self._logs.get(key))
        if value is not None:
            self.memory.setdefault("seen", {})[quantity] = self.step
        elif not optional:
            since = self.memory.setdefault("seen", {}).setdefault(quantity, max(0, self.step - self._logging_steps))
            rollout = rollout_steps(self._args)
            window = rollout + self._logging_steps
            # Nothing is logged of the policy while the critic alone is trained
            since = max(since, rollout * (getattr(self._args, "critic_warmup_rollouts", None) or 0))
            if self.step - since > window and quantity not in self.memory.setdefault("missing", []):
                self.memory["missing"].append(quantity)
                where = f"the key {key!r} was in no log since step {since}" if key else "this trainer logs no such key"
                self._note(
                    f"nothing to watch: {where}",
                    f"{type(self).__name__} reads `{quantity}`: name another key by `keys={{'{quantity}': ...}}`, or "
                    "remove the monitor.",
                )
        return value

    def is_infinite(self, quantity: str) -> bool:
        """Return whether a quantity is +∞ in this log: it is then above every bound, but is left out of means."""
        metric = self._known.get(quantity)
        return self._infinite.get(self.keys.get(quantity) or (metric.key if metric else "")) is True

    def _number(self, key: str, value: Any) -> float | None:
        if not is_gathered(key):
            value = from_first(value)
        if value is None or isinstance(value, (str, bytes)):
            return None
        if not math.isfinite(value):
            self._infinite[key] = value == math.inf
            self._note(
                f"`{key}` is not finite",
                f"Its value is {value}: look for NaN in the losses, lower the learning rate, and go back to a "
                "checkpoint.",
                level="alert",
            )
            return None
        if next((metric.cadence for metric in self._known.values() if metric.key == key), "rollout") == "rollout":
            self.memory["reads_rollouts"] = True
        return float(value)

    def _note(self, what: str, advice: str, level: Level = "notice") -> None:
        self.memory.setdefault("notes", []).append([what, advice, level])

    # ---- Noise ----

    def follow(
        self, name: str, value: float | None, first: int = 0, size: int = 1, logs: int = 1, **noise: Any
    ) -> Series:
        """
        Add one log's value to the series of its quantity, and return the series.

        If `value` is None, or until all `logs` logs of a rollout have come, return an empty series, which is beyond no
        bound.

        Args:
            name: the quantity, or another name for the series.
            value: the quantity's mean in this log; None if the log has none.
            first, size: as in [`Series`], counted in values. Each value is a mean of `logs` logs.
            logs: number of logs that measure the same answers. Their mean is added to the series as one value.
            **noise: what is known of the error of `value`: the other arguments of `Series.add`. The default is
                computed from the standard deviation that the trainer logs, if it logs one.
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
            if "error" in noise:  # all logs measure the same answers, so more logs do not lessen the error
                noise["error"] = None if None in errors else max(errors)
        series = Series(self.memory.setdefault("series", {}).setdefault(name, {}), first, size)
        series.add(value, **noise)
        return series

    def windows(self, steps: int) -> dict[str, Any]:
        """
        Return the arguments `logs` and `size` of `follow` for averaging a quantity over `steps` optimizer steps.

        - `logs`: number of logs in one rollout. Their mean is one value of the series.
        - `size`: number of such values that cover `steps`.
        """
        logs = math.ceil(rollout_steps(self._args) / self._logging_steps)
        return {"logs": logs, "size": max(1, math.ceil(steps / (logs * self._logging_steps)))}

    @property
    def answers(self) -> float | None:
        """Return the number of independent answers that a log measures (`answers_in_log`); None if unknown."""
        return answers_in_log(self._args, self._logging_steps)

    def noise(self, quantity: str) -> dict[str, Any]:
        """
        Return a mapping with the standard error of a quantity's mean in this log, `error`, and its degrees of freedom,
        `dof`; {} if the trainer does not log the standard deviation of single answers.
        """
        metric, answers = self._known.get(quantity), self.answers
        spread = self._logs.get(metric.std) if metric and metric.std and quantity not in self.keys else None
        if spread is None or answers is None or not math.isfinite(spread):
            return {}
        return {"error": spread / math.sqrt(answers), "dof": max(answers - 1, 1)}

    # ---- Acting ----

    def _handle(self, findings: Iterator[Finding], state: Any, control: Any) -> None:
        """Raise an alert for each finding, and take the monitor's action."""
        step, found = state.global_step, list(findings)
        for what, advice, level in self.memory.pop("notes", []):
            found.append(Finding(what, None, None, advice, acts=False, level=level))
        raised = self.memory.setdefault("raised", {})
        for finding in found:
            # An action that ends a run has nothing to end outside of training
            action: Action = self.action if finding.acts and self._is_training else "warn"
            if action == "raise_kl" and self.memory.get("kl_unheard"):
                action = "warn"
            if action != "stop" and finding.what in raised and step - raised[finding.what] < self.repeat_steps:
                continue
            raised[finding.what] = step
            self._send(self._alert(finding, action), state)
            self._act(action, finding.what, state, control)

    def _alert(self, finding: Finding, action: Action) -> Alert:
        found = {name: value for name, value in vars(finding).items() if name != "acts"}
        runbook = f"{RUNBOOK}#{self.runbook}"
        return Alert(monitor=type(self).__name__, step=self.step, action=action, runbook=runbook, **found)

    def _act(self, action: Action, what: str, state: Any, control: Any) -> None:
        match action:
            case "save":
                control.should_save = self._owes_save = not spoilt(state)
            case "stop":
                control.should_training_stop = True
                if not self.saves:
                    how = "look at it, then go on from the newest checkpoint"
                    spoil(state, f"{type(self).__name__} ended this run at step {self.step} ({what}): {how}.")
                control.should_save = self._owes_save = not spoilt(state)
                control.should_evaluate = control.should_evaluate and not spoilt(state)
                if self._args.should_save:
                    try:
                        write_stop(self._args.output_dir, type(self).__name__, self.step, what)
                    except OSError as error:
                        logger.warning(f"{STOPPED} could not be written ({error}): the same command will go on.")
            case "raise_kl":
                request_kl_scale(state, self.kl_factor)

    def _check_kl_request(self, state: Any) -> None:
        """If the trainer has not answered `raise_kl` within a rollout, send one notice, and only warn from then on."""
        if self.action == "raise_kl" and kl_scale_is_pending(state, rollout_steps(self._args)):
            take_kl_scale(state)
            self.memory["kl_unheard"] = True
            self._note(
                "`raise_kl` has no effect: this trainer does not scale its KL coefficient",
                "PPOTrainer does. This monitor only warns from here on.",
            )

    def _send(self, alert: Alert, state: Any) -> None:
        alert = Alert(**redacted(vars(alert)))  # it may cite the error of a judge behind a URL
        state.stateful_callbacks.setdefault(REGISTRY, {}).setdefault("alerts", []).append(finite(vars(alert)))
        for sink in self._opened or []:
            try:
                sink.send(alert)
            except Exception as error:  # a sink that fails must not end a run
                logger.warning(f"{type(sink).__name__} could not send an alert: {error}")


def alerts_of(state: Any, level: Level = "alert") -> list[dict[str, Any]]:
    """Return the alerts that all monitors have sent, also before a resume; with the level `notice`, their notices."""
    sent = state.stateful_callbacks.get(REGISTRY, {}).get("alerts", [])
    return [alert for alert in sent if alert.get("level", "alert") == level]


def spread_key(key: str) -> str:
    """Return the key under which an evaluation logs the standard deviation that belongs to the mean under `key`."""
    return key.removesuffix("/mean") + "/std" if key.endswith("/mean") else f"{key}_std"


def evaluation_noise(metrics: dict[str, Any], key: str, dataloader: Any) -> dict[str, Any]:
    """
    Return a mapping with the standard error of an evaluation's mean under `key`, `error`, and its degrees of freedom,
    `dof`; {} if the standard deviation of single answers or the number of rows is unknown.
    """
    spread = metrics.get(spread_key(key))
    rows = number_of_rows(dataloader)
    if spread is None or rows is None or not math.isfinite(spread):
        return {}
    return {"error": spread / math.sqrt(rows), "dof": max(rows - 1, 1)}


def number_of_rows(dataloader: Any) -> int | None:
    """
    Return the number of prompts in an evaluation's data; None if it is unknown.

    If the data has a column `held_out`, only prompts marked in it are counted.
    """
    dataset: Any = getattr(dataloader, "dataset", None)
    if "held_out" in (getattr(dataset, "column_names", None) or ()):
        return sum(map(bool, dataset["held_out"])) or None
    return len(dataset) or None if hasattr(dataset, "__len__") else None


def on_main_process(measure: Callable[[], Any]) -> tuple[Any, str | None]:
    """
    Call `measure` on the main process alone, and return a pair on every process.

    The pair is the result of `measure` and None or, if `measure` raised an error, None and the error as text.
    """

    def measured() -> tuple[Any, str | None]:
        try:
            return measure(), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    return on_first(measured)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
