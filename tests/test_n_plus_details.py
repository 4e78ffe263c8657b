"""
"The N+ Implementation Details of RLHF with PPO" (Huang et al. 2024, arXiv:2403.17031), item by item, on real rollouts
and optimizer steps of PPOTrainer, against references that are slow: one row at a time, unpadded, in float64.

The paper's items that are not here:
- its data (TL;DR queries cut at the last newline, a leading space before completions, lengths of the SFT and
  preference sets, filtering of validation data, tokenising in advance): a user prepares the prompts;
- the SFT loss, and that SFT and reward model learn to end by EOS: `trl.SFTTrainer` and `trl.RewardTrainer`;
- the reward head's initial standard deviation 1/√(d + 1), and training it on the EOS position only: the reward recipe;
- padding a rollout to a fixed number of tokens: responses stop at EOS here, and nothing counts padding;
- the score of what does not end by EOS, the KL penalty per token with the score on the last one, and whitened rewards
  are in tests/ppo/test_rewards.py; the clipped losses, the temperature in every log-prob and the log-probs of padded
  rows in test_metrics.py and test_old_logprobs.py; EOS that is trained on where it is the pad token, too, in
  test_bad_input.py; the new order of each pass over the prompts in test_resume.py;
- the same schedule, batch size and learning rate at every model size, and judging by a stronger model: choices of a
  run. (Its linear decay is here.)
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.tiny import (
    collected,
    length_reward,
    prompts,
    tiny_gpt2,
    tiny_llama,
    tiny_ppo,
    tiny_reward_model,
    tiny_tokenizer,
)
from trl_ext import PPOTrainer

EOS = 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class RecordingTrainer(PPOTrainer):
    """
    Keeps each rollout as a list of rows, with score and values computed for the row alone, without padding; and each
    minibatch.
    """

    def _generate_and_score_completions(self, inputs):
        seen = collected(self)
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            rows = alone(self.model.critic, output)
            for i, row in enumerate(rows):
                row["score"] = seen[-1].rewards_per_func[i, 0].item()
                row["ended"] = row["ids"][-1] == EOS
            self.rollouts.append((output, rows))
        return output

    def _compute_loss(self, model, inputs):
        self.minibatches.append(inputs)
        return super()._compute_loss(model, inputs)


def alone(critic, batch):
    rows = []
    for i, mask in enumerate(batch["completion_mask"].bool()):
        response = batch["completion_ids"][i][mask].tolist()
        ids = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist() + response
        rows.append({"ids": ids, "length": len(response), "values": alone_values(critic, ids, len(response))})
    return rows


@torch.no_grad()
def alone_values(critic, ids, length):
    """V(s_t): the critic's output after prompt and response[:t], by a forward that sees no more than these."""
    start = len(ids) - length
    return [critic(input_ids=torch.tensor([ids[:t]])).logits[0, 0].item() for t in range(start, len(ids))]


def flat(rows, name):
    return torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64)


def real(batch, name):
    return batch[name][batch["completion_mask"].bool()].double()


def make(tmp_path, model=None, reward_funcs=length_reward, train_dataset=None, **given):
    """A trainer whose reference differs from its policy, and whose critic's head is not zero."""
    model = tiny_gpt2() if model is None else model
    critic = tiny_reward_model(model, seed=2)
    reference = tiny_gpt2(seed=7) if model.config.model_type == "gpt2" else tiny_llama(seed=7)
    defaults = {
        "temperature": 0.7,
        "max_steps": 1,
        "baseline": "critic",
        "value_model": critic,
        "ref_model": reference,
    }
    defaults["train_dataset"] = train_dataset or prompts()
    trainer = tiny_ppo(tmp_path, model, reward_funcs, RecordingTrainer, **defaults | given)
    trainer.rollouts, trainer.minibatches = [], []
    return trainer


def often_ending(model):
    """Make EOS likely, so that rollouts have finished and truncated completions."""
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[EOS] = 1.5
    model.lm_head = head
    return model


# ---- Set-up ----


@pytest.mark.slow
@pytest.mark.parametrize("disable_dropout", [True, False])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_detail_disable_dropout(tmp_path, build, disable_dropout):
    """With dropout in every config, rollout and training forward agree exactly only if it is switched off."""
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if build is tiny_gpt2 else {}
    rates = rates or {"attention_dropout": 0.5}
    policy = build(**rates)
    trainer = make(
        tmp_path,
        policy,
        tiny_reward_model(policy, seed=3),
        disable_dropout=disable_dropout,
        num_mini_batches=1,
        per_device_train_batch_size=8,
        max_completion_length=5,
        ref_model=build(seed=7, **rates),
    )
    trainer.train()
    ids = torch.tensor([[6, 7, 8, 9]])
    roles = (
        trainer.model.policy,
        trainer.model.critic,
        trainer.ref_model,
        trainer.reward_funcs[0].function.score.args[0],
    )
    with torch.no_grad():
        agree = [torch.equal(role.train()(ids).logits, role.train()(ids).logits) for role in roles]
    assert agree == [disable_dropout] * 4
    difference = trainer.state.log_history[0]["policy/approxkl_avg"]
    assert (difference < 1e-10) if disable_dropout else (difference > 1e-3)


# ---- Rollout ----


def test_detail_value_and_reward_read_the_right_token(tmp_path):
    """
    Each value is the critic's output at the token *before* the one that is chosen; the score is the reward model's
    output at the last real token, EOS if there is one, though the rows are padded and are scored in one batch.
    """
    policy = often_ending(tiny_gpt2())
    reward = tiny_reward_model(policy, seed=3)
    trainer = make(tmp_path, policy, reward)
    trainer.train()
    rollout, rows = trainer.rollouts[0]
    assert {row["ended"] for row in rows} == {True, False}
    assert_close(real(rollout, "old_values"), flat(rows, "values"), **CLOSE)
    with torch.no_grad():
        scores = []
        for row in rows:
            hidden_states = reward.transformer(input_ids=torch.tensor([row["ids"]])).last_hidden_state
            scores.append(reward.score(hidden_states[0, -1]).item())
    assert_close(torch.tensor([row["score"] for row in rows]), torch.tensor(scores), **CLOSE)


# ---- Reward ----


def test_detail_reward_normalization_reference_demonstrations_score_zero(tmp_path, token_rewards):
    """A bias for all completions that makes the demonstrations' mean score 0."""
    dataset = prompts().add_column("completion", [f"the {'cat ' * (i % 4)}sat" for i in range(16)])
    policy = tiny_gpt2()
    reward = tiny_reward_model(policy, seed=3)
    trainer = make(tmp_path, policy, reward, dataset, reward_normalization="reference", kl_coef=0.0)
    trainer.train()
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        demonstrations = [
            reward(input_ids=torch.tensor([tokenizer(f"{row['prompt']} {row['completion']}").input_ids + [EOS]]))
            .logits.double()
            .item()
            for row in dataset
        ]
    bias = sum(demonstrations) / len(demonstrations)
    _, rows = trainer.rollouts[0]
    expected = torch.tensor([row["score"] - bias for row in rows])
    assert expected.abs().max() > 0.01 and abs(bias) > 0.01
    assert_close(token_rewards[0].sum(1), expected, **CLOSE)


# ---- Advantages and loss ----


def slow_gae(rewards, values, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t, by the sum itself (arXiv:1506.02438, equation 16)."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def test_detail_gae_and_whitened_advantages(tmp_path, token_rewards):
    """Mean 0 and deviation 1 over the rollout's real tokens, not per minibatch; the returns are of the raw ones."""
    trainer = make(tmp_path, often_ending(tiny_gpt2()), gamma=0.9, lam=0.8, lam_value=0.3)
    trainer.train()
    rollout, rows = trainer.rollouts[0]

    def raw(lam):
        given = ((token_rewards[0][i, : row["length"]].tolist(), row["values"]) for i, row in enumerate(rows))
        return torch.tensor([a for each in given for a in slow_gae(*each, 0.9, lam)], dtype=torch.float64)

    expected = (raw(0.8) - raw(0.8).mean()) / raw(0.8).std(correction=1)
    assert_close(real(rollout, "advantages"), expected, **CLOSE)
    assert_close(real(rollout, "returns"), raw(0.3) + flat(rows, "values"), **CLOSE)
    assert (rollout["advantages"][~rollout["loss_mask"].bool()] == 0).all()


@pytest.mark.slow
def test_detail_minibatch_permutation_covers_each_row_once_per_epoch(tmp_path):
    trainer = make(tmp_path, max_steps=24, num_ppo_epochs=3, num_mini_batches=4, per_device_train_batch_size=2)
    trainer.train()
    orders = []
    for i, (rollout, _) in enumerate(trainer.rollouts):
        row_of = {tuple(returns): row for row, returns in enumerate(rollout["returns"].tolist())}
        assert len(row_of) == 8
        for epoch in range(3):
            batches = trainer.minibatches[12 * i + 4 * epoch : 12 * i + 4 * epoch + 4]
            orders.append([row_of[tuple(r)] for inputs in batches for r in inputs["returns"].tolist()])
    assert len(orders) == 6 and all(sorted(order) == list(range(8)) for order in orders)
    in_each = [tuple(frozenset(order[k : k + 2]) for k in range(0, 8, 2)) for order in orders]  # for any lengths
    assert len(set(in_each)) == 6
