"""The state that the parts of [`PPOTrainer`] share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from trl import RLOOTrainer

from .config import PPOConfig
from .kl_controller import KLController
from .metrics import Metrics
from .reward_normalizer import RewardNormalizer


class PPOTrainerBase(RLOOTrainer):
    """Declares what the trainer and its mixins read of each other; the trainer's constructor sets it."""

    args: PPOConfig
    model: Any  # ActorCritic; FSDP and DeepSpeed wrap it
    train_dataset: Any
    accelerator: Any
    eos_token_ids: list[int]
    generation_config: Any
    num_generations_eval: int
    reward_funcs: list
    reward_func_names: list[str]
    reward_processing_classes: list
    _mistakes: list[tuple[str, Exception | None]]

    kl_controller: KLController
    reward_normalizer: RewardNormalizer
    _stats: dict[str, Metrics]

    _step: int  # micro-batches trained on by this process
    _buffered_inputs: Any
    _rollout: dict[str, Tensor] | None  # the current rollout, rows in the order of generation
    _skip_until: int  # `_step` at which updates go on after `max_approx_kl`
    _episodes: int  # responses of all processes
    _episodes_at_start: int
    _clock: dict[str, float]  # seconds spent in each phase since the last log
    _inner_seconds: float
    _next_kl: tuple[float, int]  # `objective/kl` of the rollout, and its episodes, for the controller

    _prompt_ids: list[list[int]]
    _completion_ids: list[list[int]]
    _rewards_per_func: Tensor  # (B of all processes, functions), NaN for None

    _policy_path: str | None
    _is_peft: bool
    _has_reference: bool
    _critic_origin: str
    _eval_rows: tuple[int, int] | None  # rows seen and rows in all, while evaluating
    _sampling: bool  # False while evaluating greedily

    _local: Callable[[Any], Any]
    _prepare_reference: Callable[[Any, Any], None]
    _permuted: Callable[[int], list[dict[str, Tensor]]]
    _train_adapters: Callable[[], None]
    _timed: Callable[[str], AbstractContextManager]
    _real_rows: Callable[[int], Tensor]
    _report: Callable[[str], dict[str, float]]

    if TYPE_CHECKING:

        @property
        def _critic_only(self) -> bool: ...

        @property
        def _steps_per_rollout(self) -> int: ...

        @property
        def _metric_prefix(self) -> str: ...
