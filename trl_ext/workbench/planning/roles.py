"""Build the models of a run without weights, and count the bytes that each one keeps."""

from collections.abc import Iterable
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...models import add_fused_lm_head, base_model_of
from .memory import optimizer_bytes, quantized_bytes, share
from .runs import Job, LoadedReward, Role

_HEADS = ("lm_head", "score", "classifier")  # the names of output heads, which stay as they are


def causal_lm(job: Job, config: Any, outputs: tuple[str, ...] = ("log_probs",)) -> Any:
    """Build a language model with TRL's fused LM head."""
    model = AutoModelForCausalLM.from_config(config, dtype=job.compute_dtype)
    add_fused_lm_head(model, outputs=outputs)
    return model


def classifier(job: Job, config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build a sequence classifier that gives one score; without a `dtype`, it has the dtype of the run's passes."""
    given = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    config = type(config)(**{**given, "num_labels": 1, "pad_token_id": config.pad_token_id or 0})
    return AutoModelForSequenceClassification.from_config(config, dtype=dtype or job.compute_dtype)


def loaded_roles(reward: LoadedReward, model: Any) -> list[Role]:
    """Return a role for each member of a reward function's model; the first holds the bytes of the base they share."""
    numel = sum(p.numel() for p in model.parameters())
    small = linear_weights(model) if reward.bits else frozenset()
    weights = sum(quantized_bytes(p.numel(), 8) if id(p) in small else p.nbytes for p in model.parameters())
    return [
        Role("reward function", numel, 0, 0 if i else weights, 0, 0, config=reward.config)
        for i in range(reward.members)
    ]


def adapted(job: Job, model: Any) -> Any:
    """Add the run's adapter to a model, in TRL's dtype for adapters; return the model as it is if there is none."""
    if job.peft_config is None:
        return model
    model = get_peft_model(
        model, job.peft_config, autocast_adapter_dtype=job.bits is None and job.layout.mode != "zero3"
    )
    if job.bits is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def prepare(job: Job, model: Any) -> Any:
    """Set the model to training mode, and switch on activation checkpointing if the run's arguments say so."""
    if job.args.activation_checkpointing:
        kwargs = dict(job.args.activation_checkpointing_kwargs or {"use_reentrant": False})
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        if job.peft_config is not None:
            base_model_of(getattr(model, "policy", model)).enable_input_require_grads()
    return model.train()


def linear_weights(model: nn.Module) -> frozenset[int]:
    """Return the ids of the weights that bitsandbytes quantises: frozen linear layers, but not the output heads."""
    return frozenset(
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and name.split(".")[-1] not in _HEADS
    )


def role_of(
    job: Job,
    name: str,
    parameters: Iterable[nn.Parameter],
    quantized: frozenset[int] = frozenset(),
    note: str = "",
    *,
    is_sharded: bool = True,
) -> Role:
    """
    Count the bytes of weights, gradients and optimizer state that one model keeps on one GPU.

    Args:
        job: the run.
        name: name of the role.
        parameters: parameters of the model; tied ones count once.
        quantized: ids of the weights that a quantised base keeps in `job.bits` bits.
        note: text to show beside the role.
        is_sharded: whether the model's weights are sharded where the run's layout is ZeRO-3 or FSDP2.
    """
    layout, optim = job.layout, job.optim
    parameters = list({id(p): p for p in parameters}.values())
    trained = [p for p in parameters if p.requires_grad]
    numel, small = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if id(p) in quantized)
    weights = quantized_bytes(small, job.bits, job.nested) if job.bits and small else 0
    weights += sum(p.nbytes for p in parameters if id(p) not in quantized or not job.bits)
    gradients, count = sum(p.nbytes for p in trained), sum(p.numel() for p in trained)
    if layout.is_deepspeed:  # a float32 copy of the weights, and the optimizer's moments
        state = count * 4 + (optimizer_bytes(count, 4, optim) if count else 0)
    elif layout.mode == "fsdp2" and job.mixed is not None:  # accelerate keeps trained weights in float32
        weights += count * 4 - gradients
        gradients = count * 4
        state = optimizer_bytes(count, 4, optim)
    else:
        state = sum(optimizer_bytes(p.numel(), p.element_size(), optim) for p in trained)
    if layout.mode == "ddp":
        gradients *= 2  # DDP's buckets hold them once more
    if layout.shards_weights and is_sharded:
        weights = share(weights, layout.processes)
    if layout.shards_gradients:
        gradients = share(gradients, layout.processes)
    if layout.is_deepspeed or layout.mode == "fsdp2":
        state = share(state, layout.processes)
    return Role(name, numel, count, weights, gradients, state, note)
