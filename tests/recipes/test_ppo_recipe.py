from pathlib import Path

import pytest
from datasets import Dataset

from recipes.ppo import PPOScriptArguments, without_long_prompts
from tests.tiny import tiny_tokenizer
from trl_ext import PPOConfig, StrictTrlParser, load_dataset_split
from trl_ext.cli.arguments import ModelArguments
from trl_ext.rewards import load_reward

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
    """A message has a token for its role and one for its end, and the template adds one for the next role."""
    words = [4, 2, 5, 3]
    texts = [" ".join(["cat"] * n) for n in words]
    messages = {"prompt": [[{"role": "user", "content": text}] for text in texts]}
    for rows, longest in [({"prompt": texts}, 4), (messages, 7)]:
        with subtests.test(rows=rows):
            kept = without_long_prompts(Dataset.from_dict(rows | {"row": range(4)}), tiny_tokenizer(), longest)
            assert kept["row"][:] == [0, 1, 3]
            assert f"1 of 4 prompts have more than {longest} tokens" in capsys.readouterr().out
