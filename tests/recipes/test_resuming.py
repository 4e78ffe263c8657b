"""The same command again: for an interrupted run, one with other settings, a damaged one and a complete one."""

import random
import shutil

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.recipes.small_runs import RECIPES, arguments
from tests.test_any_change import DAMAGES
from trl_ext.data import TrainedPairs
from trl_ext.runs.saving import MARKER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request, inputs, tmp_path_factory):
    """A function `run(*flags)` that repeats a finished run in its folder, and that folder."""
    folder = tmp_path_factory.mktemp(request.param)

    def run(*more):
        RECIPES[request.param].main([*arguments(request.param, inputs, folder), *more])

    run()
    return run, folder


SFT_AND_PPO = pytest.mark.parametrize(
    "recipe", [pytest.param(n, marks=() if n in ("sft", "ppo") else pytest.mark.extra) for n in RECIPES], indirect=True
)


def test_an_interrupted_run_ends_with_the_same_model(recipe, capsys):
    run, folder = recipe
    weights = load_file(folder / "model.safetensors")
    (folder / "checkpoint-4" / MARKER).unlink()  # as if interrupted while it was written
    (folder / "model.safetensors").unlink()
    run()
    output = capsys.readouterr().out
    assert f"Skipping {folder / 'checkpoint-4'}: it is not complete" in output
    assert f"Resuming from {folder / 'checkpoint-2'}, step 2 of 4" in output
    assert_close(load_file(folder / "model.safetensors"), weights, rtol=0, atol=0)
    assert (folder / "checkpoint-4" / MARKER).is_file()


def test_a_complete_run_is_not_trained_again(recipe, capsys):
    run, folder = recipe
    weights = load_file(folder / "model.safetensors")
    results = (folder / "train_results.json").read_text()
    if pairs := TrainedPairs.load(folder):  # as after a resume with other pairs
        TrainedPairs(pairs.pairs, is_complete=False).save(folder)
    run("--logging_steps", "3")
    assert f"Training is complete, at step 4: loading {folder / 'checkpoint-4'}." in capsys.readouterr().out
    assert (folder / "train_results.json").read_text() == results
    assert not pairs or not TrainedPairs.load(folder).is_complete
    assert_close(load_file(folder / "model.safetensors"), weights, rtol=0, atol=0)


@SFT_AND_PPO
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in (1, 2) else pytest.mark.extra) for n in range(6)])
def test_a_damaged_run_ends_with_the_same_model(recipe, seed, capsys):
    """The command resumes from an older checkpoint or restarts, and prints what it skips."""
    run, folder = recipe
    expected = load_file(folder / "model.safetensors")
    chance = random.Random(seed)
    for checkpoint in ("checkpoint-2", "checkpoint-4") if seed % 3 == 0 else ("checkpoint-4",):
        files = [p for p in sorted((folder / checkpoint).rglob("*")) if p.is_file() and p.name != "README.md"]
        for path in chance.sample(files, 2):
            damage = chance.choice(list(DAMAGES))
            DAMAGES[damage](path, bytearray(path.read_bytes()))
    if seed % 3 == 1:
        shutil.rmtree(folder / "checkpoint-2")
    run()
    output = capsys.readouterr().out
    assert f"Skipping {folder / 'checkpoint-4'}: it is not complete." in output
    assert ("Resuming" in output) == (seed % 3 == 2)
    assert_close(load_file(folder / "model.safetensors"), expected, rtol=0, atol=0)
