"""Mistakes in a recipe's command line are reported in one line, with exit status 2."""

import re

import pytest

from recipes import dpo, generate, online_dpo, ppo, pretrain_critic, reward, sft
from tests.recipes.small_runs import refusal, write_rows
from trl_ext.cli.arguments import ModelArguments

RECIPES = [sft, reward, dpo, ppo, online_dpo, pretrain_critic]
SCORED = [ppo, online_dpo, pretrain_critic]
REWARD = ["--reward_funcs", "tests.tiny.length_reward"]
ON_A_CPU = "--use_cpu true --bf16 false --report_to none".split()


def test_a_missing_or_unknown_argument_is_named(subtests, capsys, inputs, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "train_results.json").write_text("{}")
    model = ["--model_name_or_path", inputs / "model"]
    for given, message in [
        (["--output_dir", "x"], "no dataset: set `dataset_name`"),
        (["--dataset_name", "x", *ON_A_CPU], "no model: set `model_name_or_path`"),
        (["--dataset_name", "x", "--learnin_rate", "1"], "'--learnin_rate'; did you mean --learning_rate"),
        ([*model, *ON_A_CPU, "--dataset_name", tmp_path / "abs", "--output_dir", tmp_path / "o"], "any data file"),
        ([*model, *ON_A_CPU, "--dataset_name", "x", "--output_dir", tmp_path / "file" / "o"], "Not a directory"),
        ([*model, *ON_A_CPU, "--dataset_name", "x", "--output_dir", tmp_path / "finished"], "holds a model"),
    ]:
        for recipe in RECIPES:
            with subtests.test(recipe=recipe.__name__, message=message):
                words = [*given, *(REWARD if recipe in SCORED else [])]
                assert message in refusal(capsys, recipe.main, words)


def test_missing_columns_of_the_data_are_named(subtests, capsys, inputs, tmp_path):
    folder = write_rows(tmp_path / "data", train=[{"question": "a"}], test=[{"question": "a"}])
    for recipe in (sft, reward, dpo, ppo, online_dpo, pretrain_critic, generate):
        with subtests.test(recipe=recipe.__name__):
            out, cpu = ("file", ["--use_cpu", "true"]) if recipe is generate else ("dir", ON_A_CPU)
            words = ["--model_name_or_path", inputs / "model", "--dataset_name", folder, *cpu]
            words += [f"--output_{out}", tmp_path / "o", *(REWARD if recipe in SCORED else [])]
            assert re.search("(?i)column|lack|prompts, but a rollout needs", refusal(capsys, recipe.main, words))
    words = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "preferences", *ON_A_CPU]
    assert "'completion'] not in the dataset" in refusal(capsys, sft.main, [*words, "--output_dir", tmp_path / "o"])


def test_model_settings_that_would_have_no_effect_are_refused(subtests):
    for given in ({"lora_r": 8}, {"lora_target_modules": ["q"]}):
        with subtests.test(given=given), pytest.raises(ValueError, match="need `use_peft: true`"):
            ModelArguments(model_name_or_path="x", **given)
