"""What is kept for an exact resume, without a trainer."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from trl_ext import PPOTrainer
from trl_ext.ppo.snapshot import Snapshot
from trl_ext.runs.checkpoints import CannotResume


def test_a_snapshot_is_read_as_it_was_written_and_each_process_has_its_own(tmp_path):
    snapshots = [
        Snapshot(
            step=3,
            skip_until=4,
            rollout={"row": torch.arange(process + 2)},
            kl_controller={"kl_coef": 0.1 + process},
            reward_normalizer={"running": torch.rand(5)},
            metrics={"train": {"loss": torch.rand(5)}, "episodes": 8},
            trl_metrics={"loss": [1.0]},
            tr_loss=torch.tensor(0.5),
            total_loss=2.5,
            last_logged=2,
        )
        for process in range(2)
    ]
    for process, snapshot in enumerate(snapshots):
        snapshot.save(str(tmp_path), process)
    for process, snapshot in enumerate(snapshots):
        torch.testing.assert_close(asdict(Snapshot.load(str(tmp_path), process)), asdict(snapshot), rtol=0, atol=0)


def test_a_snapshot_of_another_version_says_so(tmp_path):
    torch.save({"step": 3}, tmp_path / "ppo_state_1.pt")
    with pytest.raises(ValueError, match=r"ppo_state_1.pt was written by another version of trl_ext"):
        Snapshot.load(str(tmp_path), 1)


def test_a_checkpoint_of_another_number_of_processes_is_refused():
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1))
    for marker in ({}, {"processes": 1}):
        PPOTrainer._check_marker(trainer, "checkpoint-3", marker)
    with pytest.raises(CannotResume, match=r"checkpoint-3 was written by 2 process\(es\), but this run has 1"):
        PPOTrainer._check_marker(trainer, "checkpoint-3", {"processes": 2})
