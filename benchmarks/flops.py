"""How many floating-point operations a PPO rollout and its updates need, whoever makes them."""

from collections.abc import Sequence
from typing import NamedTuple


class Flops(NamedTuple):
    """Of matrix products: a product of (m, k) and (k, n) is 2·m·k·n."""

    backbone: float  # linear layers
    adapters: float
    attention: float
    head: float

    def __add__(self, other: "Flops") -> "Flops":  # type: ignore[override]
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, factor: float) -> "Flops":  # type: ignore[override]
        return Flops(*(factor * part for part in self))


def forward(shape: dict, vocabulary: int, prompt: int, lengths: Sequence[int], rank: int = 0, head=True) -> Flops:
    """
    One pass over the real tokens that the next-token distributions of the responses need: the last is not read.

    Generation with a cache needs the same: each token passes the layers once, and attends to those before it.

    Args:
        shape: of a Llama-like decoder: `hidden_size` d, `intermediate_size` f, `num_hidden_layers`,
            `num_attention_heads`, and `num_key_value_heads` if it differs.
        vocabulary: tokens.
        prompt: tokens of each prompt.
        lengths: tokens of each response.
        rank: of LoRA on all linear layers but the head; 0 for none.
        head: whether the LM head is run, at the positions that predict response tokens.
    """
    d, f, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    kv = d * shape.get("num_key_value_heads", shape["num_attention_heads"]) // shape["num_attention_heads"]
    linears = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)]  # q, k, v, o, gate, up, down
    rows = [prompt + length - 1 for length in lengths]
    tokens, attended = sum(rows), sum(n * (n + 1) // 2 for n in rows)
    return Flops(
        backbone=2 * layers * tokens * sum(a * b for a, b in linears),
        adapters=2 * layers * tokens * rank * sum(a + b for a, b in linears),
        attention=4 * layers * attended * d,  # scores and the weighted sum, causal
        head=2 * d * vocabulary * sum(lengths) * head,
    )


def with_backward(flops: Flops, is_lora: bool) -> Flops:
    """
    Forward and backward: the gradient of a product is two more of its size, one for each factor.

    With LoRA the base and the head are frozen, so that they need the one of their input alone.
    """
    frozen = 2 if is_lora else 3
    return Flops(frozen * flops.backbone, 3 * flops.adapters, 3 * flops.attention, frozen * flops.head)


def ppo_work(
    shape: dict,
    vocabulary: int,
    prompt: int,
    lengths: Sequence[int],
    epochs: int,
    rank: int = 0,
    reward: dict | None = None,
    critic: bool = True,
) -> dict[str, Flops]:
    """
    What a rollout and its updates need: real tokens only, and old log-probs for nothing, since the sampler knows them.

    Element-wise work, the value head and the optimizer are left out.

    Args:
        shape, vocabulary, prompt, lengths, rank: as in `forward`; policy and critic are alike.
        epochs: passes over the rollout in training.
        reward: shape of the reward model; it reads whole responses.
        critic: whether there is one.
    """
    policy = forward(shape, vocabulary, prompt, lengths, rank)
    value = forward(shape, vocabulary, prompt, lengths, rank, head=False) * critic
    reference = forward(shape, vocabulary, prompt, lengths)
    passes = reference + value
    if reward:
        passes += forward(reward, vocabulary, prompt + 1, lengths, head=False)
    return {
        "generation": policy,
        "rollout passes": passes,
        "update": with_backward(policy + value, rank > 0) * epochs,
    }


def seconds_at(work: dict[str, Flops], head_rate: float, backbone_rate: float) -> float:
    """Seconds at the given FLOP/s of a product as the head's is, and of those in the layers."""
    total = sum(work.values(), Flops(0, 0, 0, 0))
    return total.head / head_rate + (total.backbone + total.adapters + total.attention) / backbone_rate
