"""Policy and critic behind one forward: padding, delegation, checkpointing, saving."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny import length_reward, prompts, tiny_config, tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import PPOTrainer

BUILDERS = {"gpt2": tiny_gpt2, "llama": tiny_llama}
EQUAL = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=BUILDERS)
def build(request):
    return BUILDERS[request.param]


def make(tmp_path, policy, train_dataset=None, trainer_kwargs=None, **config):
    return PPOTrainer(
        model=policy,
        reward_funcs=length_reward,
        args=tiny_config(tmp_path, **config),
        train_dataset=prompts() if train_dataset is None else train_dataset,
        **{"processing_class": tiny_tokenizer(), "value_model": tiny_reward_model(policy, seed=2)}
        | (trainer_kwargs or {}),
    )


# ---- Padding ----


def test_a_left_padded_row_equals_the_row_alone(tmp_path, build):
    """Log-probs and values of policy and critic, log-probs of the reference."""
    trainer = make(tmp_path, build(), trainer_kwargs={"ref_model": build(seed=7)}, temperature=0.7)
    width = 4  # response tokens, kept at the right end
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
    torch.testing.assert_close(through_trainer(garbage, mask), together, **EQUAL)
    for i, row in enumerate(rows):
        alone = through_trainer(row[None], torch.ones(1, len(row), dtype=torch.long))
        torch.testing.assert_close(together[:, i], alone[:, 0], **CLOSE)
        # and the row alone is what the bare models say, with no mask and no positions
        with torch.no_grad():
            logits = trainer.model.policy(input_ids=row[None]).logits[0, -width - 1 : -1] / 0.7
            values = trainer.model.critic.base_model(input_ids=row[None]).last_hidden_state[0, -width - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, row[-width:, None]).squeeze(1)
            torch.testing.assert_close(alone[0, 0], expected, **CLOSE)
            torch.testing.assert_close(alone[2, 0], trainer.model.critic.score(values).squeeze(1), **CLOSE)


# ---- The wrapper as a model ----


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_leaves_the_gradients_of_both_as_they_are(tmp_path, build, use_reentrant, monkeypatch):
    """And it is really on: both backbones run their layers through `torch.utils.checkpoint`, in training only."""
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
        kept = {}
        trainer._before_step = lambda t=trainer, k=kept: k.update(
            {name: p.grad.clone() for name, p in t.model.named_parameters()}
        )
        trainer.train()
        gradients.append(kept)
        counts.append(len(calls))
    assert counts == [0, 4]  # two layers each of policy and critic, one micro-batch, none in the rollout
    assert all(g.abs().max() > 0 for name, g in gradients[0].items() if "score" in name or "layers" in name)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


# ---- Saving ----


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["from the policy", "from a reward model"])
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered_state_dict"])
def test_saved_policy_and_critic_load_as_plain_models(tmp_path, build, critic, gathered):
    """Also where FSDP or DeepSpeed hand over the state dict of both that they gathered."""
    policy = build()
    value_model = None if critic == "from the policy" else tiny_reward_model(policy, seed=2)
    trainer = make(tmp_path, policy, trainer_kwargs={"value_model": value_model})
    trainer.train()
    if gathered:
        trainer._save(str(tmp_path), state_dict=trainer.model.state_dict())
    else:
        trainer.save_model()

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name: len(keys) for name, keys in info.items()} == dict.fromkeys(info, 0)
    torch.testing.assert_close(loaded.state_dict(), trainer.model.policy.state_dict(), **EQUAL)
    assert type(loaded) is type(policy) and loaded.config.architectures == [type(policy).__name__]

    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert {name: len(keys) for name, keys in info.items()} == dict.fromkeys(info, 0)
    again = make(tmp_path, loaded, trainer_kwargs={"value_model": str(tmp_path / "critic")})
    ids = torch.tensor([[6, 7, 8, 9, 10], [0, 0, 11, 12, 13]])
    mask = (ids != 0).long()
    with torch.no_grad():
        values = [t.model.state_values(ids, mask)[mask.bool()] for t in (trainer, again)]
    torch.testing.assert_close(values[1], values[0], **CLOSE)
    assert values[0].abs().max() > 0  # trained away from the zero head
