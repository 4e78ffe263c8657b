"""What all monitors share: reading a key, keeping a window, raising an alert."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.utils import logging

from ..control import kl_scale_is_pending, request_kl_scale, take_kl_scale
from ..jsonl import finite
from ..metrics import Metric, is_gathered, is_training_log, metrics_of, rollout_steps
from ..redaction import redacted
from .alerts import RUNBOOK, Alert, check_sinks, make_sinks

logger = logging.get_logger(__name__)
Action = Literal["warn", "save", "stop", "raise_kl", "rollback"]
# The key of all monitors' states in `TrainerState.stateful_callbacks`. Monitors are no `ExportableState`, which would
# use their classes' names: with `restore_callback_states_from_checkpoint` transformers would rebuild them from JSON,
# without `trainer=`, and a monitor added on resume would crash the next save.
REGISTRY = "trl_ext_monitors"


class Memory(dict):
    """The memory of a monitor in use. A memory that was read from a checkpoint is a plain dict, and can be taken."""


@dataclass
class Finding:
    """One thing that `watch` found. `MonitorCallback` makes an alert of it."""

    what: str
    value: float | None
    bound: float | None
    advice: str
    baseline: float | None = None
    acts: bool = True  # True takes the monitor's action, False only warns


@dataclass(eq=False, kw_only=True)
class MonitorCallback(TrainerCallback):
    """
    Base class of the monitors. It reads the training logs and raises alerts; a subclass defines `watch(logs)`.

    All processes decide alike: where a number differs between processes, that of the main process counts.

    Args:
        action: what an alert does besides being sent. `warn` does nothing more. `save` writes a checkpoint at this
            step. `stop` writes a checkpoint and ends training. `raise_kl` asks the trainer to raise its KL coefficient
            ([`~trl_ext.callbacks.request_kl_scale`]), which PPOTrainer does. `rollback` ends training without a
            checkpoint, and names the command that continues from the last good one.
        sinks: where alerts go: "log", "jsonl" (`alerts.jsonl` in the output directory), "wandb", a webhook's URL, or
            objects with `send(alert)`. W&B is added if the run reports to it.
        repeat_steps: optimizer steps before the same alert is raised again.
        kl_factor: factor by which `raise_kl` multiplies the KL coefficient.
        keys: quantity → key of the logs, for trainers and metrics that `trl_ext.metrics` does not know.
    """

    action: Action = "warn"
    sinks: list[Any] = field(default_factory=lambda: ["log", "jsonl"])
    repeat_steps: int = 100
    kl_factor: float = 2.0
    keys: dict[str, str] = field(default_factory=dict)

    runbook = ""  # the heading of this monitor's section in the runbook

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"`action` must be one of {', '.join(get_args(Action))}; got {self.action!r}")
        if self.repeat_steps < 1:
            raise ValueError(f"`repeat_steps` must be 1 or more, got {self.repeat_steps}")
        if not self.kl_factor > 1:
            raise ValueError(f"`kl_factor` must be above 1 to raise the KL coefficient, got {self.kl_factor}")
        check_sinks(self.sinks)
        self.memory: dict[str, Any] = Memory()  # all that is not an argument, as JSON
        self.step = 0
        self._args: Any = None
        self._logging_steps = 1
        self._logs: dict[str, Any] = {}
        self._known: dict[str, Metric] = {}
        self._opened: list[Any] | None = None

    # ---- State ----

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that JSON can hold."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return redacted({name: json.loads(json.dumps(value)) for name, value in values.items() if _is_json(value)})

    def on_train_begin(self, args, state, control, **kwargs):
        registry = state.stateful_callbacks.setdefault(REGISTRY, {})
        name = type(self).__name__
        if name in registry:
            memory = registry[name]["attributes"]["memory"]
            if isinstance(memory, Memory) and memory is not self.memory:
                raise ValueError(
                    f"There are two {name}s among the callbacks, which would share one memory: remove one."
                )
            self.memory = Memory(memory)
        # The registry holds the memory itself, not a copy, so that each checkpoint saves it as it is by then
        registry[name] = {"args": self._arguments(), "attributes": {"memory": self.memory}}
        self._begin(args, state, {})

    def on_train_end(self, args, state, control, **kwargs):
        for sink in self._opened or []:
            if hasattr(sink, "close"):
                sink.close()

    # ---- Reading ----

    def watch(self, logs: dict[str, Any]) -> Iterator[Finding]:
        """Yield a finding for each thing that is wrong in these training logs."""
        return iter(())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and is_training_log(logs):
            self._begin(args, state, logs)
            self._check_kl_request(state)
            self._handle(self.watch(logs), state, control)

    def _begin(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        self.step, self._args, self._logs, self._known = state.global_step, args, logs, metrics_of(args)
        if self._opened is None:
            self._opened = make_sinks(self.sinks, args) if state.is_world_process_zero else []
        # Below 1, `logging_steps` is a share of all steps
        self._logging_steps = int(args.logging_steps if args.logging_steps >= 1 else state.logging_steps)

    def read(self, quantity: str, optional: bool = False) -> float | None:
        """
        Return a quantity's number in this log, or None if the key is absent or None, or the number is not finite.

        A number that is not finite raises an alert. So does a key that is absent for longer than a rollout, once,
        unless it is `optional`.
        """
        metric = self._known.get(quantity)
        key = self.keys.get(quantity) or (metric.key if metric else None)
        value = None if key is None else self._number(key, self._logs.get(key))
        if value is not None:
            self.memory.setdefault("seen", {})[quantity] = self.step
        elif not optional:
            since = self.memory.setdefault("seen", {}).setdefault(quantity, max(0, self.step - self._logging_steps))
            window = rollout_steps(self._args) + self._logging_steps
            if self.step - since > window and quantity not in self.memory.setdefault("missing", []):
                self.memory["missing"].append(quantity)
                where = f"the key {key!r} was in no log since step {since}" if key else "this trainer logs no such key"
                self._note(
                    f"nothing to watch: {where}",
                    f"{type(self).__name__} reads `{quantity}`: name another key by `keys={{'{quantity}': ...}}`, or "
                    "remove the monitor.",
                )
        return value

    def logs_in(self, steps: int) -> int:
        """Return how many logs cover this many optimizer steps."""
        return max(1, math.ceil(steps / self._logging_steps))

    def _number(self, key: str, value: Any) -> float | None:
        if not is_gathered(key) and PartialState().num_processes > 1:
            value = broadcast_object_list([value])[0]
        if value is None or isinstance(value, (str, bytes)):
            return None
        if not math.isfinite(value):
            self._note(
                f"`{key}` is not finite",
                f"It is {value}: look for NaN in the losses, lower the learning rate, and go back to a checkpoint.",
            )
            return None
        return float(value)

    def _note(self, what: str, advice: str) -> None:
        self.memory.setdefault("notes", []).append([what, advice])

    # ---- Windows ----

    def recent(self, name: str, value: float, size: int) -> list[float]:
        """Return the last `size` values, this one included."""
        values = self.memory.setdefault("windows", {}).setdefault(name, [])
        values.append(value)
        del values[:-size]
        return values

    def first_mean(self, name: str, value: float, size: int) -> float | None:
        """Return the mean of the first `size` values, or None while this value is one of them."""
        values = self.memory.setdefault("baselines", {}).setdefault(name, [])
        if len(values) < size:
            values.append(value)
            return None
        return sum(values) / len(values)

    # ---- Acting ----

    def _handle(self, findings: Iterator[Finding], state: Any, control: Any) -> None:
        step, good = state.global_step, True
        found = list(findings)
        for what, advice in self.memory.pop("notes", []):
            found.append(Finding(what, None, None, advice, acts=False))
        raised = self.memory.setdefault("raised", {})
        for finding in found:
            good = good and not finding.acts
            if finding.what in raised and step - raised[finding.what] < self.repeat_steps:
                continue
            raised[finding.what] = step
            action: Action = self.action if finding.acts else "warn"
            if action == "raise_kl" and self.memory.get("kl_unheard"):
                action = "warn"
            advice = finding.advice
            if action == "rollback":
                advice = f"{advice} {self._rollback_command()}"
            link = f"{RUNBOOK}#{self.runbook}"
            name = type(self).__name__
            numbers = (finding.value, finding.bound, finding.baseline)
            self._send(Alert(name, finding.what, step, *numbers, advice, action, link), state)
            self._act(action, state, control)
        if good:
            self.memory["good_step"] = step

    def _act(self, action: Action, state: Any, control: Any) -> None:
        match action:
            case "save":
                control.should_save = True
            case "stop":
                control.should_save = control.should_training_stop = True
            case "rollback":
                control.should_training_stop = True
            case "raise_kl":
                request_kl_scale(state, self.kl_factor)

    def _check_kl_request(self, state: Any) -> None:
        """Say once if the trainer did not answer `raise_kl` within a rollout, and only warn from then on."""
        if self.action == "raise_kl" and kl_scale_is_pending(state, rollout_steps(self._args)):
            take_kl_scale(state)
            self.memory["kl_unheard"] = True
            self._note(
                "`raise_kl` has no effect: this trainer does not scale its KL coefficient",
                "PPOTrainer does. This monitor only warns from here on.",
            )

    def _rollback_command(self) -> str:
        good = self.memory.get("good_step", -1)
        steps = [
            int(p.name.split("-")[1])
            for p in Path(self._args.output_dir).glob("checkpoint-*")
            if p.name[11:].isdigit()
        ]
        older = [step for step in steps if step <= good]
        if not older:
            return (
                f"There is no checkpoint before step {good + 1} to go back to: start a new run, with other settings."
            )
        path = Path(self._args.output_dir) / f"checkpoint-{max(older)}"
        return (
            f"Go back by running the same command with `--resume_from_checkpoint {path}`, or by "
            f"`trainer.train(resume_from_checkpoint={str(path)!r})`, with other settings."
        )

    def _send(self, alert: Alert, state: Any) -> None:
        alert = Alert(**redacted(vars(alert)))  # it may cite the error of a judge behind a URL
        state.stateful_callbacks.setdefault(REGISTRY, {}).setdefault("alerts", []).append(finite(vars(alert)))
        for sink in self._opened or []:
            try:
                sink.send(alert)
            except Exception as error:  # a sink that fails must not end a run
                logger.warning(f"{type(sink).__name__} could not send an alert: {error}")


def alerts_of(state: Any) -> list[dict[str, Any]]:
    """Return the alerts of all monitors so far, including those from before a resume."""
    return state.stateful_callbacks.get(REGISTRY, {}).get("alerts", [])


def on_main_process(measure: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call `measure` on the main process, and return its result and None to all, or None and its error as text."""
    result: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            result[0] = measure()
        except Exception as error:  # raised on one process only, it would leave the others waiting for ever
            result[1] = f"{type(error).__name__}: {error}"
    if PartialState().num_processes > 1:
        broadcast_object_list(result)
    return result[0], result[1]


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
