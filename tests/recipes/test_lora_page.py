"""Run the commands of docs/lora.md as they stand, with a tiny model instead of the hub's."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from peft import PeftConfig
from transformers import AutoModelForCausalLM

from tests.tiny import prompts, tiny_llama, tiny_tokenizer
from trl_ext.cli.main import TRAINING, run_here

PAGE = Path(__file__).parents[2] / "docs/lora.md"


@pytest.mark.slow
def test_from_sft_to_a_merged_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = "Qwen/Qwen2.5-0.5B-Instruct"
    tiny_llama(max_position_embeddings=1024).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    asked = prompts(40).select_columns("prompt")
    asked.to_json("prompts.jsonl")
    asked.take(4).map(lambda row: {"prompt": f"sky sky {row['prompt']}"}).to_json("held_out.jsonl")
    asked.add_column("completion", [" the cat sat on the mat"] * 40).to_json("demonstrations.jsonl")
    pairs = asked.add_column("chosen", [" the cat sat"] * 40).add_column("rejected", [" a dog"] * 40)
    pairs.to_json("pairs.jsonl")

    page = PAGE.read_text()
    lines = re.search(r"(?s)```bash\n(.*?)```", page)[1].replace("\\\n", " ").splitlines()
    dpo = " ".join(re.search(r"(?s)`(trl-ext dpo .*?)`", page)[1].split())
    for line in [*lines, dpo]:
        _, command, *words = shlex.split(line)
        if command in TRAINING:  # as the page says for a CPU
            words += ["--use_cpu", "true", "--bf16", "false"]
        assert run_here(command, words) == 0
    printed = capsys.readouterr().out
    policies = json.loads(Path("outputs/c-evaluation/evaluation.json").read_text())["policies"]
    assert math.isfinite(policies["c-ppo"]["kl"]["mean"])
    assert "logits differ from the adapter model's by up to" in printed
    AutoModelForCausalLM.from_pretrained("outputs/merged")
    for name in ("c-sft", "c-reward", "c-ppo", "c-ppo/critic", "c-dpo"):
        assert PeftConfig.from_pretrained(f"outputs/{name}").base_model_name_or_path == base
    assert "base of its own" not in printed  # the reward model shares the policy's
