"""Policy and critic behind one forward: padding and checkpointing."""

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import TrainerCallback

from tests.tiny import tiny_gpt2, tiny_llama, tiny_ppo, tiny_reward_model

BUILDERS = {"gpt2": tiny_gpt2, "llama": tiny_llama}
EQUAL = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=BUILDERS)
def build(request):
    return BUILDERS[request.param]


def make(tmp_path, policy, **given):
    return tiny_ppo(tmp_path, policy, **{"value_model": tiny_reward_model(policy, seed=2)} | given)


# ---- Padding ----


def test_a_left_padded_row_equals_the_row_alone(tmp_path, build):
    """In log-probs of policy and reference, and in values."""
    trainer = make(tmp_path, build(), ref_model=build(seed=7), temperature=0.7)
    width = 4  # response tokens, at the right end
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(6, 26, (n,), generator=generator) for n in (5, 8, 13, 20)]

    @torch.no_grad()
    def through_trainer(ids, mask):
        lengths = [(n - width, width) for n in mask.sum(1).tolist()]
        policy = trainer._passes(trainer.model, ids, lengths, width, with_values=True, with_entropies=True)
        reference = trainer._passes(trainer.ref_model, ids, lengths, width, size=3)
        return torch.stack([*(policy[name] for name in ("logprobs", "entropies", "values")), reference["logprobs"]])

    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(20) >= 20 - lengths[:, None]).long()
    padded = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.cat(rows))
    garbage = torch.where(mask.bool(), padded, 17)
    together = through_trainer(padded, mask)
    assert_close(through_trainer(garbage, mask), together, **EQUAL)
    for i, row in enumerate(rows):
        alone = through_trainer(row[None], torch.ones(1, len(row), dtype=torch.long))
        assert_close(together[:, i], alone[:, 0], **CLOSE)
        # and the row alone equals the models by themselves, without mask and positions
        with torch.no_grad():
            logits = trainer.model.policy(input_ids=row[None]).logits[0, -width - 1 : -1] / 0.7
            values = trainer.model.critic.base_model(input_ids=row[None]).last_hidden_state[0, -width - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, row[-width:, None]).squeeze(1)
            assert_close(alone[0, 0], expected, **CLOSE)
            assert_close(alone[2, 0], trainer.model.critic.score(values).squeeze(1), **CLOSE)


# ---- The wrapper as a model ----


class KeepGradients(TrainerCallback):
    def __init__(self, into):
        self.into = into

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.into.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_does_not_change_the_gradients(tmp_path, build, use_reentrant, monkeypatch):
    """And it is on: both backbones run their layers through `torch.utils.checkpoint`, in training only."""
    calls, checkpoint = [], transformers.modeling_utils.checkpoint
    monkeypatch.setattr(
        transformers.modeling_utils, "checkpoint", lambda *args, **kw: calls.append(args) or checkpoint(*args, **kw)
    )
    gradients, counts = [], []
    for on in (False, True):
        calls.clear()
        trainer = make(
            tmp_path / str(on),
            build(),
            activation_checkpointing=on,
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=0.0,
        )
        gradients.append({})
        trainer.add_callback(KeepGradients(gradients[-1]))
        trainer.train()
        counts.append(len(calls))
    assert counts == [0, 4]  # two layers each of policy and critic, one micro-batch, none in the rollout
    for role in ("policy", "critic"):
        assert sum(g.abs().max() > 0 for name, g in gradients[0].items() if name.startswith(role)) > 20
    assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)
