"""Whether an output folder may be written, is not in use, and has the last step's evaluation."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.trainer_utils import TrainOutput

from tests.launch import on_two_processes
from tests.runs.test_saving import At, complete, sft
from trl_ext.runs import output_dir
from trl_ext.runs.output_dir import LOCK, FolderInUse, Hold, check_output_dir
from trl_ext.runs.saving import last_evaluation

HOLDS = """
import os, sys, time
from trl_ext.runs.output_dir import Hold
hold = Hold(sys.argv[1])
if not os.fork():  # like a data loader's worker that outlives its parent
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(300)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds `tmp_path`, in its own group with its child."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("file", ["train_results.json", "model.safetensors"])
def test_a_model_is_overwritten_only_on_request(tmp_path, file):
    (tmp_path / file).write_text("{}")
    for resume in (None, "true"):
        with pytest.raises(FileExistsError, match="holds a model, but no checkpoint"):
            check_output_dir(tmp_path, resume)
    for resume in ("false", "False"):
        check_output_dir(tmp_path, resume)
    (tmp_path / "checkpoint-3").mkdir()  # it is resumed
    check_output_dir(tmp_path)


@pytest.mark.parametrize(
    ("at", "trained", "loads_best", "is_new"), [(4, 1, 0, 0), (2, 1, 0, 1), (4, 0, 0, 1), (4, 1, 1, 1)]
)
def test_the_last_step_is_not_evaluated_twice(at, trained, loads_best, is_new):
    history = [{"step": at, "eval_loss": 0.5, "epoch": 1.0}, {"step": 4, "loss": 0.1}, {"step": at, "eval_gold": 0.7}]
    state = SimpleNamespace(global_step=4, epoch=1.0, log_history=history)
    args = SimpleNamespace(load_best_model_at_end=bool(loads_best))
    trainer = SimpleNamespace(state=state, args=args, evaluate=lambda: {"eval_loss": 0.3})
    found = last_evaluation(trainer, TrainOutput(4, 0.5, {"train_loss": 0.5} if trained else {}))
    assert found == ({"eval_loss": 0.3} if is_new else {"eval_loss": 0.5, "eval_gold": 0.7, "epoch": 1.0})


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_one_is_gone(other, tmp_path, monkeypatch):
    """Neither uses the other's files, and a run killed by `kill -9` can resume at once."""
    monkeypatch.setattr(output_dir, "_PATIENCE", 0.0)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    who = rf"process {other.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    with pytest.raises(
        FolderInUse, match=rf"`output_dir` {tmp_path} is in use by {who}: wait for that run, end it, or"
    ):
        sft(tmp_path, **saving).train()
    assert not complete(tmp_path)
    other.kill()  # its child is alive
    other.wait()
    monkeypatch.undo()
    sft(tmp_path, **saving).train()
    assert complete(tmp_path) == [1, 2]


@pytest.mark.slow
def test_a_folder_is_held_during_training(tmp_path):
    """One process may hold it several times, as in a notebook; a trainer that fails releases it."""
    seen = []
    for error in (None, KeyboardInterrupt):

        def look(error=error):
            with Hold(tmp_path):
                seen.append((tmp_path / LOCK).exists())
            if error is not None:
                raise error

        trainer = sft(tmp_path, max_steps=2)
        trainer.add_callback(At(_1=look))
        if error is None:
            trainer.train()
        else:
            with pytest.raises(error):
                trainer.train()
        assert not (tmp_path / LOCK).exists()
    assert seen == [True, True]


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def without(*args, **kwargs):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(output_dir.FileLock, "acquire", without)
    Hold(tmp_path).release()
    assert "stops a second run from" in capsys.readouterr().out


@pytest.mark.distributed
def test_all_processes_of_a_launch_are_refused_together(other, tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("said")
    for said in on_two_processes(("tests.runs.hold_worker", folder, str(tmp_path)))[0]:
        assert f"process {other.pid} on" in said["refused"] and said["held"]
