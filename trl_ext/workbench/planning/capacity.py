"""Plan whether a model can be trained on given GPUs, with the same settings for every model."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from ...dpo import DPOConfig
from ...ppo import PPOConfig
from .duration import GPU, Efficiency, hours
from .layout import Layout
from .memory import GIB
from .runs import Job
from .stages import plan

CONTEXT = 0.5  # GiB of CUDA itself
PROMPT, ANSWER = 512, 512  # tokens
A_MACHINE = 8  # GPUs


@dataclass(frozen=True)
class Fit:
    """
    Hold what a run takes on given GPUs, as planned.

    Args:
        stage: `"ppo"` or `"dpo"`.
        lora: whether adapters are trained instead of all weights.
        parameters: number of the policy's weights.
        gpu: name of the kind of GPU.
        gpus: number of GPUs.
        memory: GB of one GPU, as it is sold.
        peak: GiB that the run takes of one GPU in the phase that takes most, with half a GiB for CUDA.
        phase: name of the phase that takes most.
        hours: estimated hours of a run over `examples`, on all GPUs.
        examples: number of PPO's episodes, or of DPO's pairs.
    """

    stage: str
    lora: bool
    parameters: int
    gpu: str
    gpus: int
    memory: int
    peak: float
    phase: str
    hours: float
    examples: int

    @property
    def fits(self) -> bool:
        """Return whether the peak in GiB is at most the GPU's nominal GB: it has nearly as many GiB."""
        return self.peak <= self.memory

    @property
    def gpu_hours(self) -> float:
        """Return the estimated hours times the number of GPUs."""
        return self.hours * self.gpus


def fit(
    stage: str, config: Any, gpu: GPU, gpus: int = 1, *, lora: bool, reward_model: bool = True, examples: int = 10_000
) -> Fit:
    """
    Plan PPO or DPO of a model in bfloat16, with activation checkpointing, on one GPU or with FSDP2 on several.

    A prompt and an answer have 512 tokens each, and a micro-batch has 2 rows. A rollout has 128 episodes on one GPU,
    or 32 on each of several. LoRA has rank 16 on all linear layers. PPO's reward model is as large as the policy; with
    LoRA it is one more adapter on the policy's base.

    Args:
        stage: `"ppo"` or `"dpo"`.
        config: configuration of the policy, as `AutoConfig` reads it.
        gpu, gpus: kind and number of GPUs.
        lora: whether to train adapters instead of all weights.
        reward_model: whether a model scores PPO's answers. If not, a function does, which takes no memory.
        examples: number of PPO's episodes, or of DPO's pairs, for which to estimate the time.
    """
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "bf16": True, "report_to": "none"}
    # The machine that plans need not have a GPU
    given |= {"activation_checkpointing": True, "use_cpu": not torch.accelerator.is_available()}
    args: PPOConfig | DPOConfig
    if stage == "ppo":
        given |= {"gradient_accumulation_steps": 16 if gpus == 1 else 4, "num_mini_batches": 4}
        args = PPOConfig("out", max_completion_length=ANSWER, local_rollout_forward_batch_size=16, **given)
    else:
        args = DPOConfig("out", max_length=PROMPT + ANSWER, gradient_accumulation_steps=16, **given)
    job = Job(
        stage,  # type: ignore[arg-type]
        args,
        config,
        Layout("single") if gpus == 1 else Layout("fsdp2", gpus, -(-gpus // A_MACHINE)),
        rewards=() if lora or not reward_model or stage != "ppo" else (config,),
        dtype=torch.bfloat16,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        prompt_length=PROMPT,
        shared_rewards=int(lora and reward_model and stage == "ppo"),
    )
    result = plan(job)
    took = hours(job, result, gpu, Efficiency(), examples)
    size = result.roles[0].parameters - (result.roles[0].trained if lora else 0)
    where = (gpu.name, gpus, gpu.memory)
    return Fit(stage, lora, size, *where, result.peak / GIB + CONTEXT, result.peak_phase, took, examples)
