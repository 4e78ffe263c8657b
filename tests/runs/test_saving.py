"""Checkpoints in the background: the same files, complete or deleted, without delays."""

import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.ppo.worker import RESUMED, Stop
from tests.tiny import ON_CPU, tiny_llama, tiny_ppo, tiny_tokenizer
from trl_ext.dpo import ResumableSFTTrainer, SFTConfig
from trl_ext.runs import saving
from trl_ext.runs.saving import MARKER, NotSaved

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
    """Calls functions right after optimizer steps."""

    def __init__(self, **acts):
        self.acts = {int(step.strip("_")): act for step, act in acts.items()}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.acts:
            self.acts[state.global_step]()


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path_factory):
    """A folder of this test in place of the machine's memory."""
    folder = tmp_path_factory.mktemp("memory")
    monkeypatch.setattr(saving, "_MEMORY", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def release(monkeypatch):
    """An event: nothing leaves memory before it is set."""
    event, copytree = threading.Event(), shutil.copytree

    def held_back(*args, **kwargs):
        assert event.wait(60)
        return copytree(*args, **kwargs)

    monkeypatch.setattr(saving.shutil, "copytree", held_back)
    yield event
    event.set()


def complete(folder):
    return sorted(int(path.parent.name.split("-")[1]) for path in Path(folder).glob(f"checkpoint-*/{MARKER}"))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_in_memory(checkpoint):
    return checkpoint.is_symlink() and checkpoint.resolve().name.startswith("trl_ext_checkpoint_")


@pytest.mark.slow
def test_the_checkpoint_has_the_state_of_its_step(tmp_path, release):
    """Though training is four steps ahead when the first file reaches the disk."""
    config = {"save_strategy": "steps", "save_steps": 4, **RESUMED, "max_steps": 12}
    tiny_ppo(tmp_path / "at once", **config).train()
    trainer, seen = tiny_ppo(tmp_path, save_in_background=True, **config), []

    def look():
        seen.append((is_in_memory(tmp_path / "checkpoint-8"), complete(tmp_path)))
        release.set()

    trainer.add_callback(At(_11=look))
    trainer.train()

    assert seen == [(True, [4])] and complete(tmp_path) == [4, 8, 12]
    for step in (8, 12):
        expected = contents(tmp_path / "at once" / f"checkpoint-{step}")
        found = contents(tmp_path / f"checkpoint-{step}")
        different = {name for name in expected if found.get(name) != expected[name]}
        assert found.keys() == expected.keys() and "ppo_state_0.pt" in found
        assert different <= {MARKER, "training_args.bin", "trainer_state.json", "ppo_state_0.pt"}  # these have times


@pytest.mark.parametrize("error", [pytest.param(Stop, marks=pytest.mark.slow), KeyboardInterrupt])
def test_a_checkpoint_in_memory_survives_an_exception(error, tmp_path, release):
    def fail():
        threading.Timer(0.2, release.set).start()
        raise error

    trainer = sft(tmp_path, **EACH_STEP)
    trainer.add_callback(At(_3=fail))
    with pytest.raises(error):
        trainer.train()
    assert complete(tmp_path) == [1, 2]


def test_memory_of_a_killed_run_is_freed_and_a_users_link_stays(memory, tmp_path):
    left, own = memory / "trl_ext_checkpoint_test", tmp_path / "elsewhere"
    for step, folder in ((2, left), (9, own)):
        folder.mkdir(exist_ok=True)
        (tmp_path / f"checkpoint-{step}").symlink_to(folder)
    sft(tmp_path, **EACH_STEP | {"max_steps": 1}).train()
    assert complete(tmp_path) == [1] and not left.exists() and not (tmp_path / "checkpoint-2").is_symlink()
    assert own.is_dir() and (tmp_path / "checkpoint-9").is_symlink()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kill_while_the_copy_takes_the_links_place_leaves_no_memory(tmp_path, monkeypatch):
    rename = Path.rename
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda path, to: rename(path, to) if path.is_symlink() else sys.exit())
        sft(tmp_path, **EACH_STEP | {"max_steps": 2}).train()
    sft(tmp_path, **EACH_STEP | {"max_steps": 1}).train()


def test_without_room_in_memory_training_waits_with_one_warning(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 9))
    monkeypatch.setattr(saving.logger, "warning", said.append)
    trainer, seen = sft(tmp_path, **EACH_STEP), []
    trainer.add_callback(At(_4=lambda: seen.extend(complete(tmp_path))))
    trainer.train()
    assert seen == [1, 2, 3] and len(said) == 1 and "GiB in " in said[0] and "which has 0.0 GiB free" in said[0]


@pytest.mark.parametrize("without_state", [False, True])
def test_staging_dir_is_used(without_state, tmp_path, release):
    (tmp_path / "fast").mkdir()
    config = EACH_STEP | {"staging_dir": str(tmp_path / "fast"), "save_only_model": without_state}
    trainer, seen = sft(tmp_path / "run", **config), []
    trainer.add_callback(At(_3=lambda: (seen.extend((tmp_path / "fast").iterdir()), release.set())))
    trainer.train()
    assert len(seen) == 1 and not [*(tmp_path / "fast").iterdir()]
    assert complete(tmp_path / "run") == ([] if without_state else [1, 2, 3, 4])


# The Trainer writes safetensors, PyTorch and JSON files, the thread writes the marker
DISKS = [
    (name, *way)
    for name in ("model.safetensors", "optimizer.pt", "config.json", f"{MARKER}.tmp")
    for way in ((False, "stop"), (False, "continue"), (True, "stop"), (True, "continue"))
]


@pytest.mark.parametrize(
    ("name", "in_background", "what_follows"),
    [pytest.param(*case, marks=() if case in (DISKS[0], DISKS[-1]) else pytest.mark.slow) for case in DISKS],
)
def test_a_full_disk_is_one_sentence(name, in_background, what_follows, tmp_path, capsys, monkeypatch):
    config = EACH_STEP | {"save_in_background": in_background, "on_save_failure": what_follows, "save_total_limit": 2}
    trainer = sft(tmp_path, **config)
    full, begin = tmp_path / "checkpoint-3", trainer._begin

    def fill(checkpoint):
        folder = begin(checkpoint)
        if checkpoint == full:
            full.mkdir(exist_ok=True)
            if name == "model.safetensors":  # safetensors does not follow a link
                (full / name).mkdir()
            else:
                (full / name).symlink_to("/dev/full")
        return folder

    monkeypatch.setattr(trainer, "_begin", fill)
    cause = "(No space left|Invalid argument|.*inline_container|.*s a directory|.*special file)"
    sentence = rf"checkpoint-3 could not be written to {tmp_path} \(.*{cause}"
    if what_follows == "stop":
        with pytest.raises(NotSaved, match=rf"{sentence}.* GiB are free there\), so training ends at step "):
            trainer.train()
        assert complete(tmp_path) == [1, 2]
    else:
        trainer.train()
        said = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
        assert len(said) == 1 and said[0].endswith("This does not end the run.")
        assert complete(tmp_path) == [2, 4]
    assert not full.exists()


def test_a_checkpoint_that_could_not_be_written_is_not_the_best(tmp_path):
    losses = iter([3.0, 2.0, 1.0, 1.5])  # the last evaluation is better than the saved ones
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


def test_the_first_process_says_whether_the_last_step_is_saved(monkeypatch):
    """Another machine may have no marker, and would wait alone in the collectives of saving."""
    state, args = SimpleNamespace(global_step=3), SimpleNamespace(output_dir="elsewhere")
    process = SimpleNamespace(state=state, args=args, _check_saving=lambda wait: None)
    monkeypatch.setattr(saving, "on_first", lambda function, *args: {"files": {}})
    assert saving.BackgroundSaving._save_last_step(process) == "elsewhere/checkpoint-3"


@pytest.mark.slow
def test_one_checkpoint_at_a_time_and_an_upload_finds_all_of_it(tmp_path, monkeypatch):
    writing, most, uploaded, copytree = [], [], [], shutil.copytree

    def slow(*args, **kwargs):
        writing.append(1)
        most.append(len(writing))
        time.sleep(0.2)
        copytree(*args, **kwargs)
        writing.pop()

    class Upload(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            uploaded.append(len(contents(Path(args.output_dir, f"checkpoint-{state.global_step}").resolve())))

    monkeypatch.setattr(saving.shutil, "copytree", slow)
    trainer = sft(tmp_path, **EACH_STEP, save_total_limit=2)
    trainer.add_callback(Upload())
    trainer.train()
    assert most == [1, 1, 1] and complete(tmp_path) == [3, 4] and not writing
    files = len(contents(tmp_path / "checkpoint-4"))
    assert uploaded == [files, *[files - 1] * 3]  # all but the marker
