"""With its options off, DPOTrainer has the bits of TRL's; with them on, the loss is that of the formulas."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from tests.dpo.worker import (
    DRIFT,
    INFORMED,
    NORMALIZED,
    controller_state,
    logged,
    make_trainer,
    make_trl_trainer,
    pairs,
    weights,
)
from tests.tiny import tiny_llama

LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")}
# Length-normalised, with an option, of the whole batch, without a reference
SPECIAL_CASES = ["ipo", "exo_pair", "aot_unpaired", "sft"]


def assert_same_run(ours, theirs):
    """Compare bits, except for `sft`, whose sum over tokens is divided in another order."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "sft" in ours.loss_types else {"rtol": 0, "atol": 0}
    names = ("rewards/chosen", "rewards/margins", "logps/rejected", "entropy") if logged(theirs, "entropy") else ()
    for name in ("loss", "grad_norm", *names):
        assert_close(logged(ours, name), logged(theirs, name), **tolerance)
    assert_close(weights(ours), weights(theirs), **tolerance)


@pytest.mark.parametrize(
    "loss_types", [["sigmoid"], pytest.param(SPECIAL_CASES, marks=pytest.mark.slow)], ids=["sigmoid", "special cases"]
)
def test_with_options_off_each_loss_has_trls_bits(subtests, loss_types, tmp_path):
    for loss_type in loss_types:
        with subtests.test(loss_type=loss_type):
            kwargs = {"loss_type": loss_type} | ({"label_smoothing": 0.1} if loss_type == "exo_pair" else {})
            ours, theirs = make_trainer(tmp_path, **kwargs), make_trl_trainer(tmp_path, **kwargs)
            ours.train(), theirs.train()
            assert_same_run(ours, theirs)
            assert not logged(ours, "beta")


@pytest.mark.slow
def test_trls_options_give_trls_losses_with_the_tap_and_without(subtests, tmp_path):
    for kwargs in [
        {"precompute_ref_log_probs": True},
        {"use_weighting": True},
        {"ld_alpha": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
        {"bf16": True},
        {"lora": True, "precompute_ref_log_probs": True},
        {"lora": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    ]:
        with subtests.test(kwargs=kwargs):
            kwargs = dict(kwargs)
            peft = LORA if kwargs.pop("lora", False) else {}
            theirs = make_trl_trainer(tmp_path, trainer_kwargs=dict(peft), **kwargs)
            theirs.train()
            for option in ({}, {"log_displacement": True}):
                ours = make_trainer(tmp_path, trainer_kwargs=dict(peft), **kwargs, **option)
                ours.train()
                assert_same_run(ours, theirs)


# ---- Closed forms ----


def log_ratios(trainer, row):
    """Log-ratios of policy to reference of a row's two completions, each computed alone from the logits."""
    ratios = []
    for name in ("chosen_ids", "rejected_ids"):
        ids = torch.tensor([row["prompt_ids"] + row[name]])
        both = []
        for model in (trainer.model, trainer.ref_model):
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits.double().log_softmax(-1)
            start = len(row["prompt_ids"])
            both.append(sum(logprobs[0, t - 1, ids[0, t]].item() for t in range(start, ids.shape[1])))
        ratios.append(both[0] - both[1])
    return ratios


def first_loss(trainer, size=8):
    """The loss of the first rows of the dataset in training mode, and the rows."""
    rows = trainer.train_dataset.select(range(size))
    trainer.model.train()
    return trainer.compute_loss(trainer.model, trainer.data_collator(list(rows))), list(rows)


def test_the_informed_loss_is_the_formula(tmp_path):
    trainer = make_trainer(tmp_path, tiny_llama(seed=3), {"ref_model": tiny_llama()}, margin_scale=0.5, **INFORMED)
    loss, rows = first_loss(trainer)
    expected = 0.0
    for row in rows:
        chosen, rejected = log_ratios(trainer, row)
        z = 0.1 * (chosen - rejected - 2.0 * max(0.0, -chosen)) - 0.5 * (row["score_chosen"] - row["score_rejected"])
        sigma = 1 / (1 + math.exp(-z))
        c = row["confidence"]
        expected += row["weight"] * -(c * math.log(sigma) + (1 - c) * math.log(1 - sigma)) / len(rows)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_informed_loss_has_only_its_own_gradient(tmp_path):
    """TRL's sigmoid term is switched off, not added."""
    neutral = pairs().map(lambda row: {"weight": 1.0, "confidence": 1.0, "margin": 0.0})
    neutral = neutral.remove_columns(["score_chosen", "score_rejected"])
    options = {"use_margin": True, "use_confidence": True, "use_weight": True, "loss_type": ["sigmoid", "sft"]}
    options |= {"loss_weights": [0.5, 0.25], "ld_alpha": 0.5}
    ours = make_trainer(tmp_path, trainer_kwargs={"train_dataset": neutral}, **options)
    theirs = make_trl_trainer(tmp_path, **{name: options[name] for name in ("loss_type", "loss_weights", "ld_alpha")})
    ours.train(), theirs.train()
    assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=1e-5, atol=0)
    assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    assert ours.loss_weights == [0.5, 0.25]


@pytest.mark.slow
def test_the_tokens_of_a_step_have_equal_weight_in_any_micro_batch(tmp_path):
    mixed, ends = {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0]}, []
    for batch in (8, 4, 2, 1):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
        trainer = make_trainer(tmp_path, **mixed, **sizes)
        trainer.train()
        ends.append(weights(trainer))
        assert_close(ends[-1], ends[0], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_drift_follows_its_rule_and_does_not_depend_on_accumulation(tmp_path):
    whole = make_trainer(tmp_path, **DRIFT, **NORMALIZED, per_device_train_batch_size=8)
    parts = make_trainer(tmp_path, **DRIFT, **NORMALIZED, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    whole.train(), parts.train()
    betas, drifts = logged(whole, "beta"), logged(whole, "logps/drift")
    beta = 0.1
    for logged_beta, drift in zip(betas, drifts, strict=True):
        assert logged_beta == pytest.approx(beta, rel=1e-6)
        beta *= 1 + min(max(drift / 0.3 - 1, -0.2), 0.2) * 8 / 20
    assert whole.beta == pytest.approx(beta, rel=1e-6) and min(betas) < 0.1 < max(*betas, whole.beta)
    assert_close(logged(parts, "beta"), betas, rtol=1e-4, atol=0)
    assert_close(parts.margin_normalizer.factors, whole.margin_normalizer.factors, rtol=1e-4, atol=0)
    assert_close(weights(parts), weights(whole), rtol=1e-4, atol=2e-5)


def test_margins_are_normalized_by_source(tmp_path):
    trainer = make_trainer(tmp_path, tiny_llama(seed=3), {"ref_model": tiny_llama()}, **NORMALIZED)
    first_loss(trainer)
    assert trainer.margin_normalizer.factors.tolist() == [1, 1, 1]  # within a step nothing changes
    trainer.margin_normalizer.step()
    loss, rows = first_loss(trainer)
    margins = torch.tensor([chosen - rejected for chosen, rejected in (log_ratios(trainer, row) for row in rows)])
    long = torch.tensor([row["source"] == "long" for row in rows])
    # Equal numbers of each: σ̄ is the harmonic mean
    stds = torch.where(long, margins[long].std(), margins[~long].std())
    beta = 0.1 * 2 / (1 / margins[long].std() + 1 / margins[~long].std()) / stds
    assert beta.mean().item() == pytest.approx(0.1) and beta.max() > 0.11
    assert_close(loss.detach(), -logsigmoid(beta * margins).mean(), rtol=1e-4, atol=0)
    assert trainer.beta == 0.1


# ---- Evaluation, metrics, other paths through TRL's method ----


@pytest.mark.slow
def test_evaluation_changes_no_state(tmp_path):
    kwargs = {"trainer_kwargs": {"eval_dataset": pairs(8, seed=5)}, "per_device_train_batch_size": 8}
    ends = []
    for strategy in ("no", "steps"):
        trainer = make_trainer(
            tmp_path, **kwargs, **DRIFT, **NORMALIZED, **INFORMED, eval_strategy=strategy, eval_steps=1
        )
        trainer.train()
        ends.append((logged(trainer, "beta"), controller_state(trainer), weights(trainer)))
        if strategy == "steps":
            # the β of the next step
            assert logged(trainer, "eval_beta") == [*logged(trainer, "beta")[1:], trainer.beta]
    assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_displacement_metrics_are_those_of_the_definitions(tmp_path):
    kwargs = {"ref_model": tiny_llama(), "eval_dataset": pairs(8)}
    trainer = make_trainer(tmp_path, tiny_llama(seed=3), kwargs, log_displacement=True)
    metrics = trainer.evaluate()
    ratios = [log_ratios(trainer, row) for row in trainer.eval_dataset]
    assert metrics["eval_logps/chosen_delta"] == pytest.approx(sum(c for c, _ in ratios) / 8, rel=1e-4)
    assert metrics["eval_logps/displacement_rate"] == sum(c < 0 and c > r for c, r in ratios) / 8
    assert metrics["eval_logps/drift"] == pytest.approx(sum(abs(c) + abs(r) for c, r in ratios) / 16, rel=1e-4)


def test_the_reference_of_a_peft_model_is_its_initial_adapter(tmp_path):
    """TRL copies the adapter to one named `ref`."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LORA["peft_config"])
    trainer = make_trainer(tmp_path, model, **DRIFT)
    trainer.train()
    assert logged(trainer, "logps/drift")[0] == 0  # the reference is not the base model
    assert logged(trainer, "rewards/accuracies")[0] == 0.5  # all pairs are tied
    assert logged(trainer, "logps/drift")[-1] > 0.01
