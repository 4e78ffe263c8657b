"""Checkpoints that are written while training goes on: the same files, complete or gone, and never in the way."""

import json
import multiprocessing
import shutil
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from datasets import Dataset
from torch.distributed import HashStore
from transformers import Trainer, TrainerCallback

from tests.ppo.worker import RESUMED, Stop, end_state, lora_trainer, make_trainer
from tests.tiny import ON_CPU, tiny_llama, tiny_tokenizer
from trl_ext.runs.checkpoints import NotSaved
from trl_ext.runs.marker import MARKER
from trl_ext.runs.writer import OTHERS_PART, CheckpointWriter
from trl_ext.stages.trainers import ResumableSFTTrainer, SFTConfig
from trl_ext.upstream.names import WRITERS

EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_in_background": True}
SMALL = {"learning_rate": 1e-2, "per_device_train_batch_size": 2, "record_run": False}


def sft(output_dir, is_evaluated=False, **config):
    rows = Dataset.from_dict({"prompt": ["the cat"] * 8, "completion": [" sat on the mat"] * 8})
    args = SFTConfig(str(output_dir), **{**ON_CPU, **SMALL, **config})
    return ResumableSFTTrainer(
        model=tiny_llama(),
        args=args,
        train_dataset=rows,
        eval_dataset=rows if is_evaluated else None,
        processing_class=tiny_tokenizer(),
    )


class At(TrainerCallback):
    """Does something right after optimizer steps."""

    def __init__(self, **acts):
        self.acts = {int(step.strip("_")): act for step, act in acts.items()}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.acts:
            self.acts[state.global_step]()


@pytest.fixture
def release(monkeypatch):
    """Until this event is set, the thread writes nothing."""
    event = threading.Event()

    def held_back(write):
        def wait(*args, **kwargs):
            assert threading.current_thread() is threading.main_thread() or event.wait(60)
            return write(*args, **kwargs)

        return wait

    for path, name in WRITERS.items():
        module = import_module(path)
        monkeypatch.setattr(module, name, held_back(getattr(module, name)))
    yield event
    event.set()


def complete(folder):
    return sorted(int(path.parent.name.split("-")[1]) for path in Path(folder).glob(f"checkpoint-*/{MARKER}"))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "config", "kept_back"),
    [
        (make_trainer, RESUMED, "model.safetensors critic/model.safetensors optimizer.pt ppo_state_0.pt"),
        (lora_trainer, RESUMED, "adapter_model.safetensors critic/adapter_model.safetensors optimizer.pt"),
        (sft, {}, "model.safetensors optimizer.pt"),
    ],
    ids=["ppo", "ppo lora", "sft"],
)
def test_what_is_written_later_is_what_was_there(build, config, kept_back, tmp_path, release, monkeypatch):
    """The weights have moved four steps by the time that anything is written."""
    trainer = build(output_dir=tmp_path, **config | {"max_steps": 7})
    folder, seen = tmp_path / "checkpoint-3", {}

    def save_twice():
        for trainer.args.save_in_background in (False, True):
            trainer._save_checkpoint(trainer.model, None)
            if not trainer.args.save_in_background:
                folder.rename(tmp_path / "at once")
        seen["after saving"] = contents(folder)

    def look():
        seen["later"] = contents(folder)
        release.set()

    trainer.add_callback(At(_3=save_twice, _7=look))
    trainer.train()

    assert seen["later"] == seen["after saving"]  # the steps went on meanwhile
    assert {*kept_back.split()} <= contents(folder).keys() - seen["later"].keys()
    expected = contents(tmp_path / "at once")
    different = [name for name, content in contents(folder).items() if content != expected.pop(name, None)]
    assert not expected and {*different} == {MARKER, "training_args.bin"}  # its time, and that setting


def test_all_that_writes_tensors_is_known():
    kinds = {"torch": torch.save, "safetensors.torch": safetensors.torch.save_file}
    for path, name in WRITERS.items():
        function = getattr(import_module(path), name)
        assert function is kinds.get(path, safetensors.torch.save_file), f"`{path}.{name}` is {function}"


def test_an_object_of_which_there_is_no_copy_is_written_at_once(tmp_path):
    shared = torch.arange(6.0)
    weights = {"whole": shared, "part": shared[2:4], "transposed": shared.view(2, 3).T, "steps": [1]}
    writer = CheckpointWriter()
    with writer.deferring():
        torch.save(weights, tmp_path / "weights.pt")
        torch.save({"lock": _Uncopied()}, tmp_path / "uncopied.pt")
        torch.save(torch.ones(1), tmp_path / "no mapping.pt")
    assert (tmp_path / "uncopied.pt").exists() and (tmp_path / "no mapping.pt").exists()
    assert not (tmp_path / "weights.pt").exists()
    (tmp_path / "at once").mkdir()
    torch.save(weights, tmp_path / "at once/weights.pt")
    shared.zero_()
    weights["steps"].append(2)
    writer.start(complete=None)
    writer.wait()
    assert (tmp_path / "weights.pt").read_bytes() == (tmp_path / "at once/weights.pt").read_bytes()


class _Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("there is one of me")


@pytest.mark.slow
def test_one_at_a_time_and_the_last_one_before_training_ends(tmp_path, monkeypatch):
    writing, most = [], []
    start = CheckpointWriter.start

    def watched(self, complete, *args):
        def slow():
            writing.append(1)
            most.append(len(writing))
            time.sleep(0.2)
            complete()
            writing.pop()

        start(self, slow, *args)

    monkeypatch.setattr(CheckpointWriter, "start", watched)
    sft(tmp_path, **EACH_STEP, save_total_limit=2).train()
    assert most == [1, 1, 1, 1] and complete(tmp_path) == [3, 4] and not writing


@pytest.mark.slow
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_what_is_nearly_written_outlives_an_exception(error, tmp_path, release):
    def fail():
        threading.Timer(0.2, release.set).start()
        raise error

    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_in_background=True, **RESUMED)
    trainer.add_callback(At(_3=fail))
    with pytest.raises(error):
        trainer.train()
    assert complete(tmp_path) == [2] and not trainer._writer.is_busy

    again = make_trainer(tmp_path, save_strategy="no", **RESUMED)
    again.train(True)
    uninterrupted = make_trainer(tmp_path / "other", **RESUMED)
    uninterrupted.train()
    torch.testing.assert_close(end_state(again), end_state(uninterrupted), rtol=0, atol=0, equal_nan=True)


# By the thread: safetensors, PyTorch and the marker; at once: transformers' JSON, and PyTorch of what is no mapping
FILES = ["model.safetensors", "optimizer.pt", f"{MARKER}.tmp", "config.json", "training_args.bin"]
DISKS = [(name, True, "stop") for name in FILES] + [
    (name, *way)
    for name in ("optimizer.pt", "config.json")
    for way in ((True, "continue"), (False, "stop"), (False, "continue"))
]


@pytest.mark.parametrize(
    ("name", "in_background", "what_follows"),
    [pytest.param(*case, marks=() if case in (DISKS[0], DISKS[-1]) else pytest.mark.slow) for case in DISKS],
)
def test_a_full_disk_is_one_sentence(name, in_background, what_follows, tmp_path, capsys):
    config = EACH_STEP | {"save_in_background": in_background, "on_save_failure": what_follows, "save_total_limit": 2}
    trainer = sft(tmp_path, **config)
    full = tmp_path / "checkpoint-3"

    def fill():
        trainer._writer.wait()  # it deletes what is in the way
        full.mkdir()
        if name == "model.safetensors":  # safetensors does not follow a link
            (full / name).mkdir()
        else:
            (full / name).symlink_to("/dev/full")

    trainer.add_callback(At(_3=fill))
    cause = "(No space left|a write to the disk failed|s a directory)"
    sentence = rf"checkpoint-3 could not be written to {tmp_path} \(.*{cause}"
    if what_follows == "stop":
        with pytest.raises(NotSaved, match=rf"{sentence}.* GiB are free there\), so training ends at step "):
            trainer.train()
        assert complete(tmp_path) == [1, 2]
    else:
        trainer.train()
        said = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
        assert len(said) == 1 and "Training continues (`on_save_failure: continue`)" in said[0]
        assert complete(tmp_path) == [2, 4]
    assert not full.exists()


def test_metrics_are_whole_or_as_they_were(tmp_path, monkeypatch):
    trainer, results = sft(tmp_path), tmp_path / "all_results.json"
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 2.0})
    both = {"train_loss": 1.0, "eval_loss": 2.0}
    assert json.loads(results.read_text()) == both and json.loads((tmp_path / "eval_results.json").read_text())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    files = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("transformers.trainer_pt_utils.json.dump", full)
        trainer.save_metrics("test", {"test_loss": 3.0})
    assert {path.name for path in tmp_path.iterdir()} == files and json.loads(results.read_text()) == both
    results.write_text('{"train_loss": 1')  # as an earlier trl_ext left it on a full disk
    trainer.save_metrics("test", {"test_loss": 3.0})
    assert json.loads(results.read_text()) == {"test_loss": 3.0}


def test_metrics_replace_a_file_and_never_write_into_it(tmp_path):
    """Whoever has the file open reads all of what was there before, not a part of what comes."""
    trainer = sft(tmp_path)
    trainer.save_metrics("train", {"train_loss": 1.0})
    files = [tmp_path / name for name in ("train_results.json", "all_results.json")]
    with files[0].open() as one, files[1].open() as other:
        trainer.save_metrics("train", {"train_loss": 2.0})
        assert json.load(one) == json.load(other) == {"train_loss": 1.0}
    assert [json.loads(path.read_text()) for path in files] == [{"train_loss": 2.0}] * 2


def test_a_program_that_ends_waits_for_the_last_checkpoint(tmp_path):
    """Also one that trains in a daemon thread, as a server or a notebook may: a thread inherits that."""

    def program():
        def complete():
            time.sleep(0.3)
            (tmp_path / "marker").touch()

        trains = threading.Thread(target=CheckpointWriter().start, args=(complete,), daemon=True)
        trains.start()
        trains.join()

    process = multiprocessing.get_context("fork").Process(target=program)
    process.start()
    process.join(30)
    assert process.exitcode == 0 and (tmp_path / "marker").exists()


def test_a_run_that_cannot_go_on_does_not_say_that_it_does(tmp_path):
    """One of two processes fails where the other one waits for it."""
    trainer = sft(tmp_path, **EACH_STEP, on_save_failure="continue")
    trainer.accelerator, trainer.state.best_global_step = SimpleNamespace(num_processes=2), 1
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0/config.json").symlink_to("/dev/full")
    with pytest.raises(NotSaved, match=r"so training ends at step 0. Correct .* newest complete checkpoint\.$"):
        trainer._save_checkpoint(trainer.model, None)


def test_a_folder_that_is_removed_is_a_failure_too(tmp_path, release):
    trainer = sft(tmp_path, **EACH_STEP | {"save_steps": 2, "max_steps": 8})

    def remove():
        shutil.rmtree(tmp_path / "checkpoint-2")
        release.set()

    trainer.add_callback(At(_3=remove))
    with pytest.raises(NotSaved, match="checkpoint-2 could not be written to"):
        trainer.train()


def test_what_was_interrupted_does_not_count_as_one_to_keep(tmp_path):
    trainer = sft(tmp_path, **EACH_STEP, save_total_limit=2)
    trainer.add_callback(At(_3=lambda: (tmp_path / "checkpoint-9").mkdir()))
    trainer.train()
    assert complete(tmp_path) == [3, 4] and not (tmp_path / "checkpoint-9").exists()


def test_the_best_checkpoint_that_could_not_be_written_is_not_the_best(tmp_path):
    losses = iter([3.0, 2.0, 1.0, 1.5])  # the last is better than what is there
    config = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    config |= {"metric_for_best_model": "eval_loss", "on_save_failure": "continue", "save_in_background": False}
    trainer = sft(tmp_path, is_evaluated=True, **EACH_STEP | config)
    weights, before, evaluate = {}, [], trainer.evaluation_loop

    def evaluated(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        return output._replace(metrics=output.metrics | {"eval_loss": next(losses)})

    trainer.evaluation_loop = evaluated

    def fill():
        (tmp_path / "checkpoint-3").mkdir()
        (tmp_path / "checkpoint-3/optimizer.pt").symlink_to("/dev/full")

    def keep():
        before.append((trainer.state.best_model_checkpoint, trainer.state.best_metric))
        weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer.add_callback(At(_3=fill, _4=keep))
    trainer.train()
    assert before == [(str(tmp_path / "checkpoint-2"), 2.0)]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    torch.testing.assert_close(dict(trainer.model.named_parameters()), weights, rtol=0, atol=0)


@pytest.mark.parametrize("what_follows", ["stop", "continue"])
def test_a_push_is_waited_for_and_said(what_follows, tmp_path, monkeypatch, capsys):
    trainer = sft(tmp_path, **EACH_STEP, on_save_failure=what_follows)
    pushed = []
    trainer.args.push_to_hub = True
    push = lambda self, folder: pushed.append(Path(folder, "optimizer.pt").stat().st_size)  # noqa: E731
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    trainer.train()
    assert len(pushed) == 4 and all(pushed) and complete(tmp_path) == [1, 2, 3, 4]
    assert "training waits for each checkpoint, since `push_to_hub` uploads each" in capsys.readouterr().out


def test_a_tracker_that_uploads_checkpoints_finds_them(tmp_path, monkeypatch, capsys):
    class Upload(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            assert complete(tmp_path)[-1] == state.global_step

    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    trainer = sft(tmp_path, **EACH_STEP)
    trainer.args.report_to = ["wandb"]
    trainer.add_callback(Upload())
    trainer.train()
    assert "since wandb uploads each: unset WANDB_LOG_MODEL to send it only numbers" in capsys.readouterr().out


def test_the_marker_waits_for_the_parts_of_all_processes_and_of_this_checkpoint(monkeypatch):
    store = HashStore()
    monkeypatch.setattr("trl_ext.runs.writer._get_default_store", lambda: store)
    first, second, marked = CheckpointWriter(), CheckpointWriter(), []
    second.start(None, 2, 1, name="the one before")
    first.start(lambda: marked.append("this"), 2, 0, name="this")
    first.wait(0.3)
    assert first.is_busy and not marked
    second.start(None, 2, 1, name="this")
    first.wait()
    assert marked == ["this"] and first.error is None

    first.start(lambda: marked.append("next"), 2, 0, name="next")
    second.start(None, 2, 1, OSError("full"), name="next")
    first.wait()
    assert marked == ["this"] and OTHERS_PART in str(first.error)


def test_a_process_that_dies_is_not_waited_for(tmp_path, monkeypatch, capsys):
    """Process 1 never writes its part: the collective says so."""
    store, calls = HashStore(), []
    monkeypatch.setattr("trl_ext.runs.writer._get_default_store", lambda: store)
    monkeypatch.setattr("trl_ext.runs.writer._PATIENCE", 0.1)

    def reduce(tensor, reduction):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("Connection closed by peer")
        return tensor

    trainer = sft(tmp_path)
    trainer.accelerator = SimpleNamespace(num_processes=2, device="cpu", reduce=reduce)
    trainer._being_saved = str(tmp_path / "checkpoint-1"), None
    trainer._writer.start(lambda: None, 2, 0, name="1")
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer._check_saving(wait=True)
    trainer._complete_after_an_error()
    assert "another process has not written its part yet" in capsys.readouterr().out
    assert not trainer._writer.is_busy


@pytest.mark.slow
def test_a_run_may_go_on_with_the_other_way_of_saving(tmp_path):
    first = sft(tmp_path, **EACH_STEP)
    first.add_callback(At(_3=lambda: (_ for _ in ()).throw(Stop)))
    with pytest.raises(Stop):
        first.train()
    second = sft(tmp_path, **EACH_STEP | {"save_in_background": False, "on_save_failure": "continue"})
    second.train(True)
    assert complete(tmp_path) == [1, 2, 3, 4] and second.state.global_step == 4
