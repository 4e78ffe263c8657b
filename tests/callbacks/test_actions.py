"""What a monitor did holds when the same command runs again, and nothing is invented, in real trainers."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import DPOConfig as OurDPOConfig
from trl_ext import DPOTrainer, PPOTrainer
from trl_ext.callbacks import (
    CanaryCallback,
    ClipFractionCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    KLBudgetCallback,
    LengthDriftCallback,
    NotFiniteCallback,
    RepetitionCallback,
    RewardDisagreementCallback,
    RewardDriftCallback,
    ValueHealthCallback,
)
from trl_ext.callbacks.monitor import alerts_of
from trl_ext.checkpoints import ResumableRun, RolledBack, checkpoint_to_resume
from trl_ext.halts import RECORD

pytestmark = pytest.mark.slow

BAD = 6  # the step whose numbers are bad; a checkpoint is saved there, and at every other step
STEPS = 10
EVERY = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}


class Killed(BaseException):
    """No `Exception`: nothing may catch it."""


class Numbers(TrainerCallback):
    """Writes the run's numbers into its logs: calm ones, and bad ones from step `BAD` on. It may kill the run."""

    def __init__(self, calm, bad, kill_at=None):
        self.calm, self.bad, self.kill_at = calm, bad, kill_at

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "learning_rate" in logs:
            logs.update(self.bad if state.global_step >= BAD else self.calm)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics.update(self.bad if state.global_step >= BAD else self.calm)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.kill_at:
            raise Killed


class ResumableSFT(ResumableRun, SFTTrainer):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def sft(cls, model, folder, *callbacks, **kwargs):
    data = Dataset.from_dict({"prompt": ["the cat", "a dog"] * 8, "completion": [" sat on the mat"] * 16})
    common = {**ON_CPU, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "learning_rate": 1e-2}
    args = SFTConfig(str(folder), **common | EVERY | {"gradient_checkpointing": False} | kwargs)
    trainer = cls(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)))
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def dpo(model, folder, *callbacks, **kwargs):
    pairs = {"prompt": ["the cat"] * 16, "chosen": [" sat on the mat"] * 16, "rejected": [" flew over"] * 16}
    common = {**ON_CPU, "per_device_train_batch_size": 4, "gradient_checkpointing": False}
    args = OurDPOConfig(str(folder), **common | EVERY | kwargs)
    return DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(pairs), callbacks=list(callbacks))


def ppo(model, folder, *callbacks, **kwargs):
    return PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=tiny_config(folder, **{**EVERY, "num_ppo_epochs": 1, "num_mini_batches": 1} | kwargs),  # a rollout a step
        train_dataset=prompts(16),
        eval_dataset=prompts(4, seed=1),
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )


def resumable_sft(*args, **kwargs):
    return sft(ResumableSFT, *args, **kwargs)


def stock_sft(*args, **kwargs):
    return sft(SFTTrainer, *args, **kwargs)


def again(trainer):
    """The same command again: as recipes give it, or as a stock script does."""
    if isinstance(trainer, ResumableRun):
        return trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    return trainer.train(resume_from_checkpoint=any(Path(trainer.args.output_dir).glob("checkpoint-*")) or None)


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def calm_and_bad(**bad):
    return {name: calm for name, (calm, _) in bad.items()}, {name: value for name, (_, value) in bad.items()}


# Each monitor, and what it reads: calm, then bad
KEYS = {"kl": "kl", "clip_fraction": "clip", "explained_variance": "ev", "value_loss": "vl", "length": "length"}
KEYS |= {"length_clipped": "cut", "reward": "reward", "reward_std": "std", "entropy": "entropy"}
GOLD = {"eval_rewards/gold_judge/mean": (1.0, 0.0), "eval_rewards/gold_judge/std": (0.5, 0.5)}
GOLD |= {"eval_proxy/mean": (0.0, 9.0), "eval_proxy/std": (1.0, 1.0)}
MONITORS = {
    KLBudgetCallback: ({}, {"kl": (0.0, 99.0)}),
    ClipFractionCallback: ({"steps": 1}, {"clip": (0.0, 0.9)}),
    EntropyFloorCallback: ({"steps": 1}, {"entropy": (2.0, 0.01)}),
    LengthDriftCallback: ({"rollouts": 2}, {"length": (10.0, 99.0), "cut": (0.0, 0.0)}),
    ValueHealthCallback: ({"rollouts": 1, "steps": 1}, {"ev": (0.5, -9.0), "vl": (1.0, 1.0)}),
    RewardDisagreementCallback: ({"rollouts": 2}, {"rewards/two/disagreement": (0.1, 9.0)}),
    RepetitionCallback: ({"rollouts": 2}, {"repetition/top_phrase_share": (0.1, 1.0)}),
    RewardDriftCallback: (
        {"baseline": (0.0, 1.0), "rollouts": 2},
        {"reward": (0.0, 9.0), "std": (1.0, 1.0), "length": (10.0, 99.0)},
    ),
    NotFiniteCallback: ({}, {"grad_norm": (1.0, math.nan)}),
    GoldGapCallback: ({"proxy": "eval_proxy/mean"}, GOLD),
    CanaryCallback: ({"minutes": 0.0, "prompts": ["the cat"], "max_new_tokens": 2}, {}),
}


class Judge:
    """Of canaries: a bad score from step `BAD` on."""

    trainer = None

    def __call__(self, completions, **kwargs):
        return [-9.0 if self.trainer.state.global_step >= BAD else 1.0 for _ in completions]


def run_of(build, monitor, action, model, folder, kill_at=None, **kwargs):
    """A trainer with one monitor, and the numbers that it reads."""
    settings, numbers = MONITORS[monitor]
    settings = {"action": action, "repeat_steps": 100, "kl_factor": 2.0, "keys": KEYS} | settings
    settings |= {"judge": Judge(), "score_drop": 1.0} if monitor is CanaryCallback else {}
    callback = monitor(**settings)
    if monitor is GoldGapCallback:
        kwargs = {"eval_strategy": "steps", "eval_steps": 2} | kwargs
    trainer = build(model, folder, Numbers(*calm_and_bad(**numbers), kill_at), callback, **kwargs)
    if monitor is CanaryCallback:
        callback.trainer = callback.judge.trainer = trainer
    return trainer


def end_of(trainer, train):
    """The last step, or that it was rolled back."""
    try:
        train(trainer)
    except RolledBack:
        return "rolled back"
    return trainer.state.global_step


@pytest.mark.parametrize("build", [stock_sft, resumable_sft, dpo, ppo])
@pytest.mark.parametrize("action", ["warn", "save", "raise_kl", "stop", "rollback"])
@pytest.mark.parametrize("monitor", MONITORS, ids=lambda cls: cls.__name__)
def test_an_action_holds_after_the_same_command_again(monitor, action, build, model, tmp_path):
    """
    Uninterrupted, and killed before the bad step and resumed: the same actions at the same step, once. Then the same
    command again, twice: a run that ended stays ended, one that went on is complete.
    """
    ends, is_ours = action in ("stop", "rollback"), build is not stock_sft
    for name, kill_at in (("whole", None), ("killed", BAD - 1)):
        folder = tmp_path / name
        trainer = run_of(build, monitor, action, model, folder, kill_at)
        if kill_at:
            with pytest.raises(Killed):
                trainer.train()
            assert checkpoints(folder) == [2, 4] and not alerts_of(trainer.state)  # nothing is invented
            trainer = run_of(build, monitor, action, model, folder)
        end = end_of(trainer, again)
        assert end == ("rolled back" if is_ours and action == "rollback" else BAD if ends else STEPS)
        acted = [(a["step"], a["action"]) for a in alerts_of(trainer.state) if a["action"] == action]
        assert acted == [(BAD, action)], alerts_of(trainer.state)
        assert checkpoints(folder) == ([2, 4] if action == "rollback" else [2, 4, 6] if ends else [2, 4, 6, 8, 10])
        assert (folder / RECORD).exists() == (action == "rollback")
        for _ in range(2):
            before = checkpoints(folder)
            trainer = run_of(build, monitor, action, model, folder)
            if action == "rollback" and is_ours:
                with pytest.raises(RolledBack, match=r"at step 6 .* nothing has been changed since.*checkpoint-4"):
                    again(trainer)
            elif is_ours:
                again(trainer)
                assert trainer.state.global_step == (BAD if ends else STEPS)
            elif ends:  # transformers does not begin without a step: it moves no weight, and is not saved
                again(trainer)
                assert trainer.state.global_step == before[-1] + 1
                saved = SFTTrainer(
                    str(folder / f"checkpoint-{before[-1]}"), args=trainer.args, train_dataset=trainer.train_dataset
                )
                torch.testing.assert_close(weights(trainer), weights(saved), rtol=0, atol=0)
                assert alerts_of(trainer.state)[-1]["what"] == "the run was ended before"
            assert checkpoints(folder) == before
