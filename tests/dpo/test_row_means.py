"""The metrics of an evaluation set are means over rows or tokens, whatever the batch; each set has its name."""

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

from tests.tiny import ON_CPU, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.dpo import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig

WORDS = "the cat sat on a mat and saw one dog".split()


def pairs(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def text():
        count = int(torch.randint(1, 9, (), generator=rng))
        return " " + " ".join(WORDS[i] for i in torch.randint(10, (count,), generator=rng))

    return [{"prompt": text(), "chosen": text(), "rejected": text(), "weight": i % 3 / 2} for i in range(rows)]


def trainer_of(kind, folder, rows, batch, **settings):
    torch.manual_seed(0)
    model, args = (
        tiny_llama(),
        {**ON_CPU, "per_device_eval_batch_size": batch, "max_length": 32, "record_run": False} | settings,
    )
    if kind == "dpo":
        reference = tiny_llama(seed=3)
        given = {"ref_model": reference, "args": DPOConfig(str(folder), loss_type=["sigmoid", "sft"], **args)}
        given["args"].loss_weights = [1.0, 0.5]
        trainer = DPOTrainer
    elif kind == "reward":
        model, trainer = tiny_reward_model(model), ResumableRewardTrainer
        given = {"args": RewardConfig(str(folder), use_weight=True, **args)}
    else:
        rows = {
            name: [{"prompt": row["prompt"], "completion": row["chosen"]} for row in each]
            for name, each in rows.items()
        }
        trainer, given = ResumableSFTTrainer, {"args": SFTConfig(str(folder), **args)}
    sets = {name: Dataset.from_list(each) for name, each in rows.items()}
    return trainer(
        model, train_dataset=next(iter(sets.values())), eval_dataset=sets, processing_class=tiny_tokenizer(), **given
    )


KINDS = ("dpo", "reward", "sft")
ROWS = {"one": pairs(7), "two": pairs(3, seed=1)}


TIMES = ("runtime", "per_second", "preparation_time", "num_tokens", "epoch")


def evaluated(trainer):
    trainer.evaluate()
    logs = {k: v for log in trainer.state.log_history for k, v in log.items() if k.startswith("eval_")}
    return {name: value for name, value in logs.items() if not any(each in name for each in TIMES)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_metric_depends_on_the_batch(kind, tmp_path):
    found = [evaluated(trainer_of(kind, tmp_path, ROWS, batch)) for batch in (7, 2)]
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert {name.split("_")[1] for name in found[0]} == {"one", "two"}
    alone = evaluated(trainer_of(kind, tmp_path, {"two": ROWS["two"]}, 2))
    assert_close(alone, {k: v for k, v in found[0].items() if k.startswith("eval_two_")}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_the_rows_of_a_step_have_equal_weight_in_any_micro_batch(kind, tmp_path):
    """The last of seven rows is alone in a micro-batch of two."""
    plain = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "max_steps": 1,
    }
    ends = []
    for batch in (8, 2):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
        trainer = trainer_of(kind, tmp_path, {"one": ROWS["one"]}, 8, **plain, **sizes)
        trainer.train()
        ends.append(dict(trainer.model.named_parameters()))
    assert_close(*ends, rtol=1e-4, atol=1e-5)
