"""A stand-in for a Trainer that feeds logs to callbacks."""

from types import SimpleNamespace

from transformers import TrainerControl, TrainerState

from trl_ext.callbacks.monitor import alerts_of


class Replay:
    """Sends the events of a Trainer to `callbacks`. Their answers are in `alerts` and `control`."""

    def __init__(self, args, *callbacks, state=None):
        self.args, self.callbacks = args, callbacks
        self.state, self.control = state or TrainerState(), TrainerControl()
        self.fire("on_train_begin")

    def fire(self, event, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, **kwargs)

    def log(self, step, **logs):
        """Send a training log. Keys that are no identifiers go into the dict `logs`."""
        logs = {"learning_rate": 1e-4, **logs.pop("logs", {}), **logs}
        self.control._new_step()
        self.state.global_step = step
        self.state.log_history.append({**logs, "step": step})
        self.fire("on_log", logs=logs)

    def evaluate(self, step, metrics, rows=None):
        """Send an evaluation, of as many rows where the trainer says so."""
        self.state.global_step = step
        self.state.log_history.append({**metrics, "step": step})
        self.fire("on_log", logs=dict(metrics))
        dataloader = None if rows is None else SimpleNamespace(dataset=range(rows))
        self.fire("on_evaluate", metrics=metrics, eval_dataloader=dataloader)

    @property
    def alerts(self):
        return alerts_of(self.state)

    @property
    def notices(self):
        return [notice["what"] for notice in alerts_of(self.state, "notice")]

    @property
    def said(self):
        return [alert["what"] for alert in self.alerts]
