"""Feed logs to callbacks as a Trainer does, without a Trainer."""

from transformers import TrainerControl, TrainerState

from trl_ext.callbacks.monitor import alerts_of


class Replay:
    """A Trainer's events for `callbacks`: `log` and `evaluate`; what came of it is in `alerts` and `control`."""

    def __init__(self, args, *callbacks, state=None):
        self.args, self.callbacks = args, callbacks
        self.state, self.control = state or TrainerState(), TrainerControl()
        self.fire("on_train_begin")

    def fire(self, event, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, **kwargs)

    def log(self, step, **logs):
        """A training log; keys are given as a dict where they are no identifiers."""
        logs = {"learning_rate": 1e-4, **logs.pop("logs", {}), **logs}
        self.control._new_step()
        self.state.global_step = step
        self.state.log_history.append({**logs, "step": step})
        self.fire("on_log", logs=logs)

    def evaluate(self, step, metrics):
        self.state.global_step = step
        self.state.log_history.append({**metrics, "step": step})
        self.fire("on_log", logs=dict(metrics))
        self.fire("on_evaluate", metrics=metrics)

    @property
    def alerts(self):
        return alerts_of(self.state)

    @property
    def said(self):
        return [alert["what"] for alert in self.alerts]
