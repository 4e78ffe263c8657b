"""The generate recipe, against a plain loop over tokens without padding and cache.

As a script, the runs of each of two processes."""

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.generate import main
from tests.launch import on_two_processes
from tests.recipes.small_runs import refusal, write_rows
from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer
from trl_ext.workbench import next_answer

ROWS = ["the cat sat on", "dog", "a bird flew over the log and then", "sad"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny_tokenizer(pad=False)
    for name, model in (("model", tiny_llama(seed=1)), ("gpt2", tiny_gpt2(seed=3))):
        model.generation_config.no_repeat_ngram_size = 1  # must not change the sampling, as in PPO
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    chat = [{"prompt": [{"role": "user", "content": row}]} for row in ROWS]
    five = [{"prompt": row} for row in [*ROWS, "the very happy"]]
    return write_rows(folder, text=five[:-1], chat=chat, five=five)


def answer(inputs, output, *more, model="model", data="text.jsonl"):
    flags = ["--model_name_or_path", str(inputs / model), "--dataset_name", str(inputs / data), "--use_cpu", "true"]
    main([*flags, "--output_file", str(output), "--max_new_tokens", "8", "--batch_size", "3", *more])
    return [json.loads(line) for line in output.read_text().splitlines()]


@torch.no_grad()
def greedy(folder, text):
    """The likeliest 8 tokens, or fewer up to EOS, each by a pass over the whole text so far."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(text)["input_ids"]
    start = len(ids)
    while len(ids) < start + 8 and (len(ids) == start or ids[-1] != 2):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return {"text": tokenizer.decode(ids[start:], skip_special_tokens=True), "finished": ids[-1] == 2}


@pytest.mark.parametrize("model", ["model", "gpt2", "adapter"])
def test_greedy_answers_are_the_likeliest_tokens_until_eos(inputs, tmp_path, model):
    rows = answer(inputs, tmp_path / "out.jsonl", "--temperature", "0", model=model)
    assert [row["prompt"] for row in rows] == ROWS
    for row in rows:
        assert {"text": row["completion"], "finished": row["finished"]} == greedy(inputs / model, row["prompt"])


def test_saved_rollouts_have_the_sampled_tokens_and_the_other_columns(inputs, tmp_path):
    """Decoded, the tokens are the completions, and EOS is there exactly where `finished` is true."""
    write_rows(tmp_path, data=[{"prompt": row, "finished": "theirs", "topic": i} for i, row in enumerate(ROWS)])
    rows = answer(
        inputs, tmp_path / "out.jsonl", "--num_samples", "2", "--rollouts", "true", data=tmp_path / "data.jsonl"
    )
    tokenizer = tiny_tokenizer(pad=False)
    assert {row["finished"] for row in rows} == {True, False}
    for i, row in enumerate(rows):
        assert row["topic"] == i // 2 and row["prompt_ids"] == tokenizer(ROWS[i // 2])["input_ids"]
        assert (row["completion_ids"][-1] == 2) == row["finished"]
        assert tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]


def test_an_existing_file_is_not_overwritten(inputs, capsys):
    words = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "text.jsonl"]
    assert "exists: choose another" in refusal(capsys, main, [*words, "--output_file", inputs / "text.jsonl"])


def test_the_command_that_a_recipe_prints_at_its_end_works(inputs, subtests, tmp_path, capsys):
    folder = tmp_path / "my model"
    folder.symlink_to(inputs / "model")
    user = [{"role": "system", "content": "be sad"}, {"role": "user", "content": "the cat"}]
    on_cpu, args = ["--use_cpu", "true"], SimpleNamespace(output_dir=folder, use_cpu=True)
    for row, asked in [
        ({"prompt": "the cat's dog"}, ["the cat's dog", *on_cpu]),
        ({"messages": user}, ["the cat", *on_cpu, "--chat", "true"]),
    ]:
        with subtests.test(row=row):
            program, command, *flags = shlex.split(next_answer(args, Dataset.from_list([row])))
            assert [program, command, flags[3:]] == ["trl-ext", "generate", asked]
            main(flags)
            assert capsys.readouterr().out


def of_each_process(folder):
    """Answers to five prompts in batches of two, in a file; and one on the terminal, saved as text."""
    inputs = folder / "inputs"
    answer(inputs, folder / "two.jsonl", "--batch_size", "2", data="five.jsonl")
    terminal = io.StringIO()
    with contextlib.redirect_stdout(terminal):
        main(
            [
                "--model_name_or_path",
                str(inputs / "model"),
                "--prompt",
                ROWS[0],
                "--max_new_tokens",
                "8",
                "--num_samples",
                "3",
            ]
        )
    state = PartialState()
    seen = {"processes": state.num_processes, "terminal": terminal.getvalue()}
    torch.save(seen, folder / f"process {state.process_index}.pt")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_answer_as_one_and_each_prompt_once(inputs, tmp_path):
    (tmp_path / "inputs").symlink_to(inputs)
    one = answer(inputs, tmp_path / "one.jsonl", "--batch_size", "2", data="five.jsonl")
    assert [row["prompt"] for row in one] == [*ROWS, "the very happy"]

    ((first, second),) = on_two_processes(("tests.recipes.test_generate_recipe", tmp_path))
    assert first["processes"] == second["processes"] == 2
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert len(first["terminal"].splitlines()) == 3 and not second["terminal"], (
        "one process answers one prompt's batch"
    )


if __name__ == "__main__":
    of_each_process(Path(sys.argv[1]))
