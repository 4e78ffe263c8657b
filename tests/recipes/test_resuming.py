"""The same command again: an interrupted run, one with other settings, and one that is complete."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from recipes import dpo, reward, sft
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from trl_ext.checkpoints import MARKER

ROOT = Path(__file__).parents[2]
SHORT = ["--max_steps", "4", "--warmup_steps", "0", "--save_strategy", "steps", "--save_steps", "2"]
SHORT += ["--per_device_train_batch_size", "8", "--disable_tqdm", "true", "--use_cpu", "true"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    world = make_world(0, demonstrations=64, pairs=64, prompts=1, held_out=16)
    for name in ("sft", "preferences"):
        (folder / name).mkdir()
        for split, rows in world[name].items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module", params=[sft, reward, dpo], ids=["sft", "reward", "dpo"])
def recipe(request, inputs, tmp_path_factory):
    """`run(*flags)` does the same again, in a folder where it was done once, which comes with it."""
    name = request.param.__name__.rpartition(".")[2]
    folder = tmp_path_factory.mktemp(name)

    def run(*more):
        request.param.main(
            [
                *("--config", str(ROOT / f"recipes/demo/{name}.yaml"), "--model_name_or_path", str(inputs / "model")),
                *("--dataset_name", str(inputs / ("sft" if name == "sft" else "preferences"))),
                *("--output_dir", str(folder), *SHORT, *more),
            ]
        )

    run()
    return run, folder


def test_an_interrupted_run_goes_on_to_the_same_model(recipe, capsys):
    run, folder = recipe
    weights = load_file(folder / "model.safetensors")
    (folder / "checkpoint-4" / MARKER).unlink()  # stopped while it was written
    (folder / "model.safetensors").unlink()
    run()
    output = capsys.readouterr().out
    assert f"Skipping {folder / 'checkpoint-4'}: it is not complete" in output
    assert f"Resuming from {folder / 'checkpoint-2'}, step 2 of 4" in output
    assert_close(load_file(folder / "model.safetensors"), weights, rtol=0, atol=0)
    assert (folder / "checkpoint-4" / MARKER).is_file()


def test_a_complete_run_is_not_trained_again(recipe, capsys):
    run, folder = recipe
    weights, results = load_file(folder / "model.safetensors"), (folder / "train_results.json").read_text()
    run("--logging_steps", "3")
    assert f"Training is complete, at step 4: loading {folder / 'checkpoint-4'}." in capsys.readouterr().out
    assert (folder / "train_results.json").read_text() == results
    assert_close(load_file(folder / "model.safetensors"), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "0.5"], "belongs to another configuration (learning_rate: "),
        (["--resume_from_checkpoint", "absent"], "absent is not a complete checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(recipe, flags, message, capsys):
    run, _ = recipe
    with pytest.raises(SystemExit, match="2"):
        run(*flags)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ": error: " in error and message in error


def test_another_model_cannot_go_on(recipe, inputs, tmp_path, capsys):
    run, _ = recipe
    make_model(make_tokenizer(), 1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run("--model_name_or_path", str(tmp_path))
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r": error: .* belongs to another configuration \((model_name_or_path|policy): ", error)


def test_a_run_may_be_begun_anew(recipe, capsys):
    run, folder = recipe
    run("--learning_rate", "0.5", "--resume_from_checkpoint", "false", "--max_steps", "2")
    assert "Resuming" not in capsys.readouterr().out
    state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    shutil.rmtree(folder)
