"""RewardTrainer with `use_weight` and `use_confidence`."""

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from tests.tiny import ON_CPU, tiny_gpt2, tiny_reward_model, tiny_tokenizer
from trl_ext.dpo import ResumableRewardTrainer, RewardConfig

PAIRS = [("the cat sat", "a dog ran"), ("the bird flew over", "the log"), ("a happy dog", "a sad dog"), ("sky", "mat")]


def rows(**columns):
    chosen, rejected = zip(*PAIRS, strict=True)
    return Dataset.from_dict({"chosen": chosen, "rejected": rejected, **columns})


def trained(tmp_path, data, steps=3, **settings):
    args = RewardConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=steps,
        learning_rate=1e-2,
        record_run=False,
        **ON_CPU,
        **settings,
    )
    given = {"train_dataset": data, "processing_class": tiny_tokenizer()}
    trainer = ResumableRewardTrainer(tiny_reward_model(tiny_gpt2()), args, **given)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_equal_weights_and_full_confidence_change_no_bit(tmp_path):
    data = rows(weight=[1.0] * 4, confidence=[1.0] * 4, margin=[0.5, 0.0, 0.2, 1.0])
    plain = trained(tmp_path, data)
    informed = trained(tmp_path, data, use_weight=True, use_confidence=True)
    other = trained(tmp_path, rows(weight=[0.5, 1.5, 1.0, 1.0], margin=[0.5, 0.0, 0.2, 1.0]), use_weight=True)
    weights = [torch.cat([p.flatten() for p in trainer.model.parameters()]) for trainer in (plain, informed, other)]
    assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0], weights[2])


def test_the_loss_is_the_weighted_mean_of_smoothed_losses(tmp_path):
    data = rows(weight=[0.0, 2.0, 1.0, 0.5], confidence=[1.0, 0.75, 0.5, 0.6], margin=[0.1, 0.2, 0.3, 0.4])
    args = RewardConfig(str(tmp_path), use_weight=True, use_confidence=True, **ON_CPU)
    trainer = ResumableRewardTrainer(
        tiny_reward_model(tiny_gpt2()), args, train_dataset=data, processing_class=tiny_tokenizer()
    )
    trainer.model.eval()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    chosen, rejected = outputs.logits.squeeze(-1).double().chunk(2)
    z, c, w = chosen - rejected - batch["margin"], batch["confidence"], batch["weight"]
    expected = (w * -(c * logsigmoid(z) + (1 - c) * logsigmoid(-z))).sum() / 4
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
