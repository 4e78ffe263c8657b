"""The arguments that callbacks and reward functions get from each trainer that trl_ext.callbacks.metrics knows."""

import json

import pytest
import trl
from datasets import Dataset
from transformers import TrainerCallback

from tests.contract.observed import require
from tests.tiny import ON_CPU, length_reward, prompts, tiny_llama, tiny_tokenizer
from trl_ext.callbacks.metrics import METRICS, is_training_log

pytestmark = pytest.mark.slow


class Watcher(TrainerCallback):
    """Keeps the arguments of a callback."""

    def __init__(self):
        self.logs, self.evaluations, self.names = [], [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))
        self.names.append(sorted(kwargs))
        control.should_save = control.should_save or state.global_step == 3

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(dict(metrics))
        metrics["eval_mine"] = 1.0

    def on_step_end(self, args, state, control, **kwargs):
        state.stateful_callbacks["trl_ext_monitors"] = {"mine": state.global_step}
        state._not_saved = object()


@pytest.fixture(scope="module")
def watched_runs(tmp_path_factory):
    """A short run of each trainer in `METRICS` with a quantity of its own, and what its callbacks got."""
    model = str(tmp_path_factory.mktemp("model"))
    tiny_llama().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    pairs = {"prompt": ["the cat"] * 8, "chosen": [" sat on the mat"] * 8, "rejected": [" flew over"] * 8}
    labelled = {"prompt": ["the cat"] * 8, "completion": [" sat"] * 8, "label": [True, False] * 4}
    on_policy = {"num_generations": 2, "num_generations_eval": 1, "max_completion_length": 6, "beta": 0.05}
    runs = {}
    for name, extra, data in (
        ("RLOO", on_policy | {"steps_per_generation": 2}, None),
        ("GRPO", on_policy | {"steps_per_generation": 2}, None),
        ("DPO", {}, pairs),
        ("SFT", {}, {"prompt": labelled["prompt"], "completion": labelled["completion"]}),
        ("KTO", {}, labelled),
        ("Reward", {}, pairs),
    ):
        folder, watcher, seen = tmp_path_factory.mktemp(name), Watcher(), []

        def reward(prompts, completions, seen=seen, **kwargs):
            seen.append(kwargs)
            kwargs["log_metric"]("mine", 0.5)
            return [None] * len(prompts)

        dataset = prompts(8) if data is None else Dataset.from_dict(data)
        config = getattr(trl, f"{name}Config")(
            str(folder),
            **ON_CPU,
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="eval_mine",
            gradient_checkpointing=False,
            **extra,
        )
        functions = {} if data is not None else {"reward_funcs": [length_reward, reward]}
        trainer = getattr(trl, f"{name}Trainer")(
            model=model, args=config, train_dataset=dataset, eval_dataset=dataset, callbacks=[watcher], **functions
        )
        trainer.train()
        runs[f"{name}Config"] = (watcher, seen, trainer, folder)
    return runs


@pytest.mark.parametrize("name", [name for name in METRICS if hasattr(trl, name)])
def test_keys_of_the_metrics_table_are_logged(name, watched_runs):
    logs = [log for log in watched_runs[name][0].logs if is_training_log(log)]
    reader = "`trl_ext.callbacks.metrics`"
    require(len(logs) == 4, f"{name}: {len(logs)} of 4 training logs have `learning_rate`", reader)
    of_rollouts = {"reward", "reward_std", "length", "length_clipped", *(["kl"] if name == "RLOOConfig" else [])}
    for quantity, metric in METRICS[name].items():
        steps = [i for i, log in enumerate(logs) if metric.key in log]
        expected = [0, 2] if quantity in of_rollouts else [0, 1, 2, 3]
        require(steps == expected, f"{name} logs `{metric.key}` ({quantity}) at {steps}, it was at {expected}", reader)


def test_arguments_of_callbacks(watched_runs):
    for name, (watcher, _, trainer, folder) in watched_runs.items():
        reader = "`trl_ext.callbacks`"
        for log in watcher.logs:
            kinds = [is_training_log(log), any(key.startswith("eval_") for key in log), "train_loss" in log]
            require(sum(kinds) == 1, f"{name} logs {sorted(log)}, of training, evaluation and end at once", reader)
        require("trainer" not in watcher.names[0], f"callbacks are given {watcher.names[0]}", reader)
        require(
            trainer.state.best_metric == 1.0, "what a callback adds to `metrics` is not for the best model", reader
        )
        saved = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
        require(
            saved["stateful_callbacks"].get("trl_ext_monitors") == {"mine": 3} and "_not_saved" not in saved,
            "`state.stateful_callbacks` is not saved as it is, or saving set by `on_log` comes at another step",
            "`MonitorCallback`",
        )


@pytest.mark.parametrize("name", ["RLOOConfig", "GRPOConfig"])
def test_arguments_of_reward_functions(name, watched_runs):
    watcher, seen, _, _ = watched_runs[name]
    reader = "`trl_ext.rewards`"
    needed = {"completion_ids", "topic", "trainer_state", "log_metric", "log_extra"}
    require(needed <= set(seen[0]), f"reward functions are given {sorted(seen[0])}", reader)
    training = next(log for log in watcher.logs if is_training_log(log))
    require(training["mine"] == 0.5, "`log_metric` does not log", reader)
    require(training["rewards/reward/mean"] is None, "a function that returns None only does not log None", reader)
    require(
        all(
            {"eval_rewards/length_reward/mean", "eval_rewards/length_reward/std", "eval_mine"} <= set(e)
            for e in (watcher.evaluations)
        ),
        f"`on_evaluate` is given {sorted(watcher.evaluations[0])}, without what reward functions scored",
        "`GoldGapCallback`",
    )
