"""Extend TRL's SFT and reward trainers so that their runs are recorded and can be resumed exactly."""

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import trl
from datasets import Dataset
from transformers.trainer_utils import TrainOutput
from trl import RewardTrainer, SFTTrainer

from ..callbacks.console import ConsoleCallback
from ..callbacks.recording import record_run
from ..data import one_form
from ..data.pairs import PairCollator, check_columns, take_columns
from ..functional import preference_loss
from ..models.generation import eos_token_ids, warn_of_turn_end
from ..models.loading import is_adapter, load_to_train
from ..models.weights import check_pad_token, context_of
from ..runs.checkpoints import ResumableRun
from ..runs.redaction import HidesCredentials
from ..runs.settings import AnswersSettings, RunSettings, documented, resolve_for_device, setting
from ..upstream.names import is_conversational
from ..upstream.statements import temporarily
from .row_means import RowMeans


@dataclass
class _StageSettings(HidesCredentials, RunSettings):
    """Add settings for what a run saves, and resolve those that depend on the device."""

    gradient_checkpointing: bool | None = setting(
        None,
        "Older name of `activation_checkpointing`, which should be set instead. If both are unset, on with a GPU.",
    )

    def __post_init__(self):
        resolve_for_device(self, activation_checkpointing=True)
        super().__post_init__()


@documented
@dataclass
class SFTConfig(_StageSettings, AnswersSettings, trl.SFTConfig):
    """
    Extend TRL's `SFTConfig` by settings for what a run saves.

    It hides credentials from trackers such as W&B and TensorBoard. `bf16` and `activation_checkpointing` are off by
    default on a CPU, where both cost time.
    """


@documented
@dataclass
class RewardConfig(_StageSettings, trl.RewardConfig):
    """
    Extend TRL's `RewardConfig` by settings for saving, and for a confidence and a weight of each pair.

    It hides credentials from trackers such as W&B and TensorBoard. `bf16` and `activation_checkpointing` are off by
    default on a CPU, where both cost time.
    """

    use_confidence: bool = setting(
        False,
        "Read how sure each label is, such as the annotators' agreement, from the column `confidence`, in [0.5, 1]. "
        "The loss is c·(−log σ(z)) + (1 − c)·(−log σ(−z)), where c is the confidence and z the chosen completion's "
        "score minus the rejected completion's (minus the margin, if there is one).",
    )
    use_weight: bool = setting(
        False,
        "Multiply each pair's loss by the column `weight`, at least 0. The loss is still divided by the number of "
        "pairs, not by the sum of weights.",
    )


_TOKEN_IDS = ("input_ids", "chosen_ids", "rejected_ids")  # columns of TRL's prepared datasets


def checked(dataset: Any, name: str, columns: tuple[str, ...]) -> Any:
    """
    Return a dataset, or a dict of datasets, without the prompts that completions repeat (see [`one_form`]).

    Raise a `ValueError`, which calls the dataset `name`, if one of `columns` has an invalid number, or if some rows
    are text and others messages. A stream is not checked.
    """
    if isinstance(dataset, dict):
        return {key: checked(part, f"{name} {key!r}", columns) for key, part in dataset.items()}
    check_columns(dataset, name, [column for column in columns if column != "source"])
    return one_form(dataset, f"The {name} dataset")


class RecordedRun(RowMeans, ResumableRun):
    """Base class of the SFT, reward and DPO trainers: check rows, load an adapter from its path, record the run."""

    _is_classifier = False
    _pair_columns: tuple[str, ...] = ()
    _signature_columns: Any

    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        given = getattr(args, "model_init_kwargs", None) or {}
        for which in ("train", "eval"):
            kwargs[f"{which}_dataset"] = checked(kwargs.get(f"{which}_dataset"), which, self._pair_columns)
        if not is_adapter(model, given.get("revision")):
            super().__init__(model, args=args, **kwargs)
        else:  # load the base that the adapter names, and train the adapter further
            options = {name: kwargs.pop(name, None) for name in ("peft_config", "quantization_config")}
            model, kwargs["processing_class"] = load_to_train(
                model, args, kwargs.get("processing_class"), **options, is_classifier=self._is_classifier
            )
            with nullcontext() if args is None else temporarily(args, model_init_kwargs=None):
                super().__init__(model, args=args, **kwargs)
        given = kwargs["train_dataset"]
        rows = self.train_dataset
        if isinstance(given, Dataset) and not getattr(self.args, "packing", False) and len(rows) < len(given):
            self.accelerator.print(
                f"{len(given) - len(rows):,} of {len(given):,} rows are left out: they are too long, or have no token "
                f"to train on (`max_length={self.args.max_length}`)."
            )
        self._warn_of_long_rows()
        check_pad_token(self.model, getattr(self.processing_class, "tokenizer", self.processing_class))
        ConsoleCallback.replace(self)

    def _set_signature_columns_if_needed(self) -> None:
        is_new = self._signature_columns is None
        super()._set_signature_columns_if_needed()
        if is_new:
            self._signature_columns = [*self._signature_columns, *self._pair_columns]

    def _warn_of_long_rows(self) -> None:
        """Warn of rows that are longer than the model's context, if `max_length` does not cut them."""
        context = context_of(self.model)
        if not isinstance(self.train_dataset, Dataset) or (self.args.max_length or math.inf) <= context:
            return
        columns = [name for name in self.train_dataset.column_names if name in _TOKEN_IDS]
        lengths = (
            [max(map(len, row.values())) for row in self.train_dataset.select_columns(columns)] if columns else []
        )
        if count := sum(length > context for length in lengths):
            warnings.warn(
                f"{count:,} of {len(lengths):,} rows have up to {max(lengths):,} tokens, but the model's context has "
                f"{context:,}: set `max_length`, now {self.args.max_length}, to {context} or less.",
                UserWarning,
                stacklevel=3,
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        if getattr(self.args, "record_run", False):
            record_run(self)
        return super().train(resume_from_checkpoint, **kwargs)


class ResumableSFTTrainer(RecordedRun, SFTTrainer):
    """
    Extend TRL's `SFTTrainer`, so that it resumes only from a complete checkpoint of the same run.

    `model` may also be the path of a saved adapter, which is trained further. `args` may also be TRL's configuration.
    """

    def __init__(self, model: Any, args: Any = None, *, train_dataset: Any = None, **kwargs: Any):
        is_chat = isinstance(train_dataset, Dataset) and any(map(is_conversational, train_dataset.take(1)))
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        if is_chat and tokenizer.chat_template:
            warn_of_turn_end(tokenizer, eos_token_ids(self.model, tokenizer), "eos_token: {token!r}")

    def _tokens(self, inputs: dict[str, Any]) -> dict[str, int]:
        tokens = int((inputs["labels"][:, 1:] != -100).sum())
        return dict.fromkeys(("loss", "entropy", "mean_token_accuracy"), tokens)


class ResumableRewardTrainer(RecordedRun, RewardTrainer):
    """
    Extend TRL's `RewardTrainer`, so that it resumes only from a complete checkpoint of the same run.

    With [`RewardConfig`], its loss can read a confidence and a weight of each pair. `model` may also be the path of a
    saved adapter, which is trained further. `args` may also be TRL's configuration.
    """

    _is_classifier = True
    _rows_per_example = 2
    data_collator: Any

    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        options = ("confidence", "weight")
        self._pair_columns = tuple(name for name in options if getattr(args, f"use_{name}", False))
        super().__init__(model, args, **kwargs)
        if self._pair_columns:
            self.data_collator = PairCollator(self.data_collator, self._pair_columns)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's reward loss; a pair's confidence smooths its label, a pair's weight multiplies its loss."""
        columns, batch = take_columns(inputs, self._pair_columns)
        loss, outputs = super().compute_loss(model, batch, True, num_items_in_batch)
        if columns:
            chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
            logits = chosen - rejected - batch.get("margin", 0)
            ours = columns.get("weight", 1) * preference_loss(logits, columns.get("confidence"))
            loss = loss + (ours - preference_loss(logits)).mean()  # exactly TRL's if weights and confidences are 1
        loss = loss * self._share_of_step(batch)
        return (loss, outputs) if return_outputs else loss
