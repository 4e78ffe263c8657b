"""Adapters in PEFT: which is active, which is trained, and which is saved."""

import copy
import inspect

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trl import GRPOTrainer

from tests.contract.observed import require
from tests.tiny import tiny_llama
from trl_ext.upstream import names as upstream


def two_adapters():
    """A tiny Llama with adapters `default` and `critic`, neither of them zero."""
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny_llama(), config)
    model.add_adapter("critic", copy.deepcopy(config))
    return model


def test_peft_layers():
    model, reader = two_adapters(), "`AdapterSwitch`"
    ids = torch.tensor([[5, 6, 7]])
    layers = [m for m in model.modules() if isinstance(m, upstream.BaseTunerLayer)]
    require(type(model.get_base_model()).__name__ == "LlamaForCausalLM", "`get_base_model` returns other", reader)
    require(
        len(layers) == 4 and layers[0].active_adapters == ["default"], "the layers' adapter is not 'default'", reader
    )

    def logits(active):
        for layer in layers:
            layer._active_adapter = active
        return model(ids).logits

    with model.disable_adapter():
        base = logits(["default"])
    require(torch.equal(logits([]), base), "no active adapter in a layer is not the base", reader)
    require(
        not torch.equal(logits(["critic"]), base), "`_active_adapter` of a layer does not choose its adapter", reader
    )
    require(layers[0].active_adapters == ["critic"], "`active_adapters` is not `_active_adapter`", reader)
    require(layers[0].disable_adapters is False, "`disable_adapters` does not tell whether it is", reader)
    require(set(layers[0].scaling) == {"default", "critic"}, "`scaling` is not by adapter", "`copy_adapter`")


def test_what_peft_freezes():
    model, reader = two_adapters(), "`ActorCritic`"

    def trained():
        return {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad}

    require(trained() == {"default"}, f"after `add_adapter`, {trained()} are trainable", reader)
    model.set_requires_grad("critic", True)
    require(trained() == {"default", "critic"}, "`set_requires_grad` does not thaw an adapter by name", reader)
    with model.disable_adapter():
        pass
    if trained() == {"default", "critic"}:
        raise AssertionError(
            f"Upstream changed: `disable_adapter` freezes no adapter any more. {reader} can be simpler."
        )


def test_peft_saves_one_adapter(tmp_path):
    two_adapters().save_pretrained(tmp_path, selected_adapters=["default"])
    names = load_file(tmp_path / "adapter_model.safetensors")
    require(
        not (tmp_path / "critic").exists() and not any("critic" in name for name in names),
        "`save_pretrained(selected_adapters=…)` saves other adapters, too",
        "`_save` of PPOTrainer",
    )


def test_grpo_keeps_the_initial_adapter_as_ref():
    require('add_adapter("ref"' in inspect.getsource(GRPOTrainer), "GRPOTrainer adds no adapter `ref`", "`REFERENCE`")
