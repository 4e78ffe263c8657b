"""What a refused resume says: words and counts, never a hash, also of what an earlier trl_ext wrote."""

import re

import pytest
from datasets import Dataset

from tests.ppo.worker import letters_reward, make_trainer
from tests.runs.test_saving import sft
from tests.tiny import length_reward, prompts, tiny_llama, tiny_tokenizer
from trl_ext.runs.changes import differences
from trl_ext.runs.checkpoints import CannotResume
from trl_ext.runs.marker import read_marker, write_marker

A, B = "xxh3:0123456789ab", "xxh3:ba9876543210"
HASH = re.compile(r"xxh3|\b[0-9a-f]{12,}\b")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"lr": 1e-3, "seed": 1}, {"lr": 2e-3, "seed": 1}, ["lr: 0.001 → 0.002"]),
        ({"seed": 1}, {"lr": 2e-3, "seed": 1}, ["lr: None → 0.002"]),
        (
            {"train_rows": 500, "train_data": A},
            {"train_rows": 480, "train_data": B},
            ["the dataset's rows changed (500 rows before, 480 now)"],
        ),
        (
            {"train_rows": 500, "train_data": A},
            {"train_rows": 500, "train_data": B},
            ["the dataset's rows changed (500 rows before and now, but other rows or in another order)"],
        ),
        (
            {"model_config": f"{A} sdpa"},
            {"model_config": f"{A} eager"},
            ["the model's configuration changed (sdpa before, eager now)"],
        ),
        ({"reference": None}, {"reference": A}, ["the reference's weights changed (none before)"]),
        (
            {"adapter default r": 8, "adapter critic r": 8, "adapter critic alpha_pattern": {}},
            {"adapter default r": 16},
            ["adapter 'critic' is gone", "adapter default r: 8 → 16"],
        ),
        ({"labels": ["0123456789abcdef"]}, {"labels": []}, ["labels changed (1 before, 0 now)"]),
        (
            {"rewards": ["x", "y"], "reward x": A, "reward y": A},
            {"rewards": ["x", "z"], "reward x": A, "reward z": A},
            ["reward 2 is now `z`, was `y`"],
        ),
        (
            {"rewards": ["x", "y"], "reward x": f"{A} {A}", "reward y": A},
            {"rewards": ["x"], "reward x": f"{A} {B}"},
            ["reward 1, `x`, has changed: its tokenizer", "reward 2, `y`, is gone"],
        ),
        (
            {"rewards": ["x", "y"], "reward x": f'RemoteReward:{{"weights": "{A}"}}', "reward y": ""},
            {"rewards": ["x", "y"], "reward x": f'RemoteReward:{{"weights": "{B}"}}', "reward y": A},
            [
                "reward 1, `x`, has changed: its weights, source or settings",
                "reward 2, `y`, has changed: its weights, source or settings",
            ],
        ),
    ],
)
def test_each_difference_in_words(before, now, said):
    assert differences(before, now) == said
    assert not differences(now, now)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_gpu_use_cpu_changes_nothing(monkeypatch, has_gpu):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_gpu)
    assert differences({"use_cpu": False}, {"use_cpu": True}) == ["use_cpu: False → True"] * has_gpu


def test_what_is_known_beside_a_hash_is_said():
    names = {"tokenizer": {"tokens": 3, "eos token": "</s>", "chat template": A}, "model": "of another trl_ext"}
    others = {"tokenizer": {"tokens": 4, "eos token": "</s>", "chat template": B, "new": 1}, "model": {"name": "a"}}
    said = differences({"tokenizer": A, "model": A}, {"tokenizer": B, "model": B}, names, others)
    assert said == [
        "the model's weights changed",
        "the tokenizer changed (tokens 3 before, 4 now; another chat template)",
    ]


@pytest.mark.slow
def test_a_run_that_is_started_again_is_refused_in_words(subtests, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make_trainer(tmp_path, [length_reward, letters_reward], **saving).train()
    other = tiny_tokenizer()
    other.chat_template += " "
    for reward, given, message in [
        ([length_reward, letters_reward], {"train_dataset": prompts(24)}, r"rows changed \(16 rows before, 24 now\)"),
        (
            [length_reward, letters_reward],
            {"train_dataset": prompts(24).remove_columns("topic")},
            "24 now; columns prompt, topic before, prompt now",
        ),
        ([length_reward, length_reward], {}, "reward 2 is now `length_reward.*`, was `letters_reward`"),
        ([length_reward], {}, "reward 2, `letters_reward`, is gone"),
        (
            [length_reward, letters_reward],
            {"processing_class": other},
            r"the tokenizer changed \(another chat template",
        ),
    ]:
        with subtests.test(message=message), pytest.raises(CannotResume, match=message) as refused:
            make_trainer(tmp_path, reward, trainer_kwargs=given, **saving).train(True)
        assert not HASH.search(str(refused.value).replace(str(tmp_path), ""))
    with pytest.raises(
        CannotResume, match=r"weights changed.*configuration changed \(intermediate_size 32 before, 48"
    ):
        make_trainer(
            tmp_path, [length_reward, letters_reward], model=tiny_llama(intermediate_size=48), **saving
        ).train(True)


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_trl_ext_is_gone_on_with_and_refused_in_words(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    sft(tmp_path, **saving).train()
    for step in (1, 2):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        marker = read_marker(checkpoint)
        assert marker["names"]["train_data"]["columns"]
        write_marker(checkpoint, marker["configuration"], marker["processes"])
    trainer = sft(tmp_path, **saving)
    trainer.train_dataset = Dataset.from_list(trainer.train_dataset.to_list()[:6])
    with pytest.raises(CannotResume, match=r"the dataset's rows changed \(8 rows before, 6 now\)"):
        trainer.train(True)
    sft(tmp_path, **saving).train(str(tmp_path / "checkpoint-1"))
