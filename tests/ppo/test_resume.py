"""An interrupted and resumed run ends with the bits of the uninterrupted one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import TrainerCallback

from tests import tiny
from tests.ppo.worker import RESUMED, EachStep
from tests.tiny import collected, end_state, tiny_llama, tiny_ppo, weights
from trl_ext.runs.checkpoints import CannotResume
from trl_ext.runs.saving import MARKER


def assert_same_end(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def trained(output_dir, resume=None, **config):
    trainer = tiny_ppo(output_dir, **config)
    trainer.output = trainer.train(resume)
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The end state of a run that saves nothing."""
    asked = []

    def letters_reward(prompts, completions, **kwargs):
        asked.append(prompts)
        return tiny.letters_reward(completions)

    trainer = tiny_ppo(tmp_path_factory.mktemp("uninterrupted"), None, letters_reward, **RESUMED)
    watch = EachStep(lambda: weights(trainer))
    trainer.add_callback(watch)
    output = trainer.train()
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(watch.seen, watch.seen[1:], strict=False)]
    return {"state": end_state(trainer), "output": output, "moved": moved, "asked": asked}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a run with `save_steps: 1`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    trained(folder, save_strategy="steps", save_steps=1, **RESUMED)
    return folder


def test_a_run_that_a_failing_reward_ended_resumes_from_its_last_rollout(tmp_path):
    calls = []

    def letters_reward(completions, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("no answer")
        return tiny.letters_reward(completions)

    trainer = tiny_ppo(tmp_path, None, letters_reward, **RESUMED)
    with pytest.raises(RuntimeError, match=r"no answer.* saved\. .* resumes from .*checkpoint-8\."):
        trainer.train()
    resumed = tiny_ppo(tmp_path, None, letters_reward, **RESUMED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 14 and len(calls) == 5  # the third rollout again, then the fourth


@pytest.mark.slow
def test_checkpoints_fall_on_the_ends_of_rollouts_and_of_the_run(checkpoints):
    assert sorted(int(path.name[11:]) for path in complete(checkpoints)) == [4, 8, 12, 14]


# Four steps a rollout, eight a data epoch
@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(8, id="a data epoch's end", marks=pytest.mark.extra), 12])
def test_a_resumed_run_ends_as_the_uninterrupted_one(step, checkpoints, uninterrupted, tmp_path):
    shutil.copytree(checkpoints / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")

    # Another seed at the start, as in another process: random state must come from the checkpoint alone
    trainer = tiny_ppo(tmp_path, **RESUMED)
    torch.manual_seed(1234)
    output = trainer.train(True)

    assert trainer.state.global_step == 14
    assert_same_end(end_state(trainer), uninterrupted["state"])
    assert output.training_loss == uninterrupted["output"].training_loss


@pytest.mark.slow
def test_the_resumed_run_uses_what_is_restored(uninterrupted):
    state, logs = uninterrupted["state"], uninterrupted["state"]["logs"]
    first, second, third, fourth = uninterrupted["asked"]

    assert sorted(first + second) == sorted(third + fourth)
    assert first + second != third + fourth  # each data epoch has an order of its own
    assert all(uninterrupted["moved"])
    assert len({entry["learning_rate/factor"] for entry in logs}) == 5  # never 1, and always different
    assert [entry["step"] for entry in logs] == [3, 6, 9, 12, 14]
    assert state["kl_controller"]["kl_coef"] != 0.05
    assert state["reward_normalizer"]["running"][0] == state["episodes"] == 32


@pytest.mark.slow
def test_killed_three_times_by_sigkill(uninterrupted, tmp_path):
    run = subprocess.run(
        [sys.executable, "-u", "-m", "tests.ppo.worker", "killed", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    first, second, third, fourth, _ = re.split("^ended with ", run.stdout, flags=re.MULTILINE)
    from_step_4 = f"Resuming from {tmp_path / 'checkpoint-4'}, step 4 of 14."
    interrupted = f"{tmp_path / 'checkpoint-8'}: it is not complete"

    # Killed right after optimizer step 6
    assert "Resuming" not in first
    # Killed while PPO's own state of step 8 was written, the last file
    assert second.startswith("-9, leaving ['checkpoint-4']") and from_step_4 in second and interrupted not in second
    # The same, written in the background
    # Not killed
    for after in (third, fourth):
        assert after.startswith("-9, leaving ['checkpoint-4', 'checkpoint-8']")
        assert f"Skipping {interrupted}" in after and from_step_4 in after
    assert run.stdout.endswith("ended with 0, leaving ['checkpoint-14']\n")
    assert_same_end(torch.load(tmp_path / "end.pt"), uninterrupted["state"])


def complete(folder):
    return [path.parent for path in Path(folder).glob(f"checkpoint-*/{MARKER}")]


def test_with_a_limit_of_one_there_is_always_a_complete_checkpoint(tmp_path, monkeypatch):
    seen, removed = [], []
    save, rmtree = torch.save, shutil.rmtree

    def watched_save(*args, **kwargs):
        seen.append(complete(tmp_path))
        save(*args, **kwargs)

    def watched_rmtree(path, *args, **kwargs):
        if "checkpoint-" in str(path):
            removed.append(path)
            assert set(complete(tmp_path)) - {Path(path)}
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", watched_save)
    monkeypatch.setattr(shutil, "rmtree", watched_rmtree)
    rollout_of_one_step = {"num_mini_batches": 1, "num_ppo_epochs": 1}
    trained(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=1, **rollout_of_one_step)

    first, *others = [seen[i : i + len(seen) // 4] for i in range(0, len(seen), len(seen) // 4)]
    assert len(first) == 5 and not any(first)  # arguments, optimizer, scheduler, RNG, PPO's state
    assert all(len(folders) == 1 for checkpoint in others for folders in checkpoint)
    assert len(removed) == 3


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completed")
    trainer = trained(folder, max_steps=8, save_strategy="steps", save_steps=4)
    return folder, weights(trainer)


@pytest.fixture
def a_copy_of(completed, tmp_path):
    return Path(shutil.copytree(completed[0], tmp_path / "run")), completed[1]


def no_training(trainer):
    def fail(*args, **kwargs):
        raise AssertionError("trained")

    trainer.training_step = fail
    return trainer


def test_a_complete_run_is_loaded_and_not_trained_again(a_copy_of, capsys):
    folder, final = a_copy_of
    trainer = no_training(tiny_ppo(folder, max_steps=8))
    output = trainer.train(True)

    assert f"Training is complete, at step 8: loading {folder / 'checkpoint-8'}." in capsys.readouterr().out
    assert output.global_step == trainer.state.global_step == 8
    assert_close(weights(trainer), final, rtol=0, atol=0)
    for checkpoint in complete(folder):
        (checkpoint / MARKER).unlink()
    with pytest.raises(ValueError, match="No complete checkpoint in"):
        tiny_ppo(folder, max_steps=8).train(True)


@pytest.mark.slow
def test_differences_are_printed_and_what_does_not_fit_is_refused(subtests, completed, capsys):
    folder, _ = completed
    for change, message, is_refused in [
        ({"kl_coef": 0.1}, "kl_coef: 0.05 → 0.1", False),
        ({"rows": 24}, "train_dataset: '", False),
        ({"model": tiny_llama(seed=9)}, "model: ", True),
        ({"per_device_train_batch_size": 8}, "rows per step: 4 → 8", True),
        ({"num_ppo_epochs": 1}, "num_ppo_epochs: ", True),
        ({"baseline": "mean"}, "critic: ", True),
        ({"ref_model": tiny_llama(seed=9)}, "reference: None → ", True),
    ]:
        with subtests.test(message=message):
            trainer = no_training(tiny_ppo(folder, max_steps=8, **change))
            if is_refused:
                with pytest.raises(CannotResume, match=f"cannot be resumed with {message}"):
                    trainer.train(True)
            else:
                trainer.train(True)
                assert message in capsys.readouterr().out


def demonstrated(output_dir, **config):
    rows = Dataset.from_dict({"prompt": ["the cat"] * 16, "completion": [" sat"] * 16})
    settings = {"reward_normalization": "reference", "step_kl_target": 0.1, "learning_rate": 1e-3} | config
    return tiny_ppo(output_dir, train_dataset=rows, max_steps=8, **settings)


def test_half_the_batch_and_twice_the_accumulation_resume_where_the_run_stopped(tmp_path):
    """As docs/troubleshooting.md advises when memory runs out; also after an odd number of rollouts."""
    shape = {"num_mini_batches": 1, "num_ppo_epochs": 3, "max_steps": 12, "save_strategy": "steps", "save_steps": 3}
    whole = tiny_ppo(tmp_path / "whole", **shape)
    stops = EachStep(lambda: setattr(whole.control, "should_training_stop", whole.state.global_step == 3))
    whole.add_callback(stops)
    whole.train()
    halved = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = tiny_ppo(tmp_path / "whole", **shape | halved)
    rollouts = []
    trainer._normalize = lambda *given, normalize=trainer._normalize: (
        rollouts.append(trainer.state.global_step) or normalize(*given)
    )
    trainer.train(True)
    assert trainer.state.global_step == 12 and rollouts == [3, 6, 9]


def test_a_changed_setting_replaces_the_adapted_value(tmp_path):
    trainer = demonstrated(tmp_path, save_strategy="steps", save_steps=4)
    trainer.add_callback(
        EachStep(lambda: setattr(trainer.control, "should_training_stop", trainer.state.global_step == 4))
    )
    trainer.train()
    mean, rate = trainer.reward_normalizer.reference_mean, 1e-3 * trainer.learning_rate_controller.factor
    change = {"kl_coef": 0.5, "reward_weights": [10.0], "learning_rate": 1e-1}
    trainer = demonstrated(tmp_path, **change)
    trainer.learning_rate_controller.observe = lambda *given: 0.0  # the controller would adapt it again
    load = trainer._load_optimizer_and_scheduler

    def loaded_before(checkpoint):  # as by DeepSpeed
        trainer.optimizer.load_state_dict(torch.load(Path(checkpoint, "optimizer.pt")))
        load(checkpoint)

    trainer._load_optimizer_and_scheduler = loaded_before
    trainer.train(True)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-1}
    assert trainer.state.global_step == 8 and trainer.kl_controller.kl_coef == 0.5
    assert trainer.reward_normalizer.reference_mean == pytest.approx(10 * mean)
    assert 1e-1 * trainer.learning_rate_controller.factor == pytest.approx(rate)


def test_a_resumed_run_may_get_a_critic_learning_rate(a_copy_of):
    trainer = tiny_ppo(a_copy_of[0], max_steps=12, critic_learning_rate=1e-2)
    trainer.train(True)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {trainer.args.learning_rate, 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
def test_a_stop_in_mid_rollout_waits_for_its_end_and_resumes(event, uninterrupted, tmp_path):
    def ask(args, state, control, **kwargs):
        control.should_training_stop = control.should_save = state.global_step == 6

    stop = TrainerCallback()
    setattr(stop, event, ask)
    trainer = tiny_ppo(tmp_path, **RESUMED)
    trainer.add_callback(stop)
    trainer.train()
    assert trainer.state.global_step == 8 and [path.name for path in complete(tmp_path)] == ["checkpoint-8"]
    assert_same_end(end_state(trained(tmp_path, True, **RESUMED)), uninterrupted["state"])


def test_a_run_extended_from_mid_rollout_starts_with_a_new_rollout(tmp_path):
    trainer = tiny_ppo(tmp_path, max_steps=3)
    rollouts = collected(trainer)
    for runs in (1, 2):
        trainer.train()
        assert len(rollouts) == runs and trainer._step == 3
