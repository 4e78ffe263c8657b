"""Find the weights of a model's MLPs, and freeze the others."""

import re
from collections.abc import Iterable

from torch import nn

# Names of the module between two attentions in transformers: `mlp` in Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX,
# Phi, Falcon and most experts; `feed_forward`, `ffn`, `block_sparse_moe`, and OPT's `fc1` and `fc2` in other models
_MLP = re.compile(r"(\w*_)?mlp|feed_?forward|ffn|\w*moe|(\w*_)?experts|fc[12]", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


def is_in_mlp(name: str) -> bool:
    """Return whether the weight of this dotted name is in an MLP, judged by the names of the modules around it."""
    modules = name.split(".")[:-1]
    return any(map(_MLP.fullmatch, modules)) and not any(map(_ATTENTION.search, modules))


def freeze_but_mlps(parameters: Iterable[tuple[str, nn.Parameter]], model: str, advice: str) -> None:
    """
    Freeze the weights that are neither in an MLP nor in the head, `score`; leave the others as they are.

    Args:
        parameters: names and parameters of a sequence classifier.
        model: how the message names the model.
        advice: what the message says to do if there is no MLP.

    Raises:
        ValueError: no trainable weight is in an MLP.
    """
    parameters = list(parameters)
    if not any(is_in_mlp(name) and parameter.requires_grad for name, parameter in parameters):
        raise ValueError(f"`critic_trains='mlp'`, but no trainable weight of {model} is in an MLP: {advice}.")
    for name, parameter in parameters:
        if not is_in_mlp(name) and "score" not in name.split("."):
            parameter.requires_grad_(False)
