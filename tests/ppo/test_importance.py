"""Completions of another sampler: the gradient by hand, the logs, and no silent training without a correction."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.ppo.worker import CORRECTED
from tests.tiny import collected, prompts, scripted, skewed, tiny_gpt2, tiny_ppo

MODES = {
    "none": {"importance_sampling_mode": "none", "allow_off_policy_sampling": True},
    "token_truncate": {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 1.2},
    "token_mask": CORRECTED,
    "sequence_truncate": {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.2},
    "sequence_mask": {**CORRECTED, "importance_sampling_mode": "sequence_mask"},
}


def weight_by_hand(mode, logprobs, sampler_logprobs):
    ratio = np.exp(logprobs - sampler_logprobs)
    if mode.startswith("sequence"):
        ratio = np.full_like(ratio, np.exp((logprobs - sampler_logprobs).sum()))
    if mode.endswith("truncate"):
        return np.minimum(ratio, 1.2)
    return ratio * ((ratio >= 0.7) & (ratio <= 1.5)) if mode != "none" else np.ones_like(ratio)


def first_minibatch(tmp_path, mode, **config):
    """The trainer after a rollout, its rollout, its rows, and the gradient of the first minibatch."""
    trainer = skewed(tiny_ppo(tmp_path, tiny_gpt2(), temperature=0.8, **MODES[mode], **config))
    seen = collected(trainer)
    rows = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(8)])
    for batch in trainer._micro_batches(rows, 0)[: trainer.args.gradient_accumulation_steps]:
        trainer._compute_loss(trainer.model, batch).backward()
    return trainer, seen[0], rows, {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.slow if mode not in ("token_truncate", "sequence_truncate") else ())
        for mode in MODES
    ],
)
def test_the_gradient_is_the_weighted_one(mode, tmp_path):
    """The policy's, row by row, is −Σ w A ∇ log π / N; the critic's has no weights."""
    size = {"per_device_train_batch_size": 8, "num_mini_batches": 1}
    trainer, rollout, rows, gradients = first_minibatch(tmp_path, mode, **size)
    trainer.model.zero_grad()
    count, seen, loss = rollout.mask.sum(), [], 0.0
    for i, n in enumerate(rollout.lengths.int().tolist()):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()]
        ids = torch.cat([prompt, rollout.completion_ids[i, :n]])
        logits = trainer.model.policy(input_ids=ids[None]).logits[0, -n - 1 : -1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[-n:, None]).squeeze(1)
        sampler_logprobs = rollout.sampler_logprobs[i, :n].double().numpy()
        seen.append(weight_by_hand(mode, logprobs.detach().double().numpy(), sampler_logprobs))
        loss = loss - (torch.tensor(seen[-1]) * rows["advantages"][i, :n] * logprobs).sum() / count
    loss.backward()
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if name.startswith("policy.")}
    actual = {name: gradients[name] for name in expected}
    assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert mode == "none" or np.mean(np.concatenate(seen) != 1.0) > 0.1

    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_mini_batches": 1}
    *_, in_parts = first_minibatch(tmp_path, mode, **parts)
    assert_close(in_parts, gradients, rtol=1e-4, atol=1e-6)
    *_, unweighted = first_minibatch(tmp_path, "none", **size)
    for name in gradients.keys() - expected.keys():
        assert_close(gradients[name], unweighted[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "mode", ["token_mask", *(pytest.param(m, marks=pytest.mark.slow) for m in MODES if m != "token_mask")]
)
def test_logs_agree_with_the_rollout(mode, tmp_path):
    config = {"max_steps": 8, "logging_steps": 4, "learning_rate": 1e-4, **MODES[mode]}
    trainer = skewed(tiny_ppo(tmp_path, **config), spread=0.2)
    seen = collected(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "objective/kl" in log]
    assert len(logs) == len(seen) == 2
    for log, rollout in zip(logs, seen, strict=True):
        mask = rollout.mask.bool()
        differences = (rollout.sampler_logprobs - rollout.logprobs)[mask].double().numpy()
        expected = {
            "sampling/logprob_difference": differences.mean(),
            "sampling/logprob_difference_max": abs(differences).max(),
            "sampling/kl": (np.exp(-differences) - 1 + differences).mean(),
        }
        if mode != "none":
            columns = [t.double().numpy() for t in (rollout.logprobs, rollout.sampler_logprobs)]
            rows = [weight_by_hand(mode, *(column[i][m] for column in columns)) for i, m in enumerate(mask.numpy())]
            used = np.array([row[0] for row in rows]) if mode.startswith("sequence") else np.concatenate(rows)
            differs = used == 1.2 if mode.endswith("truncate") else used == 0
            expected |= {
                "sampling/importance_sampling_ratio/mean": used.mean(),
                "sampling/importance_sampling_ratio/min": used.min(),
                "sampling/importance_sampling_ratio/max": used.max(),
                "sampling/ess": used.sum() ** 2 / (len(used) * (used**2).sum()),
                "sampling/clipfrac": differs.mean(),
            }
        assert {name for name in log if name.startswith("sampling/")} == expected.keys()
        assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_corrected_rollout_is_right_on_average(tmp_path):
    """With TRL's own sampler: E[π/μ] is 1 at another temperature, and with top-k the probability of the top k."""

    def first_tokens(**config):
        config = {"per_device_train_batch_size": 128, "rows": 256, "max_completion_length": 1, **config}
        trainer = tiny_ppo(tmp_path, tiny_gpt2(), **config)
        seen = collected(trainer)
        torch.manual_seed(0)
        rows = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(256)])
        return rows["importance_weights"].squeeze(1).double(), seen[0], trainer.model.policy

    weights, *_ = first_tokens(generation_kwargs={"temperature": 0.5}, importance_sampling_clip_max=1e6)
    assert weights.std() > 0.1
    assert abs(weights.mean() - 1) < 4 * weights.std() / len(weights) ** 0.5
    weights, rollout, policy = first_tokens(top_k=5)
    for i in range(0, 256, 16):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()]
        with torch.no_grad():
            share = policy(input_ids=prompt[None]).logits[0, -1].softmax(-1).topk(5).values.sum()
        assert_close(weights[i], share.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_ppos_ratio_may_be_that_to_the_sampler(tmp_path):
    """`old_logprobs: sampler`: no forward pass, no weights, and the ratio is π/μ from the start."""
    config = {"allow_off_policy_sampling": True, "max_steps": 1}
    trainer = skewed(tiny_ppo(tmp_path, old_logprobs="sampler", **config))
    other = skewed(tiny_ppo(tmp_path, importance_sampling_mode="none", **config))
    seen = collected(trainer), collected(other)
    trainer.train()
    other.train()
    assert "importance_weights" not in trainer._buffered_inputs[0]
    (rollout,), (known,) = seen
    assert_close(rollout.logprobs, known.sampler_logprobs, rtol=0, atol=0)
    log, batch = trainer.state.log_history[0], trainer._buffered_inputs[0]
    differences = (known.sampler_logprobs - known.logprobs)[batch["row"]][batch["loss_mask"].bool()].double().numpy()
    assert log["val/ratio"] == pytest.approx(np.exp(-differences).mean(), rel=1e-4)
    assert log["sampling/logprob_difference"] == pytest.approx(differences.mean(), rel=1e-3, abs=1e-6)
    assert log["sampling/kl"] == pytest.approx((np.exp(-differences) - 1 + differences).mean(), rel=1e-3)


def edited(trainer):
    """Completions that a subclass changes after sampling."""
    skewed(trainer)
    trainer._generate_completions = trainer._generate_single_turn
    del trainer._generate_single_turn  # the class's own, which records the sampled tokens
    generate = trainer._generate_single_turn

    def changed(*args):
        answers, logprobs = generate(*args)
        return [[*ids[:-1], 9] for ids in answers], logprobs

    trainer._generate_single_turn = changed
    return trainer


@pytest.mark.parametrize(
    ("answering", "config"),
    [
        (scripted, CORRECTED),
        (edited, {"top_k": 5}),
        (lambda trainer: skewed(trainer, spread=math.nan), MODES["none"] | {"old_logprobs": "sampler"}),
    ],
    ids=["none", "of other tokens", "NaN"],
)
@pytest.mark.slow
def test_log_probs_that_are_missing_end_a_run_that_needs_them(answering, config, tmp_path):
    trainer = answering(tiny_ppo(tmp_path, eval_dataset=prompts(4), **config))
    trainer.evaluate()  # trains nothing
    with pytest.raises(RuntimeError, match="log-probs are missing, or do not belong to the completions' tokens"):
        trainer.train()
    assert trainer.state.global_step == 0
    without = answering(tiny_ppo(tmp_path, max_steps=1, **MODES["none"]))
    without.train()
    assert not any(name.startswith("sampling/") for log in without.state.log_history for name in log)
