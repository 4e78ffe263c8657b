"""`trl-ext evaluate`: known figures, errors and warnings, and completions that are reused."""

import itertools
import json

import pytest
from datasets import Dataset
from peft import LoraConfig

from tests.tiny import prompts, tiny_llama, tiny_ppo, tiny_tokenizer
from trl_ext.cli.main import main
from trl_ext.data import load_trained_prompts, prompt_hashes, save_trained_prompts
from trl_ext.dpo import ResumableSFTTrainer, SFTConfig
from trl_ext.runs import read_jsonl
from trl_ext.workbench.reports.answers import check_held_out, margins, mean_of, win_rate

REWARDS = """
def words(completions, **kwargs):
    return [float(len(str(text).split())) for text in completions]
def first(completions, baseline, **kwargs):  # a judge that likes the place of an answer, not the answer
    return [1.0] * len(completions)
"""
FAST = "--max_completion_length 6 --use_cpu true".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two policies, and a third with another tokenizer; prompts as text, and one as messages."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("sft", "ppo", "other")):
        tiny_llama(seed=seed).save_pretrained(name)
        (tiny_tokenizer() if seed < 2 else tiny_tokenizer(["x", "y"])).save_pretrained(name)
    (tmp_path / "rewards.py").write_text(REWARDS)
    prompts(6).to_json("prompts.jsonl")
    chat = [{"prompt": [{"role": "user", "content": "the <b>cat</b>"}]}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    return tmp_path


def run(capsys, *words):
    """What was printed, and the line of an error."""
    try:
        status = main(["evaluate", *words, *FAST])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err.strip()


@pytest.mark.slow
def test_policies_side_by_side(folder, capsys):
    words = "sft ppo --prompts prompts.jsonl --rewards rewards.py:words --judge rewards.py:first".split()
    status, printed, error = run(capsys, *words)
    assert (status, error) == (0, "")
    found = json.loads((folder / "evaluation/evaluation.json").read_text())
    sft, ppo = found["policies"].values()
    rows = {name: list(read_jsonl(folder / f"evaluation/answers/{name}.jsonl")) for name in ("sft", "ppo")}
    assert [row["prompt"] for row in rows["sft"]] == prompts(6)["prompt"][:] == [row["prompt"] for row in rows["ppo"]]
    lengths = {name: [len(row["completion_ids"]) for row in of] for name, of in rows.items()}
    assert sft["length"] == mean_of(lengths["sft"]) and ppo["length"] == mean_of(lengths["ppo"])
    assert ppo["cut_off"] == sum(not row["finished"] for row in rows["ppo"]) / 6
    assert sft["kl"]["mean"] == 0 and sft["win_rates"] == {}  # the reference and baseline
    assert ppo["kl"]["mean"] == pytest.approx(sum(row["kl"] for row in rows["ppo"]) / 6) and ppo["kl"]["mean"] > 1
    ours, theirs = ([row["scores"]["words"] for row in rows[name]] for name in ("ppo", "sft"))
    assert ppo["win_rates"]["words"]["wins"] == sum(a > b for a, b in zip(ours, theirs, strict=True))
    assert ppo["win_rates"]["the judge"] == {**win_rate([0.0] * 6, range(6))}  # equal from both folders
    assert "whether ppo was trained on some of these prompts" in (folder / "evaluation/evaluation.html").read_text()

    again = run(capsys, *words)[1]
    assert (
        again.splitlines()[0] == "sft: 6 answers, read from an earlier run"
        and again.splitlines()[2:] == printed.splitlines()[2:]
    )
    assert "earlier run" not in run(capsys, *words, "--seed", "1")[1]  # not mixed
    tiny_llama(seed=9).save_pretrained("ppo")
    lines = run(capsys, *words, "--seed", "1")[1].splitlines()
    assert lines[:2] == ["sft: 6 answers, read from an earlier run", "ppo: 6 answers"]


@pytest.mark.slow
def test_prompts_of_a_run_are_refused(folder, capsys):
    rows = prompts(6).select([0, 1, 2, 3] * 2)
    trainer = tiny_ppo(folder / "run", "sft", max_steps=1, record_run=True, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    assert set(load_trained_prompts("run/checkpoint-1")) == set(prompt_hashes(prompts(6).select(range(4))))
    status, _, error = run(capsys, "sft", "run", "--prompts", "prompts.jsonl")
    assert status == 2 and "run was trained on 4 of 6 prompts (row 0 " in error
    # The model that it starts from counts
    rows = Dataset.from_list([{"messages": [{"role": r, "content": r} for r in ("user", "assistant")]}])
    save_trained_prompts("next", rows, start="run")
    alone = Dataset.from_list([{"prompt": [{"role": "user", "content": "User"}]}])
    assert set(load_trained_prompts("next")) == {*prompt_hashes(alone), *load_trained_prompts("run")}


def test_prompts_of_a_run_are_refused_in_other_shapes(tmp_path):
    turn = {"role": "user", "content": "the cat"}
    shapes = ["the cat", [turn], [{"role": "system", "content": "on"}, turn]]
    shapes.append([{**turn, "content": [{"type": "text", "text": "the cat"}]}])
    for trained, asked in itertools.product(shapes, shapes):
        save_trained_prompts(tmp_path, Dataset.from_list([{"prompt": trained, "completion": "sat"}]))
        with pytest.raises(ValueError, match="run was trained on 1 of 1 prompts"):
            check_held_out({"run": str(tmp_path)}, Dataset.from_list([{"prompt": asked}]))


@pytest.mark.slow
def test_a_continued_and_merged_adapter_keeps_the_prompts_of_its_first_run(folder, capsys):
    def train(model, rows, output_dir, **kwargs):
        args = SFTConfig(output_dir, max_steps=1, use_cpu=True, report_to="none", eos_token="</s>", disable_tqdm=True)
        rows = Dataset.from_list([{"prompt": f"the {row} ", "completion": "cat"} for row in rows])
        trainer = ResumableSFTTrainer(model, args, train_dataset=rows, **kwargs)
        trainer.train()
        trainer.save_model()
        return set(prompt_hashes(rows))

    first = train("sft", ["one", "two"], "one", peft_config=LoraConfig(r=2, target_modules="all-linear"))
    second = train("one", ["three"], "two")
    assert set(load_trained_prompts("two")) == first | second
    main("merge --adapter two --output_dir merged".split())
    assert set(load_trained_prompts("merged")) == first | second


@pytest.mark.slow
def test_warnings_and_errors(folder, capsys):
    status, printed, error = run(capsys, "sft", "other", "--prompts", "chat.jsonl", "--output_dir", "out")
    assert (status, error) == (0, "")
    assert "other and the reference sft have different vocabularies" in printed
    found = json.loads((folder / "out/evaluation.json").read_text())
    assert found["policies"]["other"]["kl"] is None
    assert "&lt;b&gt;cat" in (folder / "out/evaluation.html").read_text()
    for words, why in (("sft --prompts chat.jsonl --baseline ppo", "not one of the policies"),):
        status, _, error = run(capsys, *words.split())
        assert status == 2 and why in error and "\n" not in error, words


def test_figures():
    assert mean_of([1.0, None, 3.0]) == {"mean": 2.0, "standard_error": 1.0, "count": 2}  # s = √2, ÷ √2
    assert margins([1.0, None], [3.0, 1.0]) == [-2.0, None]
    found = win_rate([1.0, 0.0, -1.0, 2.0, None], "abcde")
    assert (found["win_rate"], found["wins"], found["ties"], found["losses"]) == (0.625, 2, 1, 1)
    assert found["interval"][0] < 0.625 < found["interval"][1]
    assert win_rate([1.0], "a")["interval"] is None
