"""What the recipes answer, in one line, to a command line that says too little or is unknown."""

import pytest

from recipes import dpo, online_dpo, ppo, reward, sft

RECIPES = pytest.mark.parametrize("recipe", [sft, reward, dpo, ppo, online_dpo], ids=lambda recipe: recipe.__name__)


@RECIPES
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--output_dir", "x"], "no dataset: give `dataset_name`"),
        (["--dataset_name", "x", "--use_cpu", "true"], "no model: give `model_name_or_path`"),
        (
            ["--dataset_name", "x", "--learnin_rate", "1"],
            "unknown flag '--learnin_rate'; did you mean --learning_rate",
        ),
    ],
)
def test_missing_and_unknown_arguments_are_named(recipe, given, message, capsys):
    if "--dataset_name" in given and recipe in (ppo, online_dpo):
        given = [*given, "--reward_funcs", "x.py:y"]
    with pytest.raises(SystemExit):
        recipe.main(given)
    assert message in capsys.readouterr().err


@RECIPES
def test_without_arguments_the_recipe_says_how_to_run_it(recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        recipe.main([])
    name = recipe.__name__.rpartition(".")[2]
    assert f"accelerate launch recipes/{name}.py --config" in capsys.readouterr().err
