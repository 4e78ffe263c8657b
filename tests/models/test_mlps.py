import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_ext.models.mlps import freeze_but_mlps, is_in_mlp

SMALL = {"vocab_size": 16, "num_labels": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
MOE = {"num_key_value_heads": 1, "num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 12}
# Kind -> its settings, and the modules of a layer that are trained
KINDS = {
    "llama": ({}, "mlp.down_proj mlp.gate_proj mlp.up_proj"),
    "mistral": ({"num_key_value_heads": 1}, "mlp.down_proj mlp.gate_proj mlp.up_proj"),
    "qwen2": ({"num_key_value_heads": 1}, "mlp.down_proj mlp.gate_proj mlp.up_proj"),
    "gpt_neox": ({}, "mlp.dense_4h_to_h mlp.dense_h_to_4h"),
    "gpt2": ({"n_inner": 12}, "mlp.c_fc mlp.c_proj"),
    "opt": ({"ffn_dim": 12, "word_embed_proj_dim": 8}, "fc1 fc2"),
    "mixtral": (MOE, "mlp.experts mlp.gate"),
    "qwen3_moe": ({**MOE, "head_dim": 4}, "mlp.experts mlp.gate"),
}


def model_of(kind, **settings):
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **SMALL, **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_kind_the_mlps_and_the_head_are_left(kind):
    settings, modules = KINDS[kind]
    model = model_of(kind, **settings)
    freeze_but_mlps(model.named_parameters(), kind, "")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not is_in_mlp(name)} == {"score.weight"}
    expected = {f"layers.{layer}.{module}" for layer in (0, 1) for module in modules.split()}
    layers = {f"layers.{name.replace('.h.', '.layers.').split('layers.')[1]}" for name in trained - {"score.weight"}}
    assert {name.removesuffix(".bias").removesuffix(".weight").split(".gate_up_proj")[0] for name in layers} - {
        f"{module}.down_proj" for module in expected
    } == expected


def test_what_attends_is_no_mlp_whatever_its_parts_are_called():
    assert is_in_mlp("model.layers.0.block_sparse_moe.router.weight") and is_in_mlp("h.1.feed_forward.w1.weight")
    assert is_in_mlp("model.layers.0.mlp.up_proj.lora_A.critic.weight") and is_in_mlp("x.shared_experts.up.weight")
    assert not is_in_mlp("model.layers.0.self_attention.experts.weight") and not is_in_mlp("model.embed_tokens.weight")
    assert not is_in_mlp("model.layers.0.mlp") and not is_in_mlp("model.layers.0.post_attention_layernorm.weight")


def test_a_model_without_mlps_is_refused():
    with pytest.raises(ValueError, match="no trainable weight of Mamba is in an MLP: use 'all'"):
        freeze_but_mlps(
            [("backbone.layers.0.mixer.in_proj.weight", torch.nn.Parameter(torch.ones(1)))], "Mamba", "use 'all'"
        )
