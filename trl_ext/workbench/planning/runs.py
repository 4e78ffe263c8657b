"""Describe a run to plan, and its plan."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .layout import Layout

Stage = Literal["sft", "reward", "pretrain_critic", "ppo", "dpo"]


@dataclass(frozen=True)
class LoadedReward:
    """
    Describe a model that a reward function, such as a `ModelReward`, loads itself. Each process holds all of it.

    Args:
        config: configuration of the classifier.
        dtype: dtype of its weights.
        bits: 8 if its weights are quantised to 8 bits, else None.
        max_batch_tokens, batch_size: largest number of tokens, and of rows, in one forward pass; None sets no limit.
        members: number of adapters on this base, if it is an ensemble's. The adapters' bytes are not counted, since
            their rank is not known.
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
        layout: how the run is spread over processes.
        policy: configuration of the trained model, which is a classifier in the stages `reward` and `pretrain_critic`.
        rewards: configurations of PPO's reward models that have a base of their own.
        dtype: dtype of the weights as loaded.
        peft_config: configuration of the adapter, if there is one.
        bits, nested: bits of a quantised base, and whether its scales are quantised, too.
        prompt_length: tokens of PPO's longest prompt; in the stage `pretrain_critic`, of the longest prompt with its
            answer.
        value_model: configuration of PPO's critic if a path names the critic; None takes the policy's configuration.
        ref_model: whether a reference model is given. It is then kept in memory, even if an adapter is trained.
        shared_rewards: number of reward models that are adapters on the policy's base.
        loaded_rewards: the models that reward functions load, see [`LoadedReward`].
        turns: largest number of turns of an episode of PPO; above 1 with tools.
        ref_adapter: whether training continues an adapter that is given. The reference is then a copy of this adapter.
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
        """Return how many tokens the longest text has, in a stage without rollouts."""
        if self.stage == "pretrain_critic":  # nothing is truncated
            return self.prompt_length
        return self.args.max_length or getattr(self.policy.get_text_config(), "max_position_embeddings", 1024)

    @property
    def longest_history(self) -> int:
        """Return how many tokens may precede a turn of PPO's policy, at most."""
        return self.prompt_length + (self.args.max_completion_length if self.turns > 1 else 0)

    @property
    def optim(self) -> str:
        """Return the optimizer's name as text, even if the arguments hold a member of an enumeration."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the weights' dtype in a pass: DeepSpeed and FSDP2 cast them to `mixed`, autocast leaves them."""
        casts = self.layout.is_deepspeed or self.layout.mode == "fsdp2"
        return self.mixed if casts and self.mixed is not None else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast; None without mixed precision, or if a spread run's weights have it already."""
        return None if self.compute_dtype == self.mixed and self.layout.mode != "single" else self.mixed


@dataclass
class Role:
    """
    Hold what one model keeps on one GPU.

    Args:
        name: name of the role, such as `policy`.
        parameters, trained: number of all weights, and of the trained ones.
        weights, gradients, optimizer: bytes of the weights, of the gradients and of the optimizer's state.
        note: text to show beside the role.
        config: the model's configuration, if that is neither the policy's nor one of `Job.rewards`.
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
        phases: phase → purpose → bytes that it takes beside weights and optimizer state.
        schedule: name → batch size or number of steps.
        checkpoint: bytes on disk of one checkpoint.
        host: bytes that each process keeps in the machine's memory instead of the GPU's.
        beside: purpose → bytes of vLLM, which generates beside the run; empty if the run generates itself.
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
        """Return the bytes that are held in the phase that takes most."""
        return self.resident + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Return the name of the phase that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))
