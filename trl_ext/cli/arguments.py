"""Declare the arguments that recipes share, for dataset, model and reward; save and evaluate a trained model."""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import ModelConfig, ScriptArguments

from ..runs.settings import check_settings, setting
from ..upstream.statements import refuse
from .parser import StrictTrlParser, entry_of


@dataclass
class DataArguments(ScriptArguments):
    """Make the dataset of TRL's `ScriptArguments` required, unless an `environment` provides the prompts."""

    def __post_init__(self) -> None:
        owns_data = getattr(self, "environment", None)  # then no dataset need be named
        evaluates_twice = getattr(self, "eval_size", None) is not None and getattr(self, "eval_dataset_name", None)
        refuse(
            (
                not self.dataset_name and not owns_data,
                "no dataset: set `dataset_name` to a hub name, a file or a folder",
            ),
            (evaluates_twice, "`eval_size` and `eval_dataset_name` are both given: remove one"),
        )


@dataclass
class HeldOutArguments(DataArguments):
    """
    Declare `eval_size`, the number of training rows to evaluate on, in place of a test split.

    It cannot be set together with `eval_dataset_name`.
    """

    eval_size: int | None = setting(
        None,
        "Number of rows to take from the training split for evaluation; unset, `dataset_test_split` is used. The "
        "rows of a prompt stay together, so there may be somewhat fewer. 0 switches evaluation off.",
        range=">= 0",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)


@dataclass
class PromptArguments(DataArguments):
    """Declare the arguments for a dataset of prompts, and for the rewards that score answers."""

    reward_model_name_or_path: str | None = setting(
        None,
        "Reward model, a sequence classifier with one label. `reward_weights` are in this order: this model, "
        "`reward_funcs`, `rewards`.",
    )
    reward_funcs: list[str] | None = setting(
        None, "Reward functions, each `path/to/file.py:function` or `package.module.function`."
    )
    rewards: list[str] | None = setting(
        None,
        "Reward functions, and rewards of trl_ext.rewards with their settings, e.g. "
        "`{CachedReward: {reward: a.py:f, columns: []}, weight: 0.5}`.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        scored = getattr(self, "score_column", None) or getattr(self, "environment", None)
        scored = scored or self.reward_model_name_or_path or self.reward_funcs or self.rewards
        refuse((not scored, "no reward: set `reward_model_name_or_path`, `reward_funcs` or `rewards`"))
        self.rewards = entry_of(self.rewards)

    def load_rewards(
        self, tokenizer: Any, weights: list[float] | None, model: Any = None
    ) -> tuple[list[Any], list[float] | None]:
        """
        Build the rewards that the arguments name.

        Args:
            tokenizer: the policy's tokenizer, which reward models in `rewards` are given.
            weights: the setting `reward_weights`; None if it is not set.
            model: the reward made from `reward_model_name_or_path`, or its path; None without one.

        Returns:
            The rewards, in the order `model`, `reward_funcs`, `rewards`; and a list of their weights. If an entry in
            `rewards` has a weight, the others' weight is 1. If no entry has one, `weights` is returned.

        Raises:
            ImportError: a file, module or function does not exist.
            ValueError: an entry has an error, or both `weights` and an entry's weight are given.
        """
        from ..rewards import joined_weights, load_reward, load_rewards

        functions = [load_reward(path) for path in self.reward_funcs or []]
        with_settings, own = load_rewards(self.rewards, tokenizer)
        rewards = [*([model] if model else []), *functions, *with_settings]
        return rewards, joined_weights(weights, [None] * (len(rewards) - len(own)) + own)


@dataclass
class ModelArguments(ModelConfig):
    """Make the model of TRL's `ModelConfig` required; refuse `lora_r` and `lora_target_modules` without `use_peft`."""

    task_type: ClassVar[str] = "CAUSAL_LM"  # of an adapter

    model_name_or_path: str | None = setting(
        None,
        "Model to start from, a folder or a hub name. An adapter is loaded onto the base that it names, and trained "
        "further with its own rank and modules. To train a new adapter, or all weights, merge it first.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_lora = (self.lora_r, self.lora_target_modules) != (ModelConfig.lora_r, None)
        refuse(
            (self.model_name_or_path is None, "no model: set `model_name_or_path` to a folder or a hub name"),
            # All weights would be trained in silence
            (has_lora and not self.use_peft, "`lora_r` and `lora_target_modules` need `use_peft: true`"),
        )

    def init_kwargs(self, model_init_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """
        Return a dict with the arguments `revision`, `attn_implementation` and `dtype` of `from_pretrained`, and with
        `model_init_kwargs`, whose values take precedence.
        """
        return {
            "revision": self.model_revision,
            "attn_implementation": self.attn_implementation,
            "dtype": self.dtype,
            **(model_init_kwargs or {}),
        }


@dataclass
class ClassifierArguments(ModelArguments):
    """Adapt `ModelArguments` to a sequence classifier, whose head is trained and saved together with an adapter."""

    task_type: ClassVar[str] = "SEQ_CLS"


def save_and_evaluate(
    parser: StrictTrlParser, trainer: Any, result: Any, *kinds: type[Exception]
) -> dict[str, float] | None:
    """
    Save the trained model, evaluate it, and return the evaluation's metrics.

    None is returned if there is no evaluation data.

    Args:
        parser: ends the program with a one-line message on an `OSError`, such as a full disk, or an error of `kinds`.
        trainer: the trainer, after training.
        result: what `trainer.train` returned.
        *kinds: further classes of errors.
    """
    # They import PEFT, which speaks
    from ..runs import last_evaluation, save_trained

    with parser.one_line_errors(OSError, *kinds):
        save_trained(trainer, result.metrics)
        if trainer.eval_dataset is None:
            return None
        metrics = last_evaluation(trainer, result)
        trainer.save_metrics("eval", metrics)
        return metrics
