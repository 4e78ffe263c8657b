"""The commands from saved rollouts to a critic that PPO starts with, and an interrupted run."""

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from recipes import generate, ppo, pretrain_critic
from tests.recipes.small_runs import ROOT, arguments
from trl_ext.runs.saving import MARKER


@pytest.fixture(scope="module")
def rollouts(inputs, tmp_path_factory):
    file = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    flags = {"model_name_or_path": inputs / "model", "dataset_name": inputs / "prompts", "dataset_split": "train"}
    flags |= {"output_file": file, "rollouts": "true", "max_new_tokens": 8, "use_cpu": "true"}
    generate.main([f"--{name}={value}" for name, value in flags.items()])
    return file


def flags(inputs, rollouts, output, **more):
    given = {
        "config": ROOT / "recipes/demo/pretrain_critic.yaml",
        "model_name_or_path": inputs / "model",
        "dataset_name": rollouts,
        "reward_funcs": "tests.tiny.length_reward",
        "eval_size": 8,
        "output_dir": output,
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "warmup_steps": 0,
        "save_strategy": "steps",
        "save_steps": 2,
        "use_cpu": "true",
        "disable_tqdm": "true",
    }
    return [f"--{name}={value}" for name, value in (given | more).items()]


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_critic_and_ppo_starts_with_it(inputs, rollouts, tmp_path, capsys):
    pretrain_critic.main(flags(inputs, rollouts, tmp_path / "critic", save_in_background="true"))
    output = capsys.readouterr().out
    assert "with a zero head, held-out explained variance " in output and "next: trl-ext ppo" in output
    weights = load_file(tmp_path / "critic/model.safetensors")
    (tmp_path / "critic/checkpoint-4" / MARKER).unlink()  # as if interrupted while it was written
    (tmp_path / "critic/model.safetensors").unlink()
    pretrain_critic.main(flags(inputs, rollouts, tmp_path / "critic"))
    assert "step 2 of 4" in capsys.readouterr().out
    assert_close(load_file(tmp_path / "critic/model.safetensors"), weights, rtol=0, atol=0)
    lines = (tmp_path / "critic/metrics.rank0.jsonl").read_text().splitlines()
    logs = [json.loads(line).get("logs", {}) for line in lines]
    first = next(log for log in logs if "eval_val/explained_variance" in log)
    assert first["eval_val/explained_variance"] == pytest.approx(0, abs=1e-6)  # before the first step

    words = arguments("ppo", inputs, tmp_path / "ppo", steps=2)
    ppo.main([*words, "--value_model_name_or_path", str(tmp_path / "critic"), "--eval_strategy", "no"])
    assert f"`value_model` {tmp_path / 'critic'}" in " ".join(capsys.readouterr().out.split())
