"""The reference is the initial policy, wherever its weights came from, and does not change."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from tests.tiny import rows_of, tiny_gpt2, tiny_llama, tiny_ppo, tiny_tokenizer

EQUAL = {"rtol": 0, "atol": 0}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5}


def make(tmp_path, model, **given):
    return tiny_ppo(tmp_path / "output", model, **{"learning_rate": 1e-2, "max_steps": 8} | given)


def kls(trainer):
    """`objective/kl` of each rollout."""
    return [log["objective/kl"] for log in trainer.state.log_history if "objective/kl" in log]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def saved(tmp_path, model):
    model.save_pretrained(tmp_path / "weights")
    tiny_tokenizer().save_pretrained(tmp_path / "weights")
    return str(tmp_path / "weights")


def by_path(tmp_path, build):
    return saved(tmp_path, build())


def in_memory(tmp_path, build):
    return build()


def modified_after_loading(tmp_path, build):
    model = build()
    path = saved(tmp_path, model)
    model = type(model).from_pretrained(path)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    assert model.config._name_or_path == path  # GRPO would load the reference from here
    return model


# ---- Where the reference comes from ----


@pytest.mark.parametrize("build", [pytest.param(tiny_gpt2, marks=pytest.mark.slow), tiny_llama])
@pytest.mark.parametrize(
    "source",
    [*(pytest.param(source, marks=pytest.mark.slow) for source in (by_path, in_memory)), modified_after_loading],
)
def test_the_first_rollouts_kl_is_0_and_the_reference_never_changes(tmp_path, source, build):
    trainer = make(tmp_path, source(tmp_path, build))
    before = weights(trainer.ref_model)
    assert_close(before, weights(trainer.model.policy), **EQUAL)
    trainer.train()
    first, second = kls(trainer)
    assert abs(first) < 1e-5 and abs(second) > 1e-3
    assert_close(weights(trainer.ref_model), before, **EQUAL)
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert not trainer.ref_model.training


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("as_path", [True, False])
def test_a_given_reference_is_used(tmp_path, as_path, lora):
    reference = tiny_llama(seed=7)
    given = saved(tmp_path, reference) if as_path else copy.deepcopy(reference)
    peft_config = LoraConfig(task_type="CAUSAL_LM", **LORA) if lora else None
    trainer = make(tmp_path, tiny_llama(), ref_model=given, peft_config=peft_config, max_steps=1)
    assert_close(weights(trainer.ref_model), weights(reference), **EQUAL)
    assert as_path or trainer.ref_model is given
    trainer.train()
    rollout, kl = rows_of(trainer), 0.0
    for i, mask in enumerate(rollout["completion_mask"].bool()):
        n = int(mask.sum())
        prompt = rollout["prompt_ids"][i][rollout["prompt_mask"][i].bool()]
        ids = torch.cat([prompt, rollout["completion_ids"][i, :n]])
        with torch.no_grad():
            logits = reference(input_ids=ids[None]).logits[0, -n - 1 : -1].double()
        ref_logprobs = logits.log_softmax(-1).gather(1, ids[-n:, None])
        kl += (rollout["old_logprobs"][i, :n].double().sum() - ref_logprobs.sum()).item() / 8
    assert_close(kls(trainer)[0], kl, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_use_ref_model_false_drops_the_reference(tmp_path):
    """No KL is logged, and the weights are those of a run with `kl_coef=0`."""
    without = make(tmp_path, tiny_llama(), kl_coef=0.0, use_ref_model=False)
    assert without.ref_model is None
    without.train()
    assert not any("objective/kl" in log or "objective/kl_per_token" in log for log in without.state.log_history)
    with_reference = make(tmp_path / "with", tiny_llama(), kl_coef=0.0)
    with_reference.train()
    assert_close(weights(without.model), weights(with_reference.model), **EQUAL)


# ---- LoRA ----


def test_an_adapters_reference_has_no_dropout_if_the_policy_has(tmp_path):
    model, peft_config = tiny_llama(attention_dropout=0.5), LoraConfig(**LORA)
    trainer = make(tmp_path, model, peft_config=peft_config, disable_dropout=False, max_steps=1)
    run, seen = trainer._run_reference, []

    def twice(passes):
        seen.extend([run(passes), run(passes)])
        return seen[0]

    trainer._run_reference = twice
    trainer.train()
    assert_close(*seen, **EQUAL)
    assert trainer.model.training
