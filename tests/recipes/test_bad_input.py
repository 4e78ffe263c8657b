"""Broken data and paths, in every recipe: one line, exit status 2, before a model is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from recipes import dpo, generate, online_dpo, ppo, reward, sft
from tests.tiny import tiny_llama, tiny_reward_model, tiny_tokenizer

RECIPES = [sft, reward, dpo, ppo, online_dpo, generate]
ROW = {"prompt": "the cat", "completion": "sat", "chosen": "sat", "rejected": "ran"}


def user(text):
    return [{"role": "user", "content": text}]


CHAT = {name: user(text) for name, text in ROW.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name in ("good", "chat"):
        (folder / name).mkdir()
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text((json.dumps(CHAT if name == "chat" else ROW) + "\n") * 8)
    (folder / "data.docx").write_text("a")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    for name, model in (("model", tiny_llama()), ("reward model", tiny_reward_model(tiny_llama()))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"a": ')
    for name, lacks in (("no tokenizer", "tokenizer*"), ("no weights", "*.safetensors"), ("cut weights", "")):
        shutil.copytree(folder / "model", folder / name)
        for file in (folder / name).glob(lacks) if lacks else ():
            file.unlink()
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "cut weights" / "model.safetensors").write_bytes(whole[:-400])
    (folder / "run" / "checkpoint-3").mkdir(parents=True)
    (folder / "run" / "checkpoint-3" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refusal(folder, tmp_path, capsys, monkeypatch):
    """What a recipe says to some flags; nothing is loaded on the way."""

    def load(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)

    def refusal(recipe, **given):
        flags = {"model_name_or_path": folder / "model", "dataset_name": folder / "good"}
        if recipe is generate:
            flags |= {"output_file": tmp_path / "out.jsonl"}
        else:
            flags |= {"output_dir": tmp_path / "out", "use_cpu": "true", "bf16": "false", "report_to": "none"}
        if recipe in (ppo, online_dpo):
            flags |= {"reward_funcs": "tests.tiny.length_reward"}
        arguments = [str(part) for name, value in (flags | given).items() for part in (f"--{name}", value)]
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            recipe.main(arguments)
        assert raised.value.code == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert ": error: " in error
        return error.partition(": error: ")[2]

    return refusal


def test_where_nothing_can_be_written(subtests, folder, tmp_path, refusal):
    (tmp_path / "file").write_text("")
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "train_results.json").write_text("{}")
    for recipe in RECIPES:
        for value, message in [
            (tmp_path / "file" / "out", f"{tmp_path}/file is not a folder, choose another"),
            (Path("/proc/out/out"), "cannot be written (No such file or directory): choose another"),
            (
                tmp_path / "finished",
                "holds a finished run without checkpoints: choose another, or overwrite it with `resume",
            ),
        ]:
            if recipe is generate and value.name == "finished":
                continue
            with subtests.test(recipe=recipe.__name__, value=value):
                name = "output_file" if recipe is generate else "output_dir"
                assert message in refusal(recipe, **{name: value / "x" if recipe is generate else value})


def test_messages_without_a_chat_template(subtests, folder, refusal):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe.__name__):
            error = refusal(recipe, dataset_name=folder / "chat")
            assert "chat template" in error


def test_a_model_without_a_tokenizer(subtests, folder, refusal):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe.__name__):
            assert "has no tokenizer: save one there" in refusal(recipe, model_name_or_path=folder / "no tokenizer")


@pytest.mark.slow
def test_wrong_paths_of_models(subtests, folder, refusal):
    names = {
        ppo: ["model_name_or_path", "reward_model_name_or_path", "value_model_name_or_path", "ref_model_name_or_path"],
        dpo: ["model_name_or_path", "ref_model_name_or_path"],
        online_dpo: ["model_name_or_path", "reward_model_name_or_path"],
    }
    for recipe in RECIPES:
        for name in names.get(recipe, ["model_name_or_path"]):
            for value, message in [
                (folder / "modle", f"there is no such folder; did you mean {folder}/model?"),
                ("some/model", "it is not in the hub's cache, and HF_HUB_OFFLINE is set"),
                ("a/b/c", "there is no such folder in "),
                (folder / "good", "is a folder without a model: it has no config.json"),
                (folder / "run", f"it has no config.json; did you mean {folder}/run/checkpoint-3?"),
                (folder / "broken", "config.json is not valid JSON"),
                (folder / "no weights", "has no weights (no .safetensors and no .bin file)"),
                (folder / "cut weights", "model.safetensors is damaged (Error while deserializing header"),
                (folder / "data.docx", "is a file: give the folder that holds it"),
            ]:
                with subtests.test(recipe=recipe.__name__, name=name, value=value):
                    error = refusal(recipe, **{name: value})
                    assert error.startswith(f"`{name}` {value}") and message in error
