"""Several roles on one base: each computes and learns as a separate model does, and the base does not change."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from tests.ppo.worker import assert_gradients_of_separate_models, gradients, users_model
from tests.tiny import BUILDERS, CHECKPOINTING, lora_configs, randomize, tiny_llama, tiny_lora_ppo, tiny_ppo, weights
from trl_ext.models.adapters import AdapterSwitch, base_fingerprint

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
IDS = torch.tensor([[6, 7, 8, 9, 10], [11, 6, 6, 20, 2]])


def adapter(trainer, name):
    return {n: p for n, p in weights(trainer).items() if name in n.split(".")}


def trainable(trainer):
    """The adapters with all weights trainable, and those with any."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        part = next((a for a in ("default", "critic", "ref", "reward_0") if a in name.split(".")), "base")
        found.setdefault(part, set()).add(parameter.requires_grad)
    return {part: states == {True} for part, states in found.items() if True in states}


def each_checkpointing(quick):
    kinds = [pytest.param(kind, marks=() if kind == quick else pytest.mark.slow) for kind in CHECKPOINTING]
    return pytest.mark.parametrize("checkpointing", kinds)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@each_checkpointing("off")
def test_gradients_are_those_of_separate_models(name, checkpointing, tmp_path):
    assert_gradients_of_separate_models(name, gradients(tmp_path, name, checkpointing))


# ---- The reference ----


def reference_logits(trainer):
    """The logits of PPO's reference pass."""
    trainer.model.eval()
    names = ["ref"] if "ref" in trainer.model.policy.peft_config else []
    with torch.no_grad(), trainer.model.adapters.use(*names):
        return trainer.model.policy(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("is_users", [False, True], ids=["peft_config", "PeftModel"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.extra)])
def test_the_reference_is_never_trained(name, is_users, tmp_path):
    kwargs = {"model": users_model(name), "peft_config": None} if is_users else {}
    trainer = tiny_lora_ppo(
        tmp_path, name, learning_rate=1e-1, weight_decay=0.5, **kwargs, **CHECKPOINTING["non-reentrant"]
    )
    base = {n: p for n, p in weights(trainer).items() if "lora_" not in n and "score" not in n}
    fingerprint, logits = base_fingerprint(trainer.model.policy), reference_logits(trainer)
    reference, start = adapter(trainer, "ref"), adapter(trainer, "default")
    own = {n.replace(".default.", ".ref."): p for n, p in start.items()} if is_users else {}
    assert_close(reference, own, **EXACT)  # the user's initial adapter, if any
    assert trainable(trainer) == {"default": True, "critic": True}

    trainer.train()

    after = weights(trainer)
    assert_close({n: after[n] for n in base}, base, **EXACT)
    assert base_fingerprint(trainer.model.policy) == fingerprint
    assert_close(adapter(trainer, "ref"), reference, **EXACT)
    assert_close(reference_logits(trainer), logits, **EXACT)
    assert trainable(trainer) == {"default": True, "critic": True}
    # The policy is far from it
    with torch.no_grad():
        moved = trainer.model.policy(input_ids=IDS).logits - logits
    assert moved.abs().max() > 0.1
    assert all(not torch.equal(after[n], p) for n, p in start.items())


@pytest.mark.slow
def test_an_optimizer_without_the_critic_is_refused(tmp_path):
    policy = get_peft_model(tiny_llama(), lora_configs()[0])
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    trainer = tiny_ppo(tmp_path, policy, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="trainable weights of the critic are not in the optimizer"):
        trainer.train()


# ---- Weights sent to vLLM ----


class Client:
    """Stands in for the client of a vLLM server: keeps what each weight sync sends, and a separately merged policy."""

    def __init__(self, policy):
        self.policy, self.syncs, self.merged = policy, [], []

    def update_named_params(self, metadata, named_params):
        self.merged.append(
            dict(copy.deepcopy(self.policy).merge_and_unload(adapter_names=["default"]).named_parameters())
        )
        self.syncs.append({name: weight.clone() for name, weight in named_params})
        assert metadata == [(n, str(w.dtype).removeprefix("torch."), list(w.shape)) for n, w in self.syncs[-1].items()]

    def reset_prefix_cache(self):
        pass


class ServerGeneration(VLLMGeneration):
    """TRL's weight sync with that client; each completion is two fixed tokens and EOS."""

    def __init__(self, model, accelerator, generation_kwargs, **kwargs):
        self.model, self.accelerator, self.generation_kwargs = model, accelerator, generation_kwargs or {}
        self.mode, self.vllm_client, self._weight_metadata = "server", Client(model), None
        self._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: contextlib.nullcontext())

    def generate(self, prompts, **kwargs):
        answers = [[6 + len(ids), 20, 2] for ids in prompts]
        return prompts, answers, [[[-1.0]] * 3 for _ in answers], [[[token] for token in ids] for ids in answers]


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", ServerGeneration)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_vllm_gets_the_merged_policy_under_the_base_models_names(name, vllm, tmp_path):
    """In training, with adapters of critic and reference on the base, which keeps its bits."""
    config = {"use_vllm": True, "importance_sampling_mode": "none", "learning_rate": 1e-2, "max_steps": 8}
    trainer = tiny_ppo(tmp_path, users_model(name), **config)
    before, client = weights(trainer), trainer.vllm_generation.vllm_client
    trainer.train()

    base, targets = dict(BUILDERS[name]().named_parameters()), lora_configs(name)[0].target_modules
    for sync, merged in zip(client.syncs, client.merged, strict=True):
        assert list(sync) == list(base)
        assert_close(sync, merged, rtol=1e-6, atol=1e-6)
        changed = {n for n, p in base.items() if not torch.equal(p, sync[n])}
        assert changed == {n for n in base if any(n.endswith(f"{t}.weight") for t in targets)}
    assert len(client.syncs) == 2 and all(not torch.equal(client.syncs[0][n], client.syncs[1][n]) for n in changed)
    after = weights(trainer)
    kept = {n: p for n, p in before.items() if not {"default", "critic"} & set(n.split("."))}
    assert_close({n: after[n] for n in kept}, kept, **EXACT)


@each_checkpointing("off")
def test_under_autocast_adapters_store_no_copy_of_their_inputs(checkpointing, tmp_path, monkeypatch):
    """The same bits of the gradients, from fewer bytes stored for the backward pass."""
    config = {"bf16": True, "max_steps": 1, "num_ppo_epochs": 1, **CHECKPOINTING[checkpointing]}

    def gradients_and_bytes():
        trainer = tiny_lora_ppo(tmp_path, model=tiny_llama().to(torch.bfloat16), **config)
        model, kept = trainer.model.train(), {}
        randomize(model)

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), trainer.accelerator.autocast():
            at = torch.arange(len(IDS[0]) - 1)
            found = model(IDS, predicts=at, targets=IDS[0, 1:], with_values=True)
            loss = found["logprobs"].sum() + found["values"].sum()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], sum(t.nbytes for t in kept.values())

    grads, size = gradients_and_bytes()
    monkeypatch.setattr(AdapterSwitch, "inputs_as_they_are", lambda *_: contextlib.nullcontext())
    cast, larger = gradients_and_bytes()
    assert len(grads) == len(cast) > 0 and all(torch.equal(*pair) for pair in zip(grads, cast, strict=True))
    assert size < larger or checkpointing != "off"


@each_checkpointing("non-reentrant")
def test_under_autocast_adapters_with_dropout_can_be_recomputed(checkpointing, tmp_path):
    peft = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    config = {"bf16": True, "disable_dropout": False, "max_steps": 1, **CHECKPOINTING[checkpointing]}
    trainer = tiny_ppo(tmp_path, tiny_llama().to(torch.bfloat16), peft_config=peft, **config)
    assert trainer.train().global_step == 1
