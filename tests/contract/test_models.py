"""The models' forward, heads and activation checkpointing."""

import inspect
import math

import pytest
import torch

from tests.contract.observed import require
from tests.tiny import tiny_gpt2, tiny_llama, tiny_reward_model
from trl_ext.upstream import names as upstream


def test_fused_lm_head():
    model = tiny_llama().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    labels = torch.tensor([[-100, -100, 7, 8]])
    want = (model(ids).logits[0] / 0.7).log_softmax(-1)
    upstream.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    reader = "`ActorCritic.forward`, and copying a policy,"
    require("forward" in vars(model), "the fused head is no patch of the instance's `forward`", reader)
    output = model(ids, labels=labels, fused_lm_head=True)
    for name in ("log_probs", "entropy", "aux_loss"):
        require(hasattr(output, name), f"its output has no `{name}`", reader)
    got, expected = output.log_probs[0], [0.0, want[1, 7].item(), want[2, 8].item()]
    require(
        len(got) == 3 and all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(got.tolist(), expected, strict=True)),
        f"log-probs are {got.tolist()}, by hand {expected}",
        reader,
    )


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_models(build):
    policy, reward = build().eval(), tiny_reward_model(build()).eval()
    reader = "`ActorCritic`"
    require("position_ids" in inspect.signature(type(policy).forward).parameters, "no `position_ids`", reader)
    require(isinstance(reward.score, torch.nn.Linear), "a sequence classifier has no linear `score`", reader)
    require(getattr(reward, reward.base_model_prefix) is reward.base_model, "`base_model_prefix` moved", reader)
    ids = torch.tensor([[5, 6]])
    hidden = reward.base_model(input_ids=ids, use_cache=False).last_hidden_state
    same = torch.allclose(reward.score(hidden)[0, -1], reward(ids).logits[0], atol=1e-6)
    require(same, "the classifier's score is not `score(last hidden state)`", reader)
    policy.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    require(policy.is_activation_checkpointing and policy.is_gradient_checkpointing, "it is not switched on", reader)
    policy.activation_checkpointing_disable()
    require(not policy.is_activation_checkpointing, "checkpointing is not switched off", reader)
    require(upstream.get_config_model_id(policy.config) == "", "a model built in memory has a name")


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_checkpointed_layers_call_one_function(build):
    """`AdapterSwitch._pin_checkpointing` wraps that function."""
    model, calls, reader = build().train(), [], "`AdapterSwitch`"

    def recorded(function, *args, **kwargs):
        calls.append(function)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    def set_recorded(enable=True, gradient_checkpointing_func=None, **kwargs):
        set_checkpointing(enable=enable, gradient_checkpointing_func=recorded, **kwargs)

    set_checkpointing = model._set_gradient_checkpointing
    model._set_gradient_checkpointing = set_recorded
    model.activation_checkpointing_enable()
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    require(len(calls) == 2, f"{len(calls)} of 2 layers called the function given to it", reader)
    functions = [getattr(m, "_gradient_checkpointing_func", recorded) for m in model.modules()]
    require(all(f is recorded for f in functions), "layers keep the function under another name", reader)
