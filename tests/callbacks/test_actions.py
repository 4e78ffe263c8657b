"""What a monitor did holds when the same command runs again, and nothing is invented, in real trainers."""

import logging
import math
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.callbacks.cases import BAD_NUMBERS, GOLD_METRICS, KEYS
from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import DPOConfig as OurDPOConfig
from trl_ext import DPOTrainer, PPOTrainer
from trl_ext.callbacks import (
    CanaryCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    KLBudgetCallback,
    NotFiniteCallback,
    ToolAbuseCallback,
)
from trl_ext.callbacks.monitor import REGISTRY, alerts_of
from trl_ext.runs.checkpoints import ResumableRun, RolledBack, checkpoint_to_resume
from trl_ext.runs.halts import RECORD

pytestmark = pytest.mark.slow

BAD = 6  # the step whose numbers are bad; a checkpoint is saved there, and at every other step
STEPS = 10
# Of as many answers that one bad log is beyond doubt
A_ROLLOUT_A_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 64}
EVERY = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS}


class Killed(BaseException):
    """No `Exception`: nothing may catch it."""


class Numbers(TrainerCallback):
    """Writes the run's numbers into its logs: calm ones, and bad ones from step `BAD` on. It may kill the run."""

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
    args = OurDPOConfig(str(folder), record_run=False, **common | EVERY | kwargs)
    data = Dataset.from_dict(pairs)
    return DPOTrainer(
        model, args=args, train_dataset=data, eval_dataset=data.select(range(4)), callbacks=list(callbacks)
    )


def ppo(model, folder, *callbacks, **kwargs):
    return PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=tiny_config(folder, **{**EVERY, **A_ROLLOUT_A_STEP} | kwargs),
        train_dataset=prompts(64),
        eval_dataset=prompts(64, seed=1),
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


def saved_weights(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()


def calm_and_bad(**bad):
    return {name: calm for name, (calm, _) in bad.items()}, {name: value for name, (_, value) in bad.items()}


class Judge:
    """Of canaries: a bad score from step `BAD` on."""

    trainer = None

    def __call__(self, completions, **kwargs):
        return [-9.0 if self.trainer.state.global_step >= BAD else 1.0 for _ in completions]


def run_of(build, monitor, action, model, folder, kill_at=None, **kwargs):
    """A trainer with one monitor, and the numbers that it reads."""
    settings, numbers = BAD_NUMBERS[monitor]
    settings = {"action": action, "repeat_steps": 100, "kl_factor": 2.0, "keys": KEYS} | settings
    settings |= {"judge": Judge(), "score_drop": 1.0} if monitor is CanaryCallback else {}
    callback = monitor(**settings)
    if monitor is GoldGapCallback:
        kwargs = {"eval_strategy": "steps", "eval_steps": 2} | kwargs
    trainer = build(model, folder, Numbers(*calm_and_bad(**numbers), kill_at), callback, **kwargs)
    if monitor is CanaryCallback:
        callback.trainer = callback.judge.trainer = trainer
    return trainer


def anew(trainer):
    trainer.train()


def end_of(trainer, train):
    """The last step, or that it was rolled back."""
    try:
        train(trainer)
    except RolledBack:
        return "rolled back"
    return trainer.state.global_step


ACTIONS = ["warn", "save", "raise_kl", "stop", "rollback"]
# Every action of one monitor, every monitor with the action that undoes most, every trainer
CASES = [
    *product([KLBudgetCallback], ACTIONS, [stock_sft]),
    *product(BAD_NUMBERS.keys() - {KLBudgetCallback}, ["rollback"], [stock_sft]),
    *product([KLBudgetCallback], ["stop", "rollback"], [resumable_sft]),
    *product([KLBudgetCallback], ["raise_kl", "rollback"], [ppo]),
    *product([GoldGapCallback, CanaryCallback], ["stop"], [ppo]),  # these two read no log
    (KLBudgetCallback, "rollback", dpo),
]
ALL_CASES = [
    *product(BAD_NUMBERS, ACTIONS, [stock_sft]),
    # Where it knows the number of answers, ToolAbuseCallback needs more than one bad log
    *product([monitor for monitor in BAD_NUMBERS if monitor is not ToolAbuseCallback], ["stop", "rollback"], [ppo]),
    *product([KLBudgetCallback], ["warn", "save", "raise_kl"], [ppo]),
    *product([KLBudgetCallback], ACTIONS, [resumable_sft, dpo]),
]


@pytest.mark.parametrize(
    ("monitor", "action", "build"),
    [
        pytest.param(*case, id=f"{m.__name__}-{a}-{build.__name__}", marks=() if case in CASES else pytest.mark.extra)
        for case in ALL_CASES
        for m, a, build in [case]
    ],
)
def test_an_action_holds_after_the_same_command_again(monitor, action, build, model, tmp_path):
    """
    Uninterrupted, and killed before the bad step and resumed: the same actions at the same step, once. Then the same
    command again, twice: a run that ended stays ended, one that went on is complete.

    Of other monitors than the first only the run that is killed, which must end as is said here, too.
    """
    ends, is_ours = action in ("stop", "rollback"), build is not stock_sft
    ways = {"whole": None, "killed": BAD - 1} if monitor is KLBudgetCallback else {"killed": BAD - 1}
    for name, kill_at in ways.items():
        folder = tmp_path / name
        trainer = run_of(build, monitor, action, model, folder, kill_at)
        if kill_at:
            with pytest.raises(Killed):
                trainer.train()
            assert checkpoints(folder) == [2, 4] and not alerts_of(trainer.state)  # nothing is invented
            trainer = run_of(build, monitor, action, model, folder)
        end = end_of(trainer, again)
        assert end == ("rolled back" if is_ours and action == "rollback" else BAD if ends else STEPS)
        acted = [(a["step"], a["what"]) for a in alerts_of(trainer.state) if a["action"] == action]
        assert {step for step, _ in acted} == {BAD} and len(acted) == len({*acted}), alerts_of(trainer.state)
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
                torch.testing.assert_close(weights(trainer), saved_weights(folder / f"checkpoint-{before[-1]}"))
                assert alerts_of(trainer.state)[-1]["what"] == "the run was ended before"
            assert checkpoints(folder) == before


@pytest.mark.parametrize(("action", "left"), [("save", [2, 7]), ("stop", [2, 6]), ("rollback", [2])])
def test_a_checkpoint_that_is_not_the_best_is_saved_all_the_same(action, left, model, tmp_path):
    """`save_strategy="best"` decides after an evaluation's alerts, so that the next step saves, or the end."""
    trainer = run_of(
        stock_sft,
        GoldGapCallback,
        action,
        model,
        tmp_path,
        save_strategy="best",
        metric_for_best_model="eval_rewards/gold_judge/mean",
        greater_is_better=True,
    )
    trainer.train()
    assert checkpoints(tmp_path) == left and trainer.state.best_metric == 1.0


# ---- What was changed since ----


def stopping(action="stop", limit=10.0, **kwargs):
    return KLBudgetCallback(keys={"kl": "kl"}, limit=limit, action=action, **kwargs)


def with_kl(build, model, folder, *monitors, kill_at=None, bad=99.0, **kwargs):
    return build(model, folder, Numbers({"kl": 0.0}, {"kl": bad}, kill_at), *monitors, **kwargs)


@pytest.mark.parametrize("build", [stock_sft, resumable_sft, ppo])
def test_a_monitor_of_other_settings_decides_anew_after_a_stop(build, model, tmp_path):
    """What it finds still holds at once, though the same alert was raised less than `repeat_steps` ago."""
    for limit, end in ((10.0, BAD), (11.0, BAD + 1), (1000.0, STEPS)):
        trainer = with_kl(build, model, tmp_path, stopping(limit=limit))
        again(trainer)
        assert trainer.state.global_step == end
        memory = trainer.state.stateful_callbacks[REGISTRY]["KLBudgetCallback"]["attributes"]["memory"]
        assert ("stopped" in memory) == (end < STEPS)


@pytest.mark.parametrize("build", [resumable_sft, dpo, ppo])
def test_a_run_goes_on_from_the_good_checkpoint_with_other_settings(build, model, tmp_path, capsys):
    rate = 1e-3
    with pytest.raises(RolledBack):
        with_kl(build, model, tmp_path, stopping("rollback"), learning_rate=2 * rate).train()
    trainer = with_kl(build, model, tmp_path, stopping("rollback"), learning_rate=rate, kill_at=5, bad=0.0)
    with pytest.raises(Killed):  # before it has saved a checkpoint of its own
        again(trainer)
    assert (tmp_path / RECORD).exists()
    trainer = with_kl(build, model, tmp_path, stopping("rollback"), learning_rate=rate, bad=0.0)
    again(trainer)
    assert "Going on after the rollback at step 6, with learning_rate: 0.002 → 0.001" in capsys.readouterr().out
    logs = {log["step"]: log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log}
    # Linear to 0 at step 10; up to the checkpoint with the old rate, and from there on with the new one
    assert [logs[4], logs[5], logs[6]] == pytest.approx([2 * rate * 0.7, rate * 0.6, rate * 0.5])
    (numbers,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Numbers))
    assert numbers.rates == pytest.approx({step: rate * (11 - step) / 10 for step in range(5, 11)})
    assert trainer.state.global_step == STEPS and not (tmp_path / RECORD).exists()
    assert checkpoints(tmp_path) == [2, 4, 6, 8, 10]


def test_in_a_stock_trainer_a_change_that_a_resume_undoes_is_none(model, tmp_path, caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    with_kl(stock_sft, model, tmp_path, stopping("rollback")).train()
    trainer = with_kl(stock_sft, model, tmp_path, stopping("rollback"), learning_rate=1e-4)
    again(trainer)
    assert trainer.state.global_step == 5 and "transformers takes learning_rate from the checkpoint" in caplog.text
    trainer = with_kl(stock_sft, model, tmp_path, stopping("rollback"), max_grad_norm=0.5, bad=0.0)
    again(trainer)
    assert trainer.state.global_step == STEPS and "with max_grad_norm: 1.0 → 0.5" in caplog.text
    assert checkpoints(tmp_path) == [2, 4, 6, 8, 10] and not (tmp_path / RECORD).exists()


def test_a_run_without_a_good_checkpoint_begins_anew_with_other_settings(model, tmp_path):
    for save_strategy in ("steps", "no"):
        folder, kwargs = tmp_path / save_strategy, {"save_strategy": save_strategy, "save_steps": BAD}
        for build, stays in ((stock_sft, 1), (resumable_sft, "rolled back")):
            end_of(with_kl(build, model, folder, stopping("rollback"), **kwargs), anew)
            assert end_of(with_kl(build, model, folder, stopping("rollback"), **kwargs), again) == stays
            trainer = with_kl(build, model, folder, stopping("rollback"), seed=1, bad=0.0, **kwargs)
            again(trainer)
            assert trainer.state.global_step == STEPS and not (folder / RECORD).exists()
            shutil.rmtree(folder)


def test_anew_all_the_same(model, tmp_path):
    with pytest.raises(RolledBack):
        with_kl(resumable_sft, model, tmp_path, stopping("rollback")).train()
    trainer = with_kl(resumable_sft, model, tmp_path, stopping("rollback"), bad=0.0)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == STEPS


# ---- Nothing of a rolled-back step is kept ----


@pytest.mark.parametrize("build", [stock_sft, pytest.param(resumable_sft, marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("kwargs", "left", "best"),
    [
        ({"save_strategy": "epoch"}, [4], None),  # four steps an epoch: step 6 lies within one
        ({"save_steps": 1}, [1, 2, 3, 4], None),  # the loss of step 6 is of the weights of step 5
        ({"max_steps": BAD}, [2, 4], None),  # saved at the end, too
        ({"save_total_limit": 1}, [4], None),  # a save would remove the good one
        ({"save_strategy": "best", "save_total_limit": 1}, [2], 2),
        ({"save_steps": 2, "load_best_model_at_end": True}, [2, 4], 2),
        ({"save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}, [2], 2),
    ],
    ids=str,
)
def test_no_save_keeps_a_step_that_is_rolled_back(kwargs, left, best, build, model, tmp_path):
    others = [NotFiniteCallback(action="stop"), EntropyFloorCallback(action="save", steps=1)]
    bad = {"grad_norm": (0.0, math.nan), "entropy": (2.0, 0.0)}
    if best:  # the evaluation of step 6 would be the best one
        monitors = [GoldGapCallback(action="rollback", proxy="eval_proxy/mean"), others[1]]
        numbers = calm_and_bad(**GOLD_METRICS)
        kwargs = kwargs | {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_proxy/mean"}
        kwargs = kwargs | {"greater_is_better": True}
    else:
        monitors, numbers = [stopping("rollback"), *others], calm_and_bad(**bad, kl=(0.0, 99.0))
    if build is resumable_sft and kwargs.get("load_best_model_at_end"):
        left = [2, 4]  # a stock trainer ends with the best one alone, if `save_total_limit` is 1
    numbers = Numbers(*numbers)
    trainer = build(model, tmp_path, numbers, *monitors, **kwargs)
    assert end_of(trainer, anew) in (BAD, "rolled back")
    assert checkpoints(tmp_path) == left and not [*tmp_path.glob(f"*checkpoint-{BAD}")]
    if best:
        assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    if kwargs.get("load_best_model_at_end"):
        torch.testing.assert_close(weights(trainer), saved_weights(tmp_path / f"checkpoint-{best}"))
    end_of(build(model, tmp_path, numbers, *monitors, **kwargs), again)
    assert checkpoints(tmp_path) == left


@pytest.mark.parametrize("build", [stock_sft, resumable_sft])
def test_power_that_is_lost_in_a_rollback_loses_nothing(build, model, tmp_path):
    """The record is written and a checkpoint after the good step still has its name."""
    end_of(with_kl(build, model, tmp_path, stopping("rollback"), save_steps=1), anew)
    (aside,) = tmp_path.glob("rolled_back-6-checkpoint-5")
    assert checkpoints(tmp_path) == [1, 2, 3, 4]
    aside.rename(tmp_path / "checkpoint-5")
    if build is stock_sft:  # transformers takes checkpoint-5; it is put aside, and the run goes no further
        trainer = with_kl(build, model, tmp_path, stopping("rollback"), save_steps=1, max_grad_norm=0.5, bad=0.0)
        again(trainer)
        assert trainer.state.global_step == 6 and checkpoints(tmp_path) == [1, 2, 3, 4]
    trainer = with_kl(build, model, tmp_path, stopping("rollback"), save_steps=1, max_grad_norm=0.5, bad=0.0)
    again(trainer)
    assert trainer.state.global_step == STEPS
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [*range(1, STEPS + 1)]


def test_another_run_of_one_trainer_knows_nothing_of_the_last(model, tmp_path):
    for action, end in (("stop", BAD), ("warn", STEPS)):
        trainer = with_kl(stock_sft, model, tmp_path / action, stopping(action))
        for _ in range(2):
            trainer.train()
            assert trainer.state.global_step == end and [a["step"] for a in alerts_of(trainer.state)] == [BAD]


def test_an_evaluation_after_training_ends_nothing(model, tmp_path):
    for action in ("stop", "rollback"):
        callback = GoldGapCallback(proxy="eval_proxy/mean", action=action)
        trainer = stock_sft(model, tmp_path / action, Numbers(*calm_and_bad(**GOLD_METRICS)), callback)
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
        (alert,) = [alert for alert in alerts_of(trainer.state) if "gold" in alert["what"]]
        assert alert["action"] == "warn" and not (tmp_path / action / RECORD).exists()
        assert checkpoints(tmp_path / action) == [2, 4, 6, 8, 10]
