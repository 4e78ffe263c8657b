"""The same command again: an interrupted run, one with other settings, and one that is complete."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from recipes import dpo, ppo, reward, sft
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from trl_ext.checkpoints import MARKER

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHORT = ["--warmup_steps", "0", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2"]
STEPS = ("--max_steps", "4")
SHORT += ["--per_device_train_batch_size", "8", "--disable_tqdm", "true", "--use_cpu", "true"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    world = make_world(0, demonstrations=64, pairs=64, prompts=32, held_out=16)
    for name in world:
        (folder / name).mkdir()
        for split, rows in world[name].items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module", params=[sft, reward, dpo, ppo], ids=["sft", "reward", "dpo", "ppo"])
def recipe(request, inputs, tmp_path_factory):
    """`run(*flags)` does the same again, in a folder where it was done once, which comes with it."""
    name = request.param.__name__.rpartition(".")[2]
    folder = tmp_path_factory.mktemp(name)
    config, data, own = {
        "sft": ("sft", "sft", (*STEPS, "--eval_size", "8")),
        "reward": ("reward", "preferences", STEPS),
        "dpo": ("dpo", "preferences", STEPS),
        # Two rollouts of two minibatches
        "ppo": (
            "unguarded",
            "prompts",
            ("--total_episodes", "32", "--num_ppo_epochs", "1", "--num_mini_batches", "2"),
        ),
    }[name]
    own += ("--max_completion_length", "8", "--reward_weights", "1", "0") if name == "ppo" else ()

    def run(*more):
        request.param.main(
            [
                *(
                    "--config",
                    str(ROOT / f"recipes/demo/{config}.yaml"),
                    "--model_name_or_path",
                    str(inputs / "model"),
                ),
                *("--dataset_name", str(inputs / data), "--output_dir", str(folder), *SHORT, *own, *more),
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
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.*") if path.suffix in (".json", ".png")}
    run("--logging_steps", "3")
    kept = {name for name in ("eval_results.json", "reward_report.json", "margins.png") if (folder / name).exists()}
    assert kept and all((folder / name).stat().st_mtime_ns == written[folder / name] for name in kept)
    assert f"Training is complete, at step 4: loading {folder / 'checkpoint-4'}." in capsys.readouterr().out
    assert (folder / "train_results.json").read_text() == results
    assert_close(load_file(folder / "model.safetensors"), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "0.5"], "belongs to another configuration (learning_rate: "),
        (["--resume_from_checkpoint", "absent"], "absent is no folder"),
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
    results = (folder / "train_results.json").read_text()
    run("--learning_rate", "1e-5", "--resume_from_checkpoint", "false")
    output = capsys.readouterr().out
    assert "Resuming" not in output and "Training is complete" not in output
    assert (folder / "train_results.json").read_text() != results
