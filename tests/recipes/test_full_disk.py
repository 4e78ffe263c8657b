"""A disk that is full when training ends: the model is written first, and the same command does the rest."""

import pytest
import transformers.modeling_utils
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import Trainer

from tests.recipes.small_runs import RECIPES, arguments

pytestmark = pytest.mark.slow


def no_room(part, monkeypatch):
    """Have the model, or the metrics of `part`, not be written; checkpoints are."""

    def full(write, is_it):
        def written(*args, **kwargs):
            if is_it(args):
                raise OSError(28, "No space left on device")
            return write(*args, **kwargs)

        return written

    if part != "model":
        monkeypatch.setattr(Trainer, "save_metrics", full(Trainer.save_metrics, lambda args: args[1] == part))
        return
    save = transformers.modeling_utils.safe_save_file
    is_model = lambda args: "checkpoint-" not in str(args[1])  # noqa: E731
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full(save, is_model))


@pytest.mark.parametrize(
    ("part", "has_checkpoints", "name"),
    [
        pytest.param("model", True, "sft", marks=pytest.mark.extra),
        ("model", True, "ppo"),
        ("model", False, "dpo"),
        pytest.param("train", False, "dpo", marks=pytest.mark.extra),
        ("eval", True, "dpo"),
    ],
)
def test_the_same_command_goes_on(name, has_checkpoints, part, inputs, tmp_path, monkeypatch, capsys):
    command = arguments(name, inputs, tmp_path / "run")
    command += [] if has_checkpoints else ["--save_strategy", "no"]
    with monkeypatch.context() as patch:
        no_room(part, patch)
        with pytest.raises(SystemExit, match="2"):
            RECIPES[name].main(command)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"could not be written to {tmp_path / 'run'} (No space left on device; " in error and ": error: " in error
    again = "resumes from the newest complete checkpoint" if has_checkpoints else "restarts"
    assert error.endswith(f"(if the disk is full, make room), then run the same command again: it {again}.")
    model = tmp_path / "run/model.safetensors"
    written = load_file(model) if part != "model" else None
    assert (part == "model") != model.exists()

    RECIPES[name].main(command)
    output = capsys.readouterr().out
    assert ("Training is complete" in output) == has_checkpoints
    assert model.exists() and (tmp_path / "run/eval_results.json").exists()
    if written is not None:
        assert_close(load_file(model), written, rtol=0, atol=0)
