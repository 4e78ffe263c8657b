"""A stand-in for a Trainer that feeds logs to callbacks, and tiny trainers for callbacks."""

import re
from pathlib import Path
from types import SimpleNamespace

from datasets import Dataset
from transformers import TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

from tests.tiny import ON_CPU, length_reward, tiny_llama, tiny_ppo, tiny_tokenizer
from trl_ext.callbacks.monitor import REGISTRY, alerts_of

RUNBOOK = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
# The runbook's tables list these findings. In them … means any words
ENTRIES = [
    re.compile(re.escape(entry).replace("…", ".+"))
    for row in re.findall(r"(?m)^\| (\*.+?) \|", RUNBOOK)
    for entry in re.findall(r"\*(.+?)\*", row)
]


def explained(alerts):
    """The alerts' messages. Each must link its monitor's section of the runbook, and be in one of the tables there."""
    for alert in alerts:
        section, what = alert["runbook"].partition("#")[2], alert["what"]
        assert f"\n## {section}\n\nWhat `{alert['monitor']}` says.\n" in RUNBOOK
        assert any(entry.match(what) for entry in ENTRIES), f"the runbook does not explain {what!r}"
    return [alert["what"] for alert in alerts]


def notices_of(state):
    """The monitors' notices, which `alerts_of` leaves out."""
    sent = state.stateful_callbacks.get(REGISTRY, {}).get("alerts", [])
    return [alert for alert in sent if alert["level"] == "notice"]


class Replay:
    """Sends the events of a Trainer to `callbacks`. Their reactions are in `alerts` and `control`."""

    def __init__(self, args, *callbacks, state=None):
        self.args, self.callbacks = args, callbacks
        self.state, self.control = state or TrainerState(), TrainerControl()
        self.fire("on_train_begin")

    def fire(self, event, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, **kwargs)

    def log(self, step, **logs):
        """Send a training log. Keys that are not identifiers go into the dict `logs`."""
        logs = {"learning_rate": 1e-4, **logs.pop("logs", {}), **logs}
        self.control._new_step()
        self.state.global_step = step
        self.state.log_history.append({**logs, "step": step})
        self.fire("on_log", logs=logs)

    def evaluate(self, step, metrics, rows=None):
        """Send an evaluation, of `rows` rows if given."""
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
        return explained(notices_of(self.state))

    @property
    def said(self):
        return explained(self.alerts)


# ---- Trainers ----

SIZES = ON_CPU | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_checkpointing": False}


def with_callbacks(trainer, callbacks):
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def sft(folder, *callbacks, cls=SFTTrainer, **kwargs):
    """A stock trainer on 16 rows, evaluated on other rows."""
    args = SFTConfig(str(folder), **SIZES | {"learning_rate": 1e-2} | kwargs)
    train, held_out = (
        Dataset.from_dict({"prompt": asked * 4, "completion": [" sat on the mat"] * 16})
        for asked in (["the cat", "a dog"] * 2, ["the cat", "a dog", "it", "sad"])
    )
    data = {"train_dataset": train, "eval_dataset": held_out}
    trainer = cls(tiny_llama(), args=args, **data, processing_class=tiny_tokenizer())
    return with_callbacks(trainer, callbacks)


def ppo(folder, *callbacks, rewards=length_reward, **kwargs):
    return with_callbacks(tiny_ppo(folder, None, rewards, **kwargs), callbacks)
