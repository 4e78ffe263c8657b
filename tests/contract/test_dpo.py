"""What our DPOTrainer relies on, observed on a plain `trl.DPOTrainer`."""

import ast
import dataclasses
import inspect
import math
import textwrap

import torch
import trl
from trl.trainer.utils import FusedCausalLMOutput

from tests.contract import observed
from tests.dpo.worker import QUIET, make_trl_trainer, pairs as dpo_pairs
from tests.tiny import tiny_llama, tiny_tokenizer
from trl_ext.data.pairs import PAIR_COLUMNS
from trl_ext.dpo import DPOConfig, config as dpo_config

LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)


def require(condition, changed):
    observed.require(condition, changed, "DPOTrainer")


def trl_loss(trainer, chosen, rejected, beta, loss_type, label_smoothing=0.1):
    """Return TRL's loss of these log-ratios; what else it reads is set while it calls the stand-in for the model."""
    trainer.loss_types, trainer.loss_weights, trainer.label_smoothing = [loss_type], [1.0], label_smoothing
    # Two tokens each: the first is the prompt, the second the completion
    log_probs = torch.tensor([[c] for c in chosen] + [[r] for r in rejected])
    ids = torch.tensor([[5, 6]] * len(log_probs))
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "completion_mask": torch.tensor([[0, 1]] * len(ids))}

    def stand_in(**kwargs):
        require(kwargs.get("fused_lm_head"), "the model is called without `fused_lm_head`")
        trainer.beta = torch.tensor(beta)
        inputs["ref_chosen_logps"] = inputs["ref_rejected_logps"] = torch.zeros(len(chosen))
        zeros = torch.zeros_like(log_probs)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer.precompute_ref_logps = True
    return trainer._compute_loss(stand_in, inputs, False).item()


def test_beta_and_the_reference_are_read_after_the_forward(tmp_path):
    trainer = make_trl_trainer(tmp_path)
    got = trl_loss(trainer, [1.0, -2.0], [0.5, 1.0], [0.2, 0.4], "sigmoid")
    expected = sum(math.log1p(math.exp(-z)) for z in (0.2 * 0.5, 0.4 * -3.0)) / 2
    require(math.isclose(got, expected, rel_tol=1e-6), f"the loss of set β and references is {got}, not {expected}")
    mode = "train" if trainer.model.training else "eval"
    margins = trainer._metrics[mode]["rewards/margins"]
    want = (0.2 * 0.5 + 0.4 * -3.0) / 2
    require(
        isinstance(margins[-1], float) and math.isclose(margins[-1], want, rel_tol=1e-5),
        "`rewards/margins` is no longer the mean of β times the margins, appended as a float",
    )
    trainer.loss_weights = [0.0]
    trainer.loss_types = ["sigmoid"]
    output = trl_loss(trainer, [math.nan, 0.0], [0.5, 1.0], [0.2, 0.4], "sigmoid")
    require(math.isnan(output) and math.isnan(margins[-1]), "a NaN does not reach `rewards/margins`")


def test_losses_are_those_of_the_config(tmp_path):
    source = textwrap.dedent(inspect.getsource(trl.DPOTrainer._compute_loss))
    compared = {
        node.comparators[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "loss_type"
    }
    require(compared == {*LOSSES}, f"the losses are {sorted(compared)}")

    trainer, pairs_ = make_trl_trainer(tmp_path), ([1.0, -2.0, 0.3], [0.5, 1.0, -0.4])
    twice = [[2 * ratio for ratio in ratios] for ratios in pairs_]
    shifted = [[ratio + 1.0 for ratio in ratios] for ratios in pairs_]
    for loss_type in LOSSES:
        loss = trl_loss(trainer, *pairs_, 0.2, loss_type)
        same = {
            "β": loss == trl_loss(trainer, *pairs_, 0.3, loss_type),
            "β·Δ": math.isclose(loss, trl_loss(trainer, *twice, 0.1, loss_type), rel_tol=1e-5)
            and math.isclose(loss, trl_loss(trainer, *shifted, 0.2, loss_type), rel_tol=1e-5),
            "smoothing": loss == trl_loss(trainer, *pairs_, 0.2, loss_type, label_smoothing=0.3),
        }
        # Where a loss sorts the pairs or divides by lengths, a vector of β is not a factor of Δ
        of_margin = same["β·Δ"] and not same["β"] and loss_type not in ("aot", "aot_unpaired", "sigmoid_norm")
        for what, is_so, names in (
            ("sees β", not same["β"], {*LOSSES} - dpo_config.WITHOUT_BETA),
            ("sees β as β·Δ only", of_margin, dpo_config.OF_BETA_TIMES_MARGIN),
            ("reads `label_smoothing`", not same["smoothing"], dpo_config.READS_LABEL_SMOOTHING),
        ):
            require(is_so == (loss_type in names), f"that '{loss_type}' {what} is now {is_so}")


def test_batches_and_columns(tmp_path):
    trainer = make_trl_trainer(tmp_path)
    rows = list(trainer.train_dataset.select(range(2)))
    keys = {"input_ids", "attention_mask", "completion_mask"}
    require(set(trainer.data_collator(rows)) == keys, "the collator makes other columns than these")
    for name in ("prompt_ids", "chosen_ids", "rejected_ids", "source", "weight"):
        require(name in rows[0], f"a prepared dataset has no `{name}` any more")
    trainer._set_signature_columns_if_needed()
    require("chosen_ids" in trainer._signature_columns, "`_signature_columns` is no list of kept columns")
    require(not {*PAIR_COLUMNS} & {*trainer._signature_columns}, "TRL has a column of ours")
    sums = trainer.compute_ref_log_probs(trainer.ref_model, trainer.data_collator(rows))
    require([tuple(s.shape) for s in sums] == [(2,), (2,)], "`compute_ref_log_probs` returns other shapes")


def test_config_has_no_field_of_ours():
    theirs = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    taken = theirs & {*vars(DPOConfig)["__annotations__"]}
    require(not taken, f"DPOConfig has {sorted(taken)}, too")


def test_sync_gradients_and_early_metrics(tmp_path):
    complete = []

    class ObservedDPO(trl.DPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            complete.append(self.accelerator.sync_gradients)
            return loss

    args = trl.DPOConfig(str(tmp_path), **{**QUIET, "gradient_accumulation_steps": 2, "max_steps": 2})
    given = {"train_dataset": dpo_pairs(), "processing_class": tiny_tokenizer(), "ref_model": tiny_llama()}
    trainer = ObservedDPO(tiny_llama(), args=args, **given)
    trainer._metrics["train"]["before"].append(7.0)
    trainer.train()
    require(complete == [False, True] * 2, f"`sync_gradients` is {complete} after the micro-batches of two steps")
    early = trainer.state.log_history[0].get("before")
    require(early == 7.0, "what is in `_metrics` before training is not logged")
