"""Describe a run to plan, and its plan."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .layout import Layout

Stage = Literal["sft", "reward", "pretrain_critic", "ppo", "dpo"]


@dataclass(frozen=True)
class LoadedReward:
    """
    Describe a reward model that a reward function loads itself, such as a `ModelReward`. It is whole on each process.

    Args:
        config: configuration of the classifier.
        dtype: dtype of its weights.
        bits: 8 if they are quantised.
        max_batch_tokens, batch_size: most tokens and rows in one forward pass.
        members: number of an ensemble's adapters on this base. They are not counted: their rank is not known.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    max_batch_tokens: int | None = 16384
    batch_size: int | None = None
    members: int = 1

    def rows(self, most: int, length: int) -> int:
        """Return how many of `most` rows of `length` tokens one forward pass reads."""
        return max(1, min(most, self.batch_size or most, (self.max_batch_tokens or most * length) // length))


@dataclass
class Job:
    """
    Describe a run to plan.

    Args:
        stage: which training stage it is.
        args: its training arguments.
        layout: how it is spread over processes.
        policy: configuration of the trained model; in the stages `reward` and `pretrain_critic`, of the classifier.
        rewards: configurations of PPO's reward models, for those with a base of their own.
        dtype: dtype of the weights as loaded.
        peft_config: configuration of the adapter, if there is one.
        bits, nested: bits of a quantised base, and whether its scales are quantised, too.
        prompt_length: tokens of PPO's longest prompt; for `pretrain_critic` of the longest prompt with its answer.
        value_model: configuration of PPO's critic if it is given by a path; None takes the policy's.
        ref_model: whether the reference is given, so that it is held even with adapters.
        shared_rewards: number of reward models that are adapters on the policy's base.
        loaded_rewards: the models of reward functions, see [`LoadedReward`].
        turns: most turns of an episode of PPO; more than one with tools.
        ref_adapter: whether an adapter is trained on, so that the reference is a copy of it.
        only_environment: whether an environment gives all rewards, so that no reward model can be fooled.
        mixed: dtype of mixed precision. It comes from `args`; do not pass it.
    """

    stage: Stage
    args: Any
    policy: Any
    layout: Layout = field(default_factory=Layout)
    rewards: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    peft_config: Any = None
    bits: int | None = None
    nested: bool = False
    prompt_length: int = 512
    value_model: Any = None
    ref_model: bool = False
    shared_rewards: int = 0
    loaded_rewards: tuple[LoadedReward, ...] = ()
    turns: int = 1
    ref_adapter: bool = False
    only_environment: bool = False
    mixed: torch.dtype | None = None

    def __post_init__(self):
        self.mixed = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    @property
    def length(self) -> int:
        """Return the tokens of the longest text, in a stage without rollouts."""
        if self.stage == "pretrain_critic":  # nothing is truncated
            return self.prompt_length
        return self.args.max_length or getattr(self.policy.get_text_config(), "max_position_embeddings", 1024)

    @property
    def longest_history(self) -> int:
        """Return the tokens that PPO's policy has read at most when it begins a turn."""
        return self.prompt_length + (self.args.max_completion_length if self.turns > 1 else 0)

    @property
    def optim(self) -> str:
        """Return the optimizer's name; in the arguments it may be a member of an enumeration."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the weights in a pass: DeepSpeed and FSDP2 cast them, autocast leaves them."""
        casts = self.layout.is_deepspeed or self.layout.mode == "fsdp2"
        return self.mixed if casts and self.mixed is not None else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast, or None if the weights are cast already."""
        return None if self.compute_dtype == self.mixed and self.layout.mode != "single" else self.mixed


@dataclass
class Role:
    """
    Hold what one model keeps on one GPU.

    Args:
        name: name of the role, such as `policy`.
        parameters, trained: number of all weights, and of those that are trained.
        weights, gradients, optimizer: bytes.
        note: further text to show beside it.
        config: the model's configuration, if it is neither the policy's nor one of `Job.rewards`.
    """

    name: str
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    note: str = ""
    config: Any = None


@dataclass
class Plan:
    """
    Hold what a run takes on each GPU.

    Args:
        roles: the models of the run.
        phases: phase → purpose → bytes beside weights and optimizer state.
        schedule: batch sizes and numbers of steps, by their names.
        checkpoint: bytes on disk of one checkpoint.
        host: bytes of each process in the machine's memory.
        beside: purpose → bytes of vLLM, or of the process of `rollouts_ahead`, which generate beside the run; empty if
            the run generates itself.
    """

    roles: list[Role]
    phases: dict[str, dict[str, int]]
    schedule: dict[str, int]
    checkpoint: int
    host: int = 0
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def resident(self) -> int:
        """Return the bytes that are held in all phases."""
        return sum(role.weights + role.optimizer for role in self.roles)

    @property
    def peak(self) -> int:
        """Return the bytes held in the largest phase."""
        return self.resident + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Return the name of the largest phase."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))
