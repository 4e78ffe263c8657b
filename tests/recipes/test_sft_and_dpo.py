"""SFT trains on completions; DPO has its reference and held-out rows."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import dpo, sft
from recipes.demo.model import make_model, make_tokenizer
from tests.recipes.small_runs import arguments, rows_of
from trl_ext.callbacks import curve
from trl_ext.workbench.pages.recorded import read_run

pytestmark = pytest.mark.slow


def nll(folder, rows):
    """Mean negative log-likelihood of the completions' tokens, EOS included."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"] + "</s>")["input_ids"]])
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :]
        total, count = total - logprobs.sum().item(), count + len(logprobs)
    return total / count


def test_sft_learns_the_completions(inputs, tmp_path):
    sft.main(arguments("sft", inputs, tmp_path, steps=12))
    rows = rows_of(inputs / "sft")
    assert nll(tmp_path, rows) < nll(inputs / "model", rows) - 1
    # The loss is on completions only: the prompt's tokens do not count
    evaluated = json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"]
    assert evaluated == pytest.approx(nll(tmp_path, rows_of(inputs / "sft", "test")), rel=0.02)


def test_dpo_has_its_reference_and_held_out_rows(inputs, tmp_path, capsys):
    drift = "--beta_controller drift --drift_target 0.001 --drift_horizon 100 --record_run true".split()
    dpo.main(arguments("dpo", inputs, tmp_path / "whole", *drift))
    report = json.loads((tmp_path / "whole" / "eval_results.json").read_text())
    assert f"held-out preference accuracy {report['eval_rewards/accuracies']:.1%}" in capsys.readouterr().out
    assert report["eval_logps/drift"] > 0 and report["eval_beta"] > 0.1
    steps, losses = curve(read_run(tmp_path / "whole").history, "eval_loss")
    assert steps == [0, 4] and losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference

    make_model(make_tokenizer(), 1).save_pretrained(tmp_path / "reference")
    more = ["--ref_model_name_or_path", tmp_path / "reference", "--eval_size", "20", "--learning_rate", "0"]
    dpo.main(arguments("dpo", inputs, tmp_path / "out", *more, steps=1))
    report = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert report["eval_logps/drift"] > 0.05  # without a step: the reference is not the policy
