"""Rollouts ahead on two processes: the runs that `test_ahead.py` starts in one launch."""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from tests.launch import spare_time
from tests.ppo.test_ahead import Here, workers
from tests.ppo.worker import RESUMED, collected, end_state, make_trainer, raised_by
from trl_ext.ppo import ahead

CONFIG = RESUMED | {"per_device_train_batch_size": 1, "rollouts_ahead": 1, "max_steps": 12}


class Kill(TrainerCallback):
    """Kills the second process of process 1, once."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and PartialState().process_index == 1:
            os.kill(workers(os.getpid())[0], signal.SIGKILL)


def run(folder, *callbacks):
    trainer = make_trainer(folder, **CONFIG)
    rollouts = collected(trainer)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return end_state(trainer) | {"ids": [rollout.completion_ids for rollout in rollouts]}


class FailsOnOne(Here):
    """The second rollout fails on process 1."""

    def submit(self, job, arrived):
        future = super().submit(job, arrived)
        if job.number == 1 and PartialState().process_index == 1:
            future.draw = lambda future: future.set_exception(RuntimeError("out of memory"))
        return future


class Fill(TrainerCallback):
    """Process 0 finds no room for what it writes at once of the second checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 0 and state.global_step == 2:
            folder = Path(args.output_dir, "checkpoint-2")
            folder.mkdir(parents=True)
            (folder / "config.json").symlink_to("/dev/full")


def unsaved(folder):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "on_save_failure": "continue"}
    trainer = make_trainer(folder, **CONFIG | saving)
    trainer.add_callback(Fill())
    return raised_by(trainer)


def main(folder):
    results = {"second process": run(folder / "second", Kill())}
    ahead.RolloutProcess = Here
    results["here"] = run(folder / "here")
    ahead.RolloutProcess = FailsOnOne
    results["fails"] = raised_by(make_trainer(folder / "fails", **CONFIG))
    ahead.RolloutProcess = Here
    results["unsaved"] = unsaved(folder / "unsaved")
    torch.save(results, folder / f"process {PartialState().process_index}.pt")


if __name__ == "__main__":
    spare_time()
    main(Path(sys.argv[-1]))
