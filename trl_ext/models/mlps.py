"""Which weights of a model are in its MLPs."""

import re
from collections.abc import Iterable

from torch import nn

# How transformers calls the module between two attentions: Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX, Phi, Falcon
# and most experts have `mlp`; `feed_forward`, `ffn`, `block_sparse_moe` and OPT's `fc1` and `fc2` are other models'
_MLP = re.compile(r"(\w*_)?mlp|feed_?forward|ffn|\w*moe|(\w*_)?experts|fc[12]", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


def is_in_mlp(name: str) -> bool:
    """Return whether a weight of this name is in an MLP, by the names of the modules that it is in."""
    modules = name.split(".")[:-1]
    return any(map(_MLP.fullmatch, modules)) and not any(map(_ATTENTION.search, modules))


def freeze_but_mlps(parameters: Iterable[tuple[str, nn.Parameter]], model: str, advice: str) -> None:
    """
    Freeze what is neither in an MLP nor in the head, `score`; the rest is left as it is.

    Args:
        parameters: of a sequence classifier, with their names.
        model: its name, for the error.
        advice: what to do if there is no MLP, for the error.

    Raises:
        ValueError: no weight that is trained is in an MLP.
    """
    parameters = list(parameters)
    if not any(is_in_mlp(name) and parameter.requires_grad for name, parameter in parameters):
        raise ValueError(f"`critic_trains='mlp'`, but nothing that is trained of {model} is in an MLP: {advice}.")
    for name, parameter in parameters:
        if not is_in_mlp(name) and "score" not in name.split("."):
            parameter.requires_grad_(False)
