"""A monitor's action holds when the same command runs again, and nothing else acts, in real trainers."""

import math
from itertools import product
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTTrainer

from tests.callbacks.cases import BAD_NUMBERS, KEYS
from tests.callbacks.replay import SIZES, ppo, sft, with_callbacks
from tests.tiny import prompts, tiny_llama, tiny_tokenizer
from trl_ext import DPOConfig as OurDPOConfig, DPOTrainer
from trl_ext.callbacks import (
    CanaryCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    KLBudgetCallback,
    NotFiniteCallback,
)
from trl_ext.callbacks.monitor import alerts_of
from trl_ext.runs.checkpoints import ResumableRun, checkpoint_to_resume
from trl_ext.runs.control import STOPPED, Stopped

pytestmark = pytest.mark.slow

BAD = 6  # the step with bad numbers; every other step saves a checkpoint, this one too
STEPS = 10
# So many completions that one bad log is significant
A_ROLLOUT_A_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 64}
EVERY = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}


class Killed(BaseException):
    """Not an `Exception`, so that nothing catches it."""


class Numbers(TrainerCallback):
    """Writes calm numbers into the logs, and bad ones from step `BAD` on. It may kill the run."""

    def __init__(self, calm, bad, kill_at=None):
        self.calm, self.bad, self.kill_at = calm, bad, kill_at
        self.rates = {}  # learning rates by step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "learning_rate" in logs:
            logs.update(self.bad if state.global_step >= BAD else self.calm)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics.update(self.bad if state.global_step >= BAD else self.calm)

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]
        if state.global_step == self.kill_at:
            raise Killed


class ResumableSFT(ResumableRun, SFTTrainer):
    pass


def stock_sft(folder, *callbacks, **kwargs):
    return sft(folder, *callbacks, **EVERY | kwargs)


def resumable_sft(folder, *callbacks, **kwargs):
    return sft(folder, *callbacks, cls=ResumableSFT, **EVERY | kwargs)


def our_dpo(folder, *callbacks, **kwargs):
    pairs = Dataset.from_dict({"prompt": ["the cat"] * 16, "chosen": [" sat"] * 16, "rejected": [" flew over"] * 16})
    args = OurDPOConfig(str(folder), record_run=False, **SIZES | EVERY | kwargs)
    trainer = DPOTrainer(tiny_llama(), args=args, train_dataset=pairs, processing_class=tiny_tokenizer())
    return with_callbacks(trainer, callbacks)


def our_ppo(folder, *callbacks, **kwargs):
    data = {"train_dataset": prompts(64), "eval_dataset": prompts(64, seed=1)}
    return ppo(folder, *callbacks, **data, **EVERY | A_ROLLOUT_A_STEP | kwargs)


def again(trainer):
    """Run the same command again, as recipes or a stock script do."""
    if isinstance(trainer, ResumableRun):
        return trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    return trainer.train(resume_from_checkpoint=any(Path(trainer.args.output_dir).glob("checkpoint-*")) or None)


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))


def calm_and_bad(**bad):
    return {name: calm for name, (calm, _) in bad.items()}, {name: value for name, (_, value) in bad.items()}


class Judge:
    """Scores canaries badly from step `BAD` on."""

    trainer = None

    def __call__(self, completions, **kwargs):
        return [-9.0 if self.trainer.state.global_step >= BAD else 1.0 for _ in completions]


def run_of(build, monitor, action, folder, kill_at=None, **kwargs):
    """A trainer with one monitor, and the numbers that the monitor reads."""
    settings, numbers = BAD_NUMBERS[monitor]
    settings = {"action": action, "repeat_steps": 100, "kl_factor": 2.0, "keys": KEYS} | settings
    settings |= {"judge": Judge(), "score_drop": 1.0} if monitor is CanaryCallback else {}
    callback = monitor(**settings)
    if monitor is GoldGapCallback:
        kwargs = {"eval_strategy": "steps", "eval_steps": 2} | kwargs
    trainer = build(folder, Numbers(*calm_and_bad(**numbers), kill_at), callback, **kwargs)
    if monitor is CanaryCallback:
        callback.trainer = callback.judge.trainer = trainer
    return trainer


def end_of(trainer, train):
    """The last step, or that a monitor's stop refuses the run."""
    try:
        train(trainer)
    except Stopped:
        return "refused"
    return trainer.state.global_step


ACTIONS = ["warn", "save", "raise_kl", "stop"]
# Every action of one monitor, every monitor with its strongest action, every trainer
CASES = [
    *product([KLBudgetCallback], ACTIONS, [stock_sft]),
    *product([monitor for monitor in BAD_NUMBERS if monitor is not KLBudgetCallback], ["stop"], [stock_sft]),
    *product([KLBudgetCallback], ["stop"], [resumable_sft, our_ppo, our_dpo]),
    *product([KLBudgetCallback], ["raise_kl"], [our_ppo]),
    *product([GoldGapCallback, CanaryCallback], ["stop"], [our_ppo]),  # these two read no log
]


@pytest.mark.parametrize(
    ("monitor", "action", "build"),
    [pytest.param(*case, id="-".join([case[0].__name__, case[1], case[2].__name__])) for case in CASES],
)
def test_an_action_holds_after_the_same_command_again(monitor, action, build, tmp_path):
    """
    Uninterrupted, and killed before the bad step and resumed: the same actions at the same step, once. Then the same
    command twice more: a stopped run is refused and trains no step, another one is complete. Only the first monitor
    has an uninterrupted run; each killed run must end as this test says, too.
    """
    ends, spoils = action == "stop", action == "stop" and monitor is NotFiniteCallback
    ways = {"whole": None, "killed": BAD - 1} if monitor is KLBudgetCallback else {"killed": BAD - 1}
    for name, kill_at in ways.items():
        folder = tmp_path / name
        trainer = run_of(build, monitor, action, folder, kill_at)
        if kill_at:
            with pytest.raises(Killed):
                trainer.train()
            assert checkpoints(folder) == [2, 4] and not alerts_of(trainer.state)  # no other alert
            trainer = run_of(build, monitor, action, folder)
        refused = spoils and build is not stock_sft  # a script that continued would save the weights
        assert end_of(trainer, again) == ("refused" if refused else BAD if ends else STEPS)
        acted = [(a["step"], a["what"]) for a in alerts_of(trainer.state) if a["action"] == action]
        assert {step for step, _ in acted} == {BAD} and len(acted) == len({*acted}), alerts_of(trainer.state)
        left = [2, 4] if spoils else [2, 4, 6] if ends else [2, 4, 6, 8, 10]
        assert checkpoints(folder) == left and (folder / STOPPED).exists() == ends
        for _ in range(2 if ends or build is not stock_sft else 0):
            trainer = run_of(build, monitor, action, folder)
            assert end_of(trainer, again) == ("refused" if ends else STEPS)
            assert checkpoints(folder) == left


def stopping(limit=10.0, **kwargs):
    return KLBudgetCallback(keys={"kl": "kl"}, limit=limit, action="stop", **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "left"),
    [
        ({"save_strategy": "epoch"}, [4]),  # four steps an epoch: step 6 is within one
        ({"save_steps": 1}, [1, 2, 3, 4, 5]),
        ({"max_steps": BAD}, [2, 4]),  # also saved at the end
        ({"save_total_limit": 1}, [4]),  # another save would remove the good one
    ],
    ids=str,
)
def test_weights_that_are_not_finite_are_not_saved(kwargs, left, tmp_path):
    monitors = [NotFiniteCallback(), stopping(), EntropyFloorCallback(action="save", steps=1)]
    numbers = calm_and_bad(grad_norm=(0.0, math.nan), entropy=(2.0, 0.0), kl=(0.0, 99.0))
    trainer = stock_sft(tmp_path, Numbers(*numbers), *monitors, **kwargs)
    trainer.train()
    assert trainer.state.global_step == BAD
    assert checkpoints(tmp_path) == left
