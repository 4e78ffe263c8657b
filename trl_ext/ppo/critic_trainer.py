"""Train a critic on the returns of saved rollouts, before PPO starts (VC-PPO, 2503.01491)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from ..callbacks.console import ConsoleCallback
from ..callbacks.metrics import is_training_log
from ..callbacks.recording import record_run
from ..functional import explained_variance, masked_sum, value_loss, variance
from ..models.actor_critic import add_value_forward, check_one_label, zero_
from ..models.adapters import check_config, check_head
from ..models.loading import has_head, is_adapter, load_adapted, whole_on_each_process
from ..models.weights import base_model_of, check_pad_token, disable_dropout
from ..runs.checkpoints import ResumableRun
from ..runs.redaction import HidesCredentials
from ..runs.settings import (
    RunSettings,
    check_settings,
    documented,
    resolve_for_device,
    setting,
)
from .config import ReturnSettings, check_score_settings
from .evaluation_pass import EvaluationRows
from .metrics import Accumulator
from .passes import Passes
from .roles import load_whole_critic

_NO_TOKEN = -100  # the label that the Trainer leaves out when it counts the tokens of a step


@documented
@dataclass
class CriticConfig(HidesCredentials, ReturnSettings, RunSettings, TrainingArguments):
    """
    Configuration of [`CriticTrainer`].

    The settings that decide the scale of the returns have the names, defaults and, except for `reward_normalization`,
    the meaning of [`PPOConfig`]. Give them the values that the later PPO run will have. The returns are Monte Carlo
    (λ = 1), whatever λ PPO uses.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    reward_normalization: Literal["none", "running", "batch", "group"] = setting(
        "none",
        "How scores are standardised, as in PPO. Here `running` and `batch` both use the mean and standard deviation "
        "of all saved rollouts; PPO's first rollouts have similar ones. PPO's `reference` is not available.",
    )
    reward_clip_range: tuple[float, float] | None = setting(None, "Bounds of the standardised score, as (min, max).")
    mask_truncated_completions: bool = setting(False, "Leave out the completions that do not end by EOS.")

    pad_to_multiple_of: int | None = setting(None, "Pad sequences to a length that is a multiple of so many tokens.")
    model_init_kwargs: dict[str, Any] | str | None = setting(
        None, "Keyword arguments of `from_pretrained`; they override those of `ModelConfig`. Read by the recipe."
    )
    trust_remote_code: bool = setting(False, "Whether to run code that comes with a model. Read by the recipe.")

    eval_on_start: bool = setting(True, "Evaluate before the first step, too, to compare with later evaluations.")
    logging_steps: float = setting(10, "Steps between two logs, or a share of all steps.")
    bf16: bool | None = setting(None, "Train in bfloat16 mixed precision; on where there is a GPU, if unset.")

    def __post_init__(self):
        resolve_for_device(self)
        check_settings(self)
        check_score_settings(self)
        super().__post_init__()


def load_critic(path: str, peft_config: LoraConfig | None = None, **kwargs: Any) -> tuple[Any, str]:
    """
    Load the model that the training of a critic starts from.

    Args:
        path: one of the following.

            - A causal language model: its backbone gets a head of zeros, so that V = 0 everywhere, as in PPOTrainer.
            - A reward model: it keeps its head.
            - An adapter of either: this adapter is trained further; if it has no head, it gets one of zeros.
        peft_config: configuration of a new adapter, which is trained and saved together with the head. None trains the
            whole model, or the adapter at `path`.
        **kwargs: arguments of `from_pretrained`.

    Returns:
        The critic, and a phrase for messages that says what it was made from.

    Raises:
        ValueError: one of the following.

            - The model is not a sequence classifier with one label, or its base is quantised.
            - The adapter at `path` is for another task, does not fit its base, was saved with its own embeddings, or
              is a classifier's and has no head.
            - `peft_config` is given though `path` is an adapter, or is not a LoRA that leaves the base unchanged.
    """
    if is_adapter(path, kwargs.get("revision")):
        if peft_config is not None:
            raise ValueError(
                f"{path} is an adapter, and is itself trained further: leave out `use_peft` (in Python: `peft_config`)"
            )
        is_new = not has_head(path, kwargs.get("revision"))
        if not is_new:
            check_head(path, kwargs.get("revision"))
        with whole_on_each_process():
            critic = load_adapted(path, is_classifier=True, is_trainable=True, **kwargs)
        check_standalone(critic)
        if is_new:
            zero_(base_model_of(critic).score)
        return critic, f"the adapter {path}" + " with a zero head" * is_new
    with whole_on_each_process():  # else only the first process would have the weights of a new head
        critic, is_new = load_whole_critic(path, **kwargs)
    check_standalone(critic)
    if peft_config is not None:
        peft_config.task_type = "SEQ_CLS"
        check_config(peft_config, "peft_config")
        critic = get_peft_model(critic, peft_config)
    return critic, f"{path} with a zero head" if is_new else path


def check_standalone(critic: Any) -> None:
    """Raise a `ValueError` if a critic is no sequence classifier with one label, or has a quantised base."""
    model = base_model_of(critic)
    check_one_label(model, "a critic")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            "the critic's base is quantised, so the critic cannot be trained alone; load its base unquantised"
        )


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """
    Pad rows of `prompt_ids`, `completion_ids` and `returns`: prompts on the left, the others on the right.

    Returns:
        A dict of the batch:

        - `input_ids`: (B, P + T), prompt and completion.
        - `labels`: (B, T), the completion's token ids, and -100 for padding.
        - `returns`: (B, T), score units; 0 for padding.
        - `token_counts`: a list with a pair for each row: its number of prompt tokens, and of completion tokens.
    """
    prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
    labels = [torch.tensor(row["completion_ids"]) for row in rows]
    returns = [torch.tensor(row["returns"], dtype=torch.float32) for row in rows]
    padded = pad_sequence(labels, batch_first=True, padding_value=_NO_TOKEN)
    return {
        "input_ids": torch.cat(
            [pad_sequence(prompts, batch_first=True, padding_side="left"), padded.clamp(min=0)], dim=1
        ),
        "labels": padded,
        "returns": pad_sequence(returns, batch_first=True),
        "token_counts": [(len(prompt), len(completion)) for prompt, completion in zip(prompts, labels, strict=True)],
    }


class CriticTrainer(ResumableRun, Trainer):
    """
    Train a critic on the returns of saved rollouts, by PPO's value loss without clipping.

    The loss of an optimizer step is the mean of (V(s_t) − R_t)² / 2 over all of its completion tokens t, where s_t is
    the prompt with the completion tokens before t. How the rows are divided among processes and accumulated
    micro-batches does not change this mean, unless `average_tokens_across_devices` is False.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Critic: a sequence classifier with one label, plain or with an adapter. Its dropout is switched off, as in
            PPO.
        args ([`CriticConfig`]):
            Configuration.
        train_dataset, eval_dataset ([`~datasets.Dataset`]):
            Rows with `prompt_ids`, `completion_ids` and `returns`, which has one return for each completion token, as
            [`with_returns`] makes them.
        **kwargs:
            Further arguments of transformers' Trainer and [`ResumableRun`].
    """

    args: CriticConfig
    model_accepts_loss_kwargs: Any
    _signature_columns: Any

    def __init__(self, model: Any, args: CriticConfig, train_dataset: Any = None, eval_dataset: Any = None, **kwargs):
        check_standalone(model)
        kwargs.setdefault("data_collator", collate)
        super().__init__(model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        if args.n_gpu > 1:  # `nn.DataParallel` would separate packed sequences from the positions in them
            raise ValueError(
                f"One process sees {args.n_gpu} GPUs: use `accelerate launch`, or set `CUDA_VISIBLE_DEVICES=0`."
            )
        if self.processing_class is not None:
            check_pad_token(self.model, self.processing_class)
        disable_dropout(self.model)
        add_value_forward(self.model)
        self.model_accepts_loss_kwargs = True  # the Trainer counts the tokens of a step, over all processes
        self._passes = Passes(self.accelerator, args)
        self._train = Accumulator()
        self._eval = Accumulator()
        self._evaluation: EvaluationRows | None = None  # of the last evaluation; None before the first
        ConsoleCallback.replace(self)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        if self.args.record_run:
            record_run(self)
        return super().train(resume_from_checkpoint, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt_ids", "completion_ids", "returns"]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """
        Compute a micro-batch's part of the value loss; the parts of a step add up to the mean over the step's tokens.

        `num_items_in_batch` is the number of the step's tokens; None for this micro-batch's. With `return_outputs`,
        return the loss and a dict with the (B, T) `values`.
        """
        values, mask = self._values(model, inputs), inputs["labels"] != _NO_TOKEN  # (B, T) each
        loss, _ = value_loss(values, values, inputs["returns"])
        self._observe(self._train, values.detach(), inputs["returns"], mask)
        # Gradients are averaged over processes
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        loss = masked_sum(loss, mask) * processes / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"values": values}) if return_outputs else loss

    def _values(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the critic's (B, T) values of a batch."""
        ids = inputs["input_ids"]
        width = inputs["labels"].size(1)
        return self._passes(model, ids, [tuple(row) for row in inputs["token_counts"]], width)["values"]

    def _observe(self, stats: Accumulator, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        stats.add("residuals", returns - values, mask)
        stats.add("returns", returns, mask)

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        assert self._evaluation is not None
        inputs = self._prepare_inputs(inputs)
        values = self._values(model, inputs)
        mask = inputs["labels"] != _NO_TOKEN
        is_real = self._evaluation.next_are_real(len(mask), self.accelerator)
        self._observe(self._eval, values, inputs["returns"], mask & is_real[:, None])
        return None, None, None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """
        Compare the critic's values with the returns at all held-out tokens; each token counts once.

        The arguments and the output are transformers'. With `eval` as prefix, the metrics are `eval_loss`,
        `eval_loss/value_avg` (the same), `eval_val/rmse` and, unless all returns are equal,
        `eval_val/explained_variance`.
        """
        self._eval = Accumulator()
        self._evaluation = EvaluationRows(len(dataloader.dataset))
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        report = self._report(self._eval)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in report.items()})
        output.metrics[f"{metric_key_prefix}_loss"] = report["loss/value_avg"]
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if is_training_log(logs):
            logs = logs | self._report(self._train)
        super().log(logs, *args, **kwargs)

    def _report(self, stats: Accumulator) -> dict[str, float]:
        """Return the metrics of the entries in `stats`, over all processes, and delete the entries."""
        moments = stats.pop(self.accelerator)
        if not moments:  # a resumed run may log before its first step
            return {}
        residuals = moments["residuals"]
        returns = moments["returns"]
        mean_square = residuals[1].square() + variance(residuals, unbiased=False)
        report = {"loss/value_avg": 0.5 * mean_square.item(), "val/rmse": math.sqrt(mean_square.item())}
        if variance(returns) > 0:
            report["val/explained_variance"] = explained_variance(residuals, returns).item()
        return report
