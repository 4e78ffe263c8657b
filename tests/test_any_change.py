"""Any change before a run resumes is reported or refused, or the run ends as without the change."""

import dataclasses
import functools
import re
import shutil
import typing

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.dpo.worker import QUIET, pairs
from tests.tiny import (
    letters_reward,
    prompts,
    tiny_config,
    tiny_gpt2,
    tiny_llama,
    tiny_reward_model,
    tiny_tokenizer,
    weights,
)
from trl_ext import DPOConfig, DPOTrainer, PPOTrainer
from trl_ext.runs.checkpoints import ResumableRun, differences, fingerprint

pytestmark = pytest.mark.slow
HALF = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}


class FineTuning(ResumableRun, SFTTrainer):
    pass


def other_reward(completions, **kwargs):
    return [len(set(text)) / 9 - 1 for text in completions]


def lora(**kwargs):
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **kwargs})


def with_adapter(seed):
    model = tiny_llama()
    torch.manual_seed(seed)
    return get_peft_model(model, lora(init_lora_weights=False))


def texts(seed=0):
    return Dataset.from_dict({"text": [f"{row['prompt']}{row['chosen']}" for row in pairs(seed=seed)]})


# Trainer → its class, its configuration, its arguments, and functions that make other arguments
TRAINERS = {
    "ppo": (
        PPOTrainer,
        functools.partial(tiny_config, kl_controller="adaptive", gradient_accumulation_steps=2),
        {
            "model": tiny_llama,
            "reward_funcs": lambda: [letters_reward, tiny_reward_model(tiny_llama())],
            "train_dataset": prompts,
            "processing_class": tiny_tokenizer,
            "reward_processing_classes": lambda: [None, tiny_tokenizer()],
        },
        {
            "model": lambda: tiny_llama(seed=1),
            "model's class": ("model", tiny_gpt2),
            "reward_funcs": lambda: [other_reward, tiny_reward_model(tiny_llama())],
            "order of rewards": ("reward_funcs", lambda: [tiny_reward_model(tiny_llama()), letters_reward]),
            "ref_model": lambda: tiny_llama(seed=1),
            "train_dataset": lambda: prompts(seed=1),
            "order of rows": ("train_dataset", lambda: prompts().select(range(15, -1, -1))),
            "a column": ("train_dataset", lambda: prompts().map(lambda row: {"topic": "one"})),
            "peft_config": lora,
        },
    ),
    "dpo": (
        DPOTrainer,
        lambda folder, **kwargs: DPOConfig(
            str(folder), **{**QUIET, "record_run": False, "beta_controller": "drift", "drift_target": 1.0, **kwargs}
        ),
        {"model": lambda: with_adapter(0), "train_dataset": pairs, "processing_class": tiny_tokenizer},
        {
            "model": lambda: with_adapter(1),
            "peft_config": ("model", lambda: get_peft_model(tiny_llama(), lora(lora_dropout=0.5))),
            "base": ("model", lambda: get_peft_model(tiny_llama(seed=1), lora(init_lora_weights=False))),
            "no adapter": ("model", tiny_llama),
            "train_dataset": lambda: pairs(seed=1),
        },
    ),
    "sft": (
        FineTuning,
        lambda folder, **kwargs: SFTConfig(str(folder), **{**QUIET, **kwargs}),
        {"model": tiny_llama, "train_dataset": texts, "processing_class": tiny_tokenizer},
        {
            "model": lambda: tiny_llama(seed=1),
            "peft_config": lora,
            "train_dataset": lambda: texts(seed=1),
            "run_facts": lambda: {"packed": True},
        },
    ),
}

# Fields for a machine or a service that tests do not have
ELSEWHERE = {
    *("accelerator_config", "ddp_backend", "deepspeed", "fsdp", "fsdp_config", "hub_model_id", "parallelism_config"),
    *("push_to_hub", "report_to", "use_cpu", "output_dir", "resume_from_checkpoint", "resume_anyway"),
}
OTHER = {  # fields whose type does not show their other values
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim": "sgd",
    "optim_args": "foo=1",
    "eval_strategy": "no",
    "logging_strategy": "epoch",
    "log_level": "error",
    "log_level_replica": "error",
    "save_strategy": "epoch",
    "loss_type": ["ipo"],
    "reward_weights": [0.5, 0.25],
    "model_init_kwargs": {"dtype": "bfloat16"},
    "generation_kwargs": {"min_p": 0.3},
    "chat_template_kwargs": {"x": 1},
    "ld_alpha": 0.5,
    "padding_free": False,
}


def other_value(value, hint):
    """Another value of a field; None if its type does not show one."""
    choices = [a for a in _leaves(hint) if a != value] if "Literal" in str(hint) else []
    if choices:
        return choices[0]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 or 0.25
    if isinstance(value, str):
        return f"{value}x"
    kinds = _leaves(hint)
    return next((sample for kind, sample in ((bool, True), (int, 3), (float, 0.5), (str, "x")) if kind in kinds), None)


def _leaves(hint):
    inner = typing.get_args(hint)
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [hint]


def made(name, folder, changed_inputs=None, **config):
    cls, make_config, inputs, _ = TRAINERS[name]
    given = {**inputs, **(changed_inputs or {})}
    torch.manual_seed(99)
    return cls(args=make_config(folder, **{**HALF, **config}), **{key: make() for key, make in given.items()})


@pytest.fixture(scope="module", params=TRAINERS)
def run(request, tmp_path_factory):
    """A trainer's name, its checkpoint at half of the steps, and its final weights."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer = made(request.param, folder)
    trainer.train()
    return request.param, folder / "checkpoint-4", weights(trainer)


def outcome(name, checkpoint, tmp_path, capsys, changed_inputs=None, **config):
    """What the resumed run reports, why it is refused, or its final weights."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder / checkpoint.name)
    capsys.readouterr()  # left by an earlier run
    try:
        trainer = made(name, folder, changed_inputs, **config)
        trainer.train(True)
    except Exception as error:  # any error is no silent change
        return f"refused: {error}"
    said = re.search("was written with other settings: .*", capsys.readouterr().out)
    return said[0] if said else weights(trainer)


def test_any_setting(run, tmp_path, subtests, capsys):
    """A compared setting is reported. The rest are changed in groups, and one by one where the end differs."""
    name, checkpoint, end = run
    config = TRAINERS[name][1](tmp_path, **HALF)
    hints = typing.get_type_hints(type(config))
    # Fields of all trainers are changed only in SFT
    known = {field.name for field in dataclasses.fields(TrainingArguments)} if name != "sft" else set()
    silent = {}
    for field in dataclasses.fields(config):
        if not field.init or field.name in ELSEWHERE | known or "vllm" in field.name:
            continue
        value = OTHER.get(field.name, other_value(getattr(config, field.name), hints[field.name]))
        if value is None or value == getattr(config, field.name):
            continue
        try:
            other = TRAINERS[name][1](tmp_path, **HALF | {field.name: value})
        except Exception:  # refused
            continue
        if not differences(fingerprint(config), fingerprint(other)):
            silent[field.name] = value
    assert silent

    def is_as_before(**changed):
        result = outcome(name, checkpoint, tmp_path, capsys, **changed)
        return result if isinstance(result, str) else all(torch.equal(result[key], end[key]) for key in end)

    for first in range(0, len(silent), 8):
        several = dict([*silent.items()][first : first + 8])
        if is_as_before(**several) is not True:
            for field, value in several.items():
                with subtests.test(field=field, value=value):
                    assert is_as_before(**{field: value})


def test_any_input(run, tmp_path, subtests, capsys):
    name, checkpoint, end = run
    for what, change in TRAINERS[name][3].items():
        argument, make = change if isinstance(change, tuple) else (what, change)
        with subtests.test(changed=what):
            result = outcome(name, checkpoint, tmp_path, capsys, {argument: make})
            assert isinstance(result, str), result
            assert ("refused" in result) == (argument in ("model", "ref_model", "peft_config")), result
    assert_close(outcome(name, checkpoint, tmp_path, capsys), end, rtol=0, atol=0)


def test_the_best_checkpoint_moves_with_its_folder(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    made("sft", tmp_path / "here", {"eval_dataset": texts}, **best).train()
    (tmp_path / "here").rename(tmp_path / "there")
    moved = made("sft", tmp_path / "there", {"eval_dataset": texts}, **best)
    moved.train(True)
    assert moved.state.best_model_checkpoint.startswith(str(tmp_path / "there"))


DAMAGES = {
    "missing": lambda path, data: path.unlink(),
    "empty": lambda path, data: path.write_bytes(b""),
    "cut off": lambda path, data: path.write_bytes(data[: len(data) // 2]),
}
