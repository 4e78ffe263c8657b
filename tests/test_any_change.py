"""Whatever is changed before a run goes on: it is refused, or the run ends as if nothing had been changed."""

import dataclasses
import functools
import os
import shutil
import typing

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import TrainingArguments
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.dpo.worker import QUIET, pairs
from tests.ppo.worker import letters_reward
from tests.tiny import prompts, tiny_config, tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import DPOConfig, DPOTrainer, PPOTrainer
from trl_ext.runs.checkpoints import CannotResume, ResumableRun, newest_complete
from trl_ext.runs.marker import write_marker

pytestmark = pytest.mark.slow
HALF = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


class Rewarding(ResumableRun, RewardTrainer):
    pass


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


def with_ends(ids):
    model = tiny_llama()
    model.generation_config.eos_token_id = ids
    return model


def texts(seed=0):
    return Dataset.from_dict({"text": [f"{row['prompt']}{row['chosen']}" for row in pairs(seed=seed)]})


def ranked(seed=0):
    return pairs(seed=seed).select_columns(["prompt", "chosen", "rejected"])


# Trainer → its class, its configuration, and what it is given, each made anew
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
            "model's dropout": ("model", lambda: tiny_llama(attention_dropout=0.5)),
            "model's class": ("model", tiny_gpt2),
            "model's dtype": ("model", lambda: tiny_llama().to(torch.bfloat16)),
            "reward_funcs": lambda: [other_reward, tiny_reward_model(tiny_llama())],
            "reward model": ("reward_funcs", lambda: [letters_reward, tiny_reward_model(tiny_llama(), seed=2)]),
            "order of rewards": ("reward_funcs", lambda: [tiny_reward_model(tiny_llama()), letters_reward]),
            "ref_model": lambda: tiny_llama(seed=1),
            "value_model": lambda: tiny_reward_model(tiny_llama(), seed=3),
            "train_dataset": lambda: prompts(seed=1),
            "order of rows": ("train_dataset", lambda: prompts().select(range(15, -1, -1))),
            "a column": ("train_dataset", lambda: prompts().map(lambda row: {"topic": "one"})),
            "tokenizer": ("processing_class", lambda: _with(tiny_tokenizer(), chat_template="{{ messages }}")),
            "words": ("processing_class", lambda: tiny_tokenizer(["cat", "a", "the", "dog"])),
            "peft_config": lora,
            "tokens that end": ("model", lambda: with_ends([2, 7, 8])),
            "optimizers": lambda: (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), None),
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
            "tokenizer": ("processing_class", lambda: tiny_tokenizer(bos=True)),
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
            "formatting_func": lambda: lambda row: row["text"][:5],
            "compute_loss_func": lambda: (
                lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
            ),
            "data_collator": lambda: DataCollatorForLanguageModeling(pad_token_id=3),
            "run_facts": lambda: {"packed": True},
        },
    ),
    "reward": (
        Rewarding,
        lambda folder, **kwargs: RewardConfig(str(folder), **{**QUIET, **kwargs}),
        {
            "model": lambda: tiny_reward_model(tiny_llama()),
            "train_dataset": ranked,
            "processing_class": tiny_tokenizer,
        },
        {"model": lambda: tiny_reward_model(tiny_llama(), seed=5), "train_dataset": lambda: ranked(seed=1)},
    ),
}

# Fields that choose a machine or a service that is not here
ELSEWHERE = {
    *("accelerator_config", "ddp_backend", "deepspeed", "fsdp", "fsdp_config", "hub_model_id", "parallelism_config"),
    *("push_to_hub", "report_to", "use_cpu", "output_dir", "resume_from_checkpoint", "resume_anyway"),
}
OTHER = {  # fields whose other values cannot be told from the type
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


def _with(thing, **attributes):
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


def other_value(value, hint):
    """Another value of a field; None if its type does not tell one."""
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


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module", params=TRAINERS)
def run(request, tmp_path_factory):
    """A trainer's name, a checkpoint of its half, and the weights it ends with."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer = made(request.param, folder)
    trainer.train()
    return request.param, folder / "checkpoint-3", weights(trainer)


def outcome(name, checkpoint, tmp_path, changed_inputs=None, **config):
    """`refused: …`, or the weights that the run ends with."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder / checkpoint.name)
    try:
        trainer = made(name, folder, changed_inputs, **config)
        trainer.train(True)
    except Exception as error:  # whatever ends the run does not change it in silence
        return f"refused: {error}"
    return weights(trainer)


def test_any_setting(run, tmp_path, subtests):
    name, checkpoint, end = run
    config = TRAINERS[name][1](tmp_path, **HALF)
    hints = typing.get_type_hints(type(config))
    counts = {"refused": 0, "same": 0, "no other value": []}
    known = {field.name for field in dataclasses.fields(TrainingArguments)} if name != "sft" else set()
    if os.environ.get("TRL_EXT_ALL_CASES"):  # else what all share is varied in SFT alone
        known = set()
    for field in dataclasses.fields(config):
        if not field.init or field.name in ELSEWHERE | known or "vllm" in field.name:
            continue
        value = OTHER.get(field.name, other_value(getattr(config, field.name), hints[field.name]))
        if value is None or value == getattr(config, field.name):
            counts["no other value"].append(field.name)
            continue
        with subtests.test(field=field.name, value=value):
            result = outcome(name, checkpoint, tmp_path, **{field.name: value})
            if isinstance(result, str):
                counts["refused"] += 1
                continue
            assert_close(result, end, rtol=0, atol=0)
            counts["same"] += 1
    print(name, counts)


def test_any_input(run, tmp_path, subtests):
    name, checkpoint, end = run
    for what, change in TRAINERS[name][3].items():
        argument, make = change if isinstance(change, tuple) else (what, change)
        with subtests.test(changed=what):
            result = outcome(name, checkpoint, tmp_path, {argument: make})
            assert isinstance(result, str) and "another configuration" in result, result
    assert_close(outcome(name, checkpoint, tmp_path), end, rtol=0, atol=0)
    if name in ("sft", "reward"):  # the others have a setting of that name
        anyway = {"train_dataset": TRAINERS[name][3]["train_dataset"], "resume_anyway": lambda: True}
        assert not isinstance(result := outcome(name, checkpoint, tmp_path, anyway), str), result


def with_optimizer(folder, rate=1e-3, factor=1.0, beta=0.9):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(beta, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)
    given = {"model": lambda: model, "optimizers": lambda: (optimizer, schedule)}
    return made("sft", folder, given)


def test_any_option_of_an_optimizer_that_is_passed_in(tmp_path):
    with_optimizer(tmp_path).train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    for change in ({"rate": 2e-3}, {"factor": 0.5}, {"beta": 0.8}):
        with pytest.raises(CannotResume, match="another configuration"):
            with_optimizer(tmp_path, **change).train(True)
    again = with_optimizer(tmp_path)
    again.train(True)
    assert again.state.global_step == 6


def test_precision_that_the_launcher_says(tmp_path, monkeypatch):
    """`accelerate launch --mixed_precision bf16` is in no argument."""
    made("sft", tmp_path).train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(CannotResume, match="mixed_precision: 'no' → 'bf16'"):
        made("sft", tmp_path).train(True)


def test_the_best_checkpoint_moves_with_its_folder(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    made("sft", tmp_path / "here", {"eval_dataset": texts}, **best).train()
    (tmp_path / "here").rename(tmp_path / "there")
    moved = made("sft", tmp_path / "there", {"eval_dataset": texts}, **best)
    moved.train(True)
    assert moved.state.best_model_checkpoint.startswith(str(tmp_path / "there"))


def test_any_file(run, tmp_path, subtests):
    """A checkpoint with a damaged file is not taken, and the next older one is."""
    _, checkpoint, _ = run
    older = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-3")
    write_marker(str(copy), {}, 1)  # later
    for path in sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "README.md"):
        whole = path.read_bytes()
        for how, damage in DAMAGES.items():
            with subtests.test(file=path.name, how=how):
                damage(path, bytearray(whole))
                found, skipped = newest_complete(str(tmp_path))
                assert found == str(older) and list(skipped) == [str(copy)]
                assert path.name in skipped[str(copy)]
                path.write_bytes(whole)
    assert newest_complete(str(tmp_path)) == (str(copy), {})


def flip(path, data):
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "missing": lambda path, data: path.unlink(),
    "empty": lambda path, data: path.write_bytes(b""),
    "cut off": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "one bit": flip,
    "zeros at the end, as after a loss of power": lambda path, data: path.write_bytes(data[:-9] + bytes(9)),
    "longer": lambda path, data: path.write_bytes(data + b"x"),
}


def test_a_finished_run_is_known_by_its_last_checkpoint_also_where_the_best_one_is_another(tmp_path, capsys):
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the loss falls: step 3's is the best
    first = made("sft", tmp_path, {"eval_dataset": texts}, **best)
    first.train()
    assert first.state.best_global_step == 3
    again = made("sft", tmp_path, {"eval_dataset": texts}, **best)
    again.train(True)
    assert "Training is complete, at step 6" in capsys.readouterr().out
    assert_close(weights(again), weights(first), rtol=0, atol=0)
