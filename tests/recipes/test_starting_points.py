"""docs/starting_points.md, the recipes, the defaults, docs/lora.md and the examples agree."""

import dataclasses
import re
import shlex

import yaml

from tests.recipes.small_runs import ROOT
from tests.test_docs import FENCE, PAGES, codes, table
from trl_ext import PPOConfig

PAGE = "docs/starting_points.md"
RECIPES = {path: yaml.safe_load(path.read_text()) for path in (ROOT / "recipes").glob("*/*.yaml")}
OF_REAL_MODELS = {path: recipe for path, recipe in RECIPES.items() if re.match("qwen|llama", path.parent.name)}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(PPOConfig)}


def given(words):
    """The flags of a command, as YAML reads them."""
    return {
        flag[2:]: yaml.safe_load(value) for flag, value in zip(words, words[1:], strict=False) if flag.startswith("--")
    }


def commands():
    """(model, method) → the words of its command, from the page's first code block."""
    block = FENCE.search(PAGES[PAGE])[2].replace("\\\n", " ")
    named = re.findall(r"(?m)^# (\S+), (\w+).*\n(.*)$", block)
    return {(model, method): shlex.split(command) for model, method, command in named}


def test_each_row_has_the_settings_of_its_command(subtests):
    rows = table(PAGE, "# Starting points")
    assert [tuple(row[:2]) for row in rows] == [*commands()]
    for row in rows:
        model, method, rate, critic, minibatch, rollout, gpus, memory = row
        with subtests.test(model=model, method=method):
            flags = given(commands()[model, method])
            path = ROOT / f"recipes/{flags['config']}.yaml"
            settings = RECIPES[path] | flags
            accelerate = yaml.safe_load((ROOT / f"accelerate_configs/{flags['accelerate_config']}.yaml").read_text())
            episodes = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * int(gpus)
            assert accelerate["num_processes"] == int(gpus)
            assert [float(settings[key]) for key in ("learning_rate", "critic_learning_rate")] == [
                float(rate),
                float(critic),
            ]
            assert [episodes, episodes * settings["num_mini_batches"]] == [int(minibatch.split()[0]), int(rollout)]
            split = [settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"], int(gpus)]
            assert minibatch.partition(" = ")[2] == " × ".join(map(str, split))
            assert [settings.get("use_peft", False), settings.get("load_in_4bit", False)] == [
                method != "full",
                method == "QLoRA",
            ]
            if {*flags} == {"config", "accelerate_config"}:
                assert f"# Memory: {memory} GiB" in path.read_text()


def test_shared_settings_are_those_of_each_recipe_and_of_the_config(subtests):
    for name, first, default, _ in table(PAGE, "## The same for all sizes"):
        (name,), (first,) = codes(name), codes(first)
        with subtests.test(name=name):
            for path, recipe in OF_REAL_MODELS.items():
                if path.stem.startswith("ppo") and path.stem != "ppo_sao":
                    assert recipe[name] == yaml.safe_load(first), path
            shown = [yaml.safe_load(code) for code in codes(default)] or [None]
            assert [getattr(DEFAULTS[name], "value", DEFAULTS[name])] == shown


def test_learning_rates_of_all_stages_are_those_of_recipes_and_pages(subtests):
    columns = {"SFT": "sft", "reward model": "reward", "DPO, β 0.1": "dpo", "PPO": "ppo", "PPO's critic": "ppo"}
    lora = {}
    for row in table(PAGE, "## Learning rate"):
        stage, key = columns[row[0]], "critic_learning_rate" if "critic" in row[0] else "learning_rate"
        lora[row[0]] = float(row[3])
        for path, recipe in OF_REAL_MODELS.items():
            if path.stem.partition("_")[0] == stage and path.stem != "reward_deberta":
                column = 3 if recipe.get("use_peft") else 2 if "8b" in path.parent.name else 1
                with subtests.test(path=path, key=key):
                    assert recipe[key] == float(row[column])
                    assert stage != "dpo" or f"β {recipe['beta']}" in row[0]
    told = re.findall(r"learning_rate[ =](\S+?)[\s,)`]", PAGES["docs/lora.md"])
    assert {float(rate) for rate in told} == {*lora.values()}
    example = (ROOT / "examples/ppo_lora.py").read_text()
    rates = [float(rate) for rate in re.findall(r"learning_rate=(\S+),", example)]
    assert rates == [lora["PPO"], lora["PPO's critic"]]
