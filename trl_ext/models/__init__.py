"""What is no algorithm: policy and critic behind one forward, sampling, and which weights are which."""

from .actor_critic import ActorCritic
from .adapters import save_base_fingerprint
from .generation import answer_texts, completion_logprobs, eos_token_ids, prompt_token_ids, sample
from .identity import path_identity, tokenizer_identity
from .weights import keep_unpacked

__all__ = [
    "ActorCritic",
    "answer_texts",
    "completion_logprobs",
    "eos_token_ids",
    "keep_unpacked",
    "path_identity",
    "prompt_token_ids",
    "sample",
    "save_base_fingerprint",
    "tokenizer_identity",
]
