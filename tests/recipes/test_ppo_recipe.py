import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from recipes.ppo import PPOScriptArguments, main, without_long_prompts
from tests.recipes.small_runs import arguments, make_inputs
from tests.tiny import tiny_llama, tiny_tokenizer
from trl_ext import PPOConfig, StrictTrlParser, load_dataset_split
from trl_ext.cli.arguments import ModelArguments
from trl_ext.rewards import load_reward
from trl_ext.runs.marker import MARKER

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("recipes/tinystories/ppo*.yaml"))


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_shipped_config_parses_and_finds_its_data_and_rewards(subtests):
    for path in CONFIGS:
        with subtests.test(path=path):
            parser = StrictTrlParser((PPOScriptArguments, PPOConfig, ModelArguments))
            script_args, training_args, _ = parser.parse_args_and_config(
                ["--config", str(path), "--model_name_or_path", "x"]
            )
            for split in (script_args.dataset_train_split, script_args.dataset_test_split):
                assert len(load_dataset_split(script_args.dataset_name, split)) >= 64
            rewards = [load_reward(name) for name in script_args.reward_funcs]
            assert len(rewards) == len(training_args.reward_weights)


def test_long_prompts_are_left_out(subtests, capsys):
    """A message has a token for its role, one for its end, and the template one for the answer's role."""
    for kind in ["text", "messages", "tokens"]:
        with subtests.test(kind=kind):
            words = [4, 2, 5, 3]
            texts = [" ".join(["cat"] * n) for n in words]
            rows = {
                "text": {"prompt": texts},
                "messages": {"prompt": [[{"role": "user", "content": text}] for text in texts]},
                "tokens": {
                    "input_ids": [[7] * (n + 1) for n in words],
                    "attention_mask": [[0] + [1] * n for n in words],
                },
            }[kind]
            longest = 4 + 3 * (kind == "messages")
            kept = without_long_prompts(Dataset.from_dict(rows | {"row": range(4)}), tiny_tokenizer(), longest)
            assert kept["row"][:] == [0, 1, 3]
            assert f"1 of 4 prompts have more than {longest} tokens" in capsys.readouterr().out


def test_missing_arguments_are_named(subtests, monkeypatch, capsys):
    for given, message in [
        (["--output_dir", "x"], "no dataset: give `dataset_name`"),
        (
            ["--dataset_name", "x"],
            "no reward: give at least one of `reward_model_name_or_path`, `reward_funcs` and `rewards`",
        ),
        (["--dataset_name", "x", "--reward_funcs", "m.f", "--use_cpu"], "no model: give `model_name_or_path`"),
    ]:
        with subtests.test(given=given):
            monkeypatch.setattr(sys, "argv", ["ppo.py", *given])
            with pytest.raises(SystemExit):
                main()
            assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ('{"prompt": "a"}', [], "The train dataset has fewer prompts than a rollout"),
        (
            '{"prompt": "a"}',
            ["--deepspeed", "z.json"],
            "A setting asks for DeepSpeed, which is not installed: `pip install deepspeed`",
        ),
    ],
    ids=["few prompts", "deepspeed"],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(rows, more, message, tmp_path, capsys, monkeypatch):
    if "--deepspeed" in more and importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed")
    (tmp_path / "data.jsonl").write_text(rows)
    given = ["--dataset_name", str(tmp_path / "data.jsonl"), "--eval_size", "0", "--output_dir", str(tmp_path / "out")]
    for part in (tiny_llama(), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    given += [
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--reward_funcs",
        "tests.tiny.length_reward",
        "--use_cpu",
        "true",
    ]
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--bf16", "false", "--report_to", "none", *more])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in error and message in error


def test_eval_size_0_switches_evaluation_off(monkeypatch, tmp_path):
    class Built(Exception):
        pass

    def build(args, eval_dataset, **kwargs):
        assert eval_dataset is None and args.eval_strategy == "no" and not args.eval_on_start
        raise Built

    monkeypatch.setattr("trl_ext.ppo.PPOTrainer", build)
    for part in (tiny_llama(), tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    config = ["--config", "recipes/tinystories/ppo.yaml", "--eval_size", "0"]  # the file sets `eval_strategy: steps`
    flags = ["--model_name_or_path", str(tmp_path), "--use_cpu", "true", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ppo.py", *config, *flags, "--eval_on_start", "true"])
    with pytest.raises(Built):
        main()


@pytest.mark.slow
def test_a_server_that_does_not_answer_ends_the_run_in_one_line(tmp_path, capsys):
    given = arguments("ppo", make_inputs(tmp_path / "inputs"), tmp_path / "run")
    config = (ROOT / "recipes/demo/unguarded.yaml").read_text()
    rewards = "rewards: [{RemoteReward: {url: 'http://127.0.0.1:9/score', retries: 0, name: far}}]\n"
    (tmp_path / "ppo.yaml").write_text(re.sub("(?m)^reward_(funcs|weights):.*$", "", config) + rewards)
    flags = [str(tmp_path / "ppo.yaml") if flag.endswith("unguarded.yaml") else flag for flag in given]
    weights = flags.index("--reward_weights")
    with pytest.raises(SystemExit, match="2"):
        main([*flags[:weights], *flags[weights + 3 :], "--eval_strategy", "no"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "reward function 'far': completion 0: http://127.0.0.1:9/score: ConnectError" in error
    assert error.count("far") == 1


REWARDS = """
reward_funcs: [recipes/demo/world.py:gold_reward]
rewards:
  - SumReward:
      members:
        - recipes/demo/world.py:phrase_reward
        - get_soft_overlong_punishment: {max_completion_len: 8, soft_punish_cache: 4}
        - SumReward:
            members: [tests/tiny.py:length_reward]
            means: [3.0]
            stds: [2e0]
      weights: [-1.0, 1.0, 0.5]
      name: several
    weight: 2
  - tests/tiny.py:length_reward
"""


@pytest.mark.slow
def test_rewards_with_settings_are_trained_on_and_count_for_a_resume(tmp_path, capsys):
    inputs = make_inputs(tmp_path / "inputs")
    config = (ROOT / "recipes/demo/unguarded.yaml").read_text()
    config = re.sub("(?m)^reward_(funcs|weights):.*$", "", config) + REWARDS
    given = arguments("ppo", inputs, tmp_path / "run")

    def run(text, *more):
        (tmp_path / "ppo.yaml").write_text(text)
        flags = [str(tmp_path / "ppo.yaml") if flag.endswith("unguarded.yaml") else flag for flag in given]
        weights = flags.index("--reward_weights")
        main([*flags[:weights], *flags[weights + 3 :], "--logging_steps", "1", "--eval_strategy", "no", *more])

    run(config)
    logs = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    log = next(log for log in logs if "objective/scores" in log)
    whole = log["rewards/gold_reward/mean"] + 2 * log["rewards/several/mean"] + log["rewards/length_reward/mean"]
    assert log["objective/scores"] == pytest.approx(whole, rel=1e-4)
    inner = "rewards/several/sum_length_reward/mean"
    assert log[inner] == pytest.approx((log["rewards/length_reward/mean"] - 3) / 2, rel=1e-4)

    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "checkpoint-4" / MARKER).unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    run(config)
    assert f"Resuming from {tmp_path / 'run' / 'checkpoint-2'}, step 2 of 4" in capsys.readouterr().out
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights

    for old, new, message in [
        ("weight: 2", "weight: 3", "(reward_weights: "),
        (
            "stds: [2e0]",
            "std: [2.0]",
            "entry 1, SumReward: SumReward has no argument 'std'; did you mean stds?",
        ),
        (
            "reward_funcs:",
            "reward_weights: [1, 1, 1]\nreward_funcs:",
            "and `weight` in an entry of `rewards` are both given",
        ),
    ]:
        with pytest.raises(SystemExit, match="2"):
            run(config.replace(old, new))
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert ": error: " in error and message in error
