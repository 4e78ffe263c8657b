import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from recipes.sft import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "sft").mkdir()
    for split, rows in make_world(0, demonstrations=64, pairs=1, prompts=1, held_out=32)["sft"].items():
        (folder / "sft" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


def arguments(inputs, output_dir, *more):
    return [
        *("--config", str(ROOT / "recipes/demo/sft.yaml"), "--model_name_or_path", str(inputs / "model")),
        *("--dataset_name", str(inputs / "sft"), "--output_dir", str(output_dir)),
        *("--use_cpu", "true", "--disable_tqdm", "true", *more),
    ]


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


@pytest.mark.slow
def test_it_learns_the_completions(inputs, tmp_path):
    short = ["--max_steps", "8", "--warmup_steps", "0", "--num_train_epochs", "4", "--eval_strategy", "epoch"]
    main(arguments(inputs, tmp_path / "whole", *short))
    rows = [json.loads(line) for line in (inputs / "sft" / "train.jsonl").read_text().splitlines()]
    assert nll(tmp_path / "whole", rows) < nll(inputs / "model", rows) - 1
    evaluated = json.loads((tmp_path / "whole" / "eval_results.json").read_text())["eval_loss"]
    held_out = [json.loads(line) for line in (inputs / "sft" / "test.jsonl").read_text().splitlines()]
    # The loss is on completions only: the prompt's tokens have no part in it
    assert evaluated == pytest.approx(nll(tmp_path / "whole", held_out), rel=0.02)


def test_a_model_that_is_nowhere_is_one_line(inputs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments(inputs, tmp_path / "out"), "--model_name_or_path", str(tmp_path / "absent")])
    assert "absent" in capsys.readouterr().err.strip().splitlines()[-1]
