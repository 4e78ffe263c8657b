"""What the recipes answer, in one line, to a command line that says too little or is unknown."""

import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
from trl import get_peft_config, get_quantization_config

from recipes import dpo, generate, merge, online_dpo, ppo, pretrain_critic, reward, sft
from trl_ext.cli import arguments
from trl_ext.cli.arguments import ClassifierArguments, ModelArguments

RECIPES = [sft, reward, dpo, ppo, online_dpo, pretrain_critic]


ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]


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
                needs_reward = "--dataset_name" in given and recipe in (ppo, online_dpo, pretrain_critic)
                with pytest.raises(SystemExit):
                    recipe.main([*given, *(["--reward_funcs", "x.py:y"] if needs_reward else [])])
                assert message in capsys.readouterr().err


def test_a_wrong_model_is_refused_before_anything_is_loaded(subtests, capsys):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe):
            more = ["--reward_funcs", "x.py:y"] if recipe in (ppo, online_dpo, pretrain_critic) else []
            with pytest.raises(SystemExit, match="2"):
                recipe.main(["--dataset_name", "x", "--model_name_or_path", "recipes/demoo", *more, *ON_A_CPU])
            assert "`model_name_or_path` recipes/demoo: there is no such folder" in capsys.readouterr().err


def test_no_file_names_a_setting_that_transformers_warns_of():
    files = [*(Path(__file__).parents[2] / "recipes").rglob("*.yaml")]
    assert len(files) > 30
    assert not [path for path in files if re.search("^gradient_checkpointing", path.read_text(), re.M)]


def test_without_arguments_the_recipe_says_how_to_run_it(subtests, capsys):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe):
            with pytest.raises(SystemExit, match="2"):
                recipe.main([])
            name = recipe.__name__.rpartition(".")[2].replace("_", "-")
            assert f"    trl-ext {name} --config" in capsys.readouterr().err


def test_the_quickstart_takes_no_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["quickstart.py", "--help"])
    monkeypatch.setattr("trl_ext.PPOTrainer", None)  # or it would train
    with pytest.raises(SystemExit, match="It takes\nno arguments"):
        runpy.run_path("recipes/quickstart.py", run_name="__main__")


def test_every_argument_of_a_recipe_is_read_or_refused(subtests):
    """By name: in the recipe itself, or in the arguments' own checks."""
    checks = inspect.getsource(arguments)
    kinds = {
        sft: sft.SFTScriptArguments,
        reward: reward.RewardScriptArguments,
        dpo: dpo.DPOScriptArguments,
        ppo: ppo.PPOScriptArguments,
        online_dpo: online_dpo.OnlineDPOScriptArguments,
        pretrain_critic: pretrain_critic.CriticScriptArguments,
        generate: generate.GenerateArguments,
        merge: merge.MergeArguments,
    }
    for recipe, kind in kinds.items():
        main = inspect.getsource(recipe).partition(inspect.getsource(kind))[2]  # below the arguments
        roles = re.search(r"for role in \((.*)\):", main)
        by_role = [f"{role}_name_or_path" for role in re.findall(r"\w+", roles[1])] if roles else []
        for field in fields(kind):
            with subtests.test(recipe=recipe.__name__, field=field.name):
                is_refused = (
                    field.name in ("dataset_streaming", "ignore_bias_buffers") and f"self.{field.name}" in checks
                )
                assert is_refused or field.name in by_role or re.search(rf"args\.{field.name}\b", main)


def test_every_argument_of_the_model_is_read_or_refused():
    """Reads are noted while the recipes' three readers of these arguments run."""
    read = set()

    class Noted(ModelArguments):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    noted = [Noted(model_name_or_path="x", use_peft=True, **{f"load_in_{bits}bit": True}) for bits in (4, 8)]
    read.clear()  # of its own checks
    for given in noted:
        given.init_kwargs({})
        get_peft_config(given)
        get_quantization_config(given)
    # The model's name is the trainer's first argument
    assert {f.name for f in fields(ModelArguments)} - read <= {"model_name_or_path"}


def test_settings_of_the_model_that_would_do_nothing_are_refused(subtests, tmp_path):
    base = {"model_name_or_path": "x"}
    for given, message in [
        ({"lora_r": 8}, "`lora_r=8` needs `use_peft=True`, but `use_peft=False`"),
        ({"lora_target_modules": ["q"]}, "needs `use_peft=True`"),
        ({"use_dora": True}, "needs `use_peft=True`"),
        ({"use_bnb_nested_quant": True}, "needs `load_in_4bit=True`"),
        ({"load_in_8bit": True}, "a quantised base cannot be trained: set `use_peft: true`"),
        ({"lora_task_type": "SEQ_CLS"}, "`lora_task_type` must be CAUSAL_LM here, got 'SEQ_CLS': leave it out"),
        (
            {"model_name_or_path": str(tmp_path), "model_revision": "v1"},
            "`model_revision` 'v1' is for a model on the hub",
        ),
    ]:
        with subtests.test(given=given), pytest.raises(ValueError, match=re.escape(message)):
            ModelArguments(**base | given)
    assert ClassifierArguments(**base, lora_task_type="SEQ_CLS").lora_task_type == "SEQ_CLS"
