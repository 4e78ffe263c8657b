"""What the recipes answer, in one line, to a command line that says too little or is unknown."""

import pytest

from recipes import dpo, online_dpo, ppo, reward, sft

RECIPES = [sft, reward, dpo, ppo, online_dpo]


def test_missing_and_unknown_arguments_are_named(subtests, capsys):
    for given, message in [
        (["--output_dir", "x"], "no dataset: give `dataset_name`"),
        (["--dataset_name", "x", "--use_cpu", "true"], "no model: give `model_name_or_path`"),
        (
            ["--dataset_name", "x", "--learnin_rate", "1"],
            "unknown flag '--learnin_rate'; did you mean --learning_rate",
        ),
    ]:
        for recipe in RECIPES:
            with subtests.test(recipe=recipe, message=message):
                needs_reward = "--dataset_name" in given and recipe in (ppo, online_dpo)
                with pytest.raises(SystemExit):
                    recipe.main([*given, *(["--reward_funcs", "x.py:y"] if needs_reward else [])])
                assert message in capsys.readouterr().err


def test_without_arguments_the_recipe_says_how_to_run_it(subtests, capsys):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe):
            with pytest.raises(SystemExit, match="2"):
                recipe.main([])
            name = recipe.__name__.rpartition(".")[2]
            assert f"accelerate launch recipes/{name}.py --config" in capsys.readouterr().err
