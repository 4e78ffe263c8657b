"""Declare the arguments that recipes share: for the dataset, the model and, if needed, the reward."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trl import ModelConfig, ScriptArguments

from ..runs.settings import check_settings, setting
from .parser import entry_of


@dataclass
class DataArguments(ScriptArguments):
    """Restrict TRL's `ScriptArguments`: a dataset must be named, and cannot be streamed."""

    def __post_init__(self) -> None:
        if not self.dataset_name and not getattr(self, "environment", None):  # an environment may own its data
            raise ValueError(
                "no dataset: give `dataset_name` (a hub name, a .jsonl file or a folder). Some recipes name no "
                "dataset: read in their first lines, or on the page of docs named there, what to run them with"
            )
        if self.dataset_streaming or self.ignore_bias_buffers:
            raise ValueError("`dataset_streaming` and `ignore_bias_buffers` are not supported: leave them unset")


@dataclass
class HeldOutArguments(DataArguments):
    """Declare how many rows to cut from the training split for evaluation, for data without a test split."""

    eval_size: int | None = setting(
        None,
        "Rows to cut from the training split and evaluate on, for data without `dataset_test_split`: all rows of a "
        "prompt or none, so there may be somewhat fewer. 0 switches evaluation off.",
        range=">= 0",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        if self.eval_size is not None and (other := getattr(self, "eval_dataset_name", None)):
            raise ValueError(f"`eval_size` {self.eval_size} and `eval_dataset_name` {other} are both given: drop one")


@dataclass
class PromptArguments(DataArguments):
    """Declare the arguments for prompts, and for the rewards that score the answers."""

    reward_model_name_or_path: str | None = setting(
        None,
        "Sequence classifier with one label. `reward_weights` are: this model's, then those of `reward_funcs`, then "
        "those of `rewards`.",
    )
    reward_funcs: list[str] | None = setting(
        None, "Reward functions, each `path/to/file.py:function` or `package.module.function`."
    )
    rewards: list[str] | None = setting(
        None,
        "The same, and rewards of trl_ext.rewards with their settings, e.g. `{SumReward: {members: [a.py:f, b.py:g], "
        "weights: [1, 2]}, weight: 0.5}`.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        scored = getattr(self, "score_column", None) or getattr(self, "environment", None)
        if not (self.reward_model_name_or_path or self.reward_funcs or self.rewards or scored):
            or_column = "; or `score_column`, if the rows have scores" if hasattr(self, "score_column") else ""
            raise ValueError(
                f"no reward: give at least one of `reward_model_name_or_path`, `reward_funcs` and `rewards`{or_column}"
            )
        self.rewards = self.rewards and [entry_of(text) for text in self.rewards]


_ONLY_WITH: dict[str, tuple[str, Any]] = {  # name: the setting that it needs, and its value
    **dict.fromkeys(
        (
            *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
            *("lora_modules_to_save", "use_rslora", "use_dora"),
        ),
        ("use_peft", True),
    ),
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), ("load_in_4bit", True)),
}


@dataclass
class ModelArguments(ModelConfig):
    """Restrict TRL's `ModelConfig`: the model must be named, and settings without an effect are refused."""

    task_type: ClassVar[str] = "CAUSAL_LM"  # of an adapter

    model_name_or_path: str | None = setting(
        None,
        "Model to start from, a folder or a hub name. An adapter is loaded on the base that it names, and trained on: "
        "`use_peft` may then only repeat its shape. For a new adapter, or all weights, merge it first.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ValueError("no model: give `model_name_or_path`, a folder or a hub name")
        check_settings(self, only_with=_ONLY_WITH)
        if (self.load_in_4bit or self.load_in_8bit) and not self.use_peft:
            raise ValueError("a quantised base cannot be trained: set `use_peft: true`, or do not quantise it")
        if self.lora_task_type not in ("CAUSAL_LM", self.task_type):  # TRL's default, which says nothing
            raise ValueError(
                f"`lora_task_type` must be {self.task_type} here, got {self.lora_task_type!r}: leave it out"
            )
        if self.model_revision != "main" and Path(self.model_name_or_path).exists():
            raise ValueError(
                f"`model_revision` {self.model_revision!r} is for a model on the hub, but {self.model_name_or_path} "
                "is a folder: leave it out"
            )

    def init_kwargs(self, model_init_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the arguments of `from_pretrained`; values in `model_init_kwargs` take precedence."""
        return {
            "revision": self.model_revision,
            "attn_implementation": self.attn_implementation,
            "dtype": self.dtype,
            **(model_init_kwargs or {}),
        }


@dataclass
class ClassifierArguments(ModelArguments):
    """Adapt `ModelArguments` to a sequence classifier, whose head is trained and saved with the adapter."""

    task_type: ClassVar[str] = "SEQ_CLS"
