"""`trl-ext constitution`: answers, critiques and revisions by a stub of the chat API and by a tiny local model."""

import json
from collections import Counter

import pytest

from tests.rewards.http_stub import serving
from tests.rewards.test_judge import says
from tests.tiny import WORDS, tiny_llama, tiny_tokenizer
from trl_ext.cli.main import main
from trl_ext.data import write_rows
from trl_ext.runs import read_jsonl
from trl_ext.workbench.feedback.revise import principle_of, turn_of

PRINCIPLES = {"short": "It is short.", "kind": "It is kind."}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(6)]
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    (tmp_path / "constitution.yaml").write_text(json.dumps({"version": "3", "principles": PRINCIPLES}))
    return tmp_path


def writer(body, _=None):
    """Answers with the step that the messages ask for."""
    messages = [message["content"] for message in body["messages"]]
    asked, turns = messages[0], len(messages)
    if turns == 1:
        said = f"answer to {asked}"
    elif turns == 3:
        said = f"critique of <{messages[1]}> by {messages[2].partition(chr(10))[0]}"
    else:
        said = messages[1] if asked == "question 5" else f"{messages[1]}, revised"
    return {**says(said), "model": "w-1", "usage": {"prompt_tokens": 10, "completion_tokens": 3}}


def run(capsys, *words):
    fixed = "--prompts prompts.jsonl --constitution constitution.yaml --output_dir out".split()
    try:
        status = main(["constitution", *fixed, *words])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, [line for line in printed.err.splitlines() if line.startswith("trl-ext ")]


def test_each_round_revises_the_newest_answer_by_another_principle(folder, capsys):
    def answer(body, _):
        if len(body["messages"]) == 5 and body["messages"][0]["content"] == "question 4":
            return {**says("no", "content_filter"), "model": "w-1"}
        return writer(body)

    with serving(answer) as (url, came):
        words = ["--model_url", url, "--model", "m", "--rounds", "2"]
        status, printed, _ = run(capsys, *words, "--only_cost", "true")
        assert status == 0 and not came and "Cost: at most 30 calls" in printed
        status, printed, error = run(capsys, *words)
        assert (status, error) == (0, []) and len(came) == 6 * 5 - 2  # no step follows a withheld answer
        assert run(capsys, *words)[0] == 0 and len(came) == 28
    sft, pairs, judged = (list(read_jsonl(f"out/{name}.jsonl")) for name in ("sft/train", "pairs/train", "to_judge"))
    assert [row["completion"][0]["content"] for row in sft][:2] == [
        f"answer to question {i}, revised, revised" for i in (0, 1)
    ]
    assert len(sft) == 5 and {row["round"] for row in sft} == {2}
    assert len(pairs) == len(judged) == 8  # two rounds of four prompts: one has no revision, one changes nothing
    assert "2 rounds without a revision" in printed and "2 revisions that change nothing" in printed
    by_prompt = Counter()
    for row, queued in zip(pairs, judged, strict=True):
        prompt, principle = row["prompt"][0]["content"], row["principle"]
        assert row["rejected"][0]["content"] == f"answer to {prompt}" and row["model"] == "w-1"
        before = f"answer to {prompt}" + ", revised" * (row["round"] - 1)
        assert row["chosen"][0]["content"] == f"{before}, revised"
        assert row["critique"] == f"critique of <{before}> by Here is a principle: {PRINCIPLES[principle]}"
        assert row["constitution"].startswith("3@") and queued[f"response_{queued['revised']}"] == row["chosen"]
        by_prompt[prompt, principle] += 1
    assert {*by_prompt.values()} == {1}, "each principle once before one comes again"
    assert {row["revised"] for row in judged} == {"a", "b"}
    page = (folder / "out/constitution.html").read_text()
    assert "It is kind." in page and "critique of &lt;answer to question 0" in page
    # The pairs are what `trl-ext label` reads
    (folder / "rubric.yaml").write_text("version: 1\nrubric: x\n")
    with pytest.raises(SystemExit) as ended:
        main("label --pairs out/to_judge.jsonl --keep_columns principle critique round revised --rubric rubric.yaml "
             "--judge_url http://127.0.0.1:1 --judge_model m --output_dir judged --min_known 20".split())  # fmt: skip
    assert ended.value.code == 1 and "8 others): 16 calls" in capsys.readouterr().out


@pytest.mark.slow
def test_a_local_model_writes_too(folder, capsys):
    tokenizer = tiny_tokenizer([*WORDS, "question"])
    tokenizer.save_pretrained("writer")
    tiny_llama(len(tokenizer), max_position_embeddings=1024).save_pretrained("writer")
    words = "--model_name_or_path writer --use_cpu true --batch_size 4".split()
    status, _, error = run(capsys, *words, "--max_tokens", "200")
    rows = list(read_jsonl("out/texts.jsonl"))
    answers = [row for row in rows if row["kind"] == "answer"]
    assert len(answers) == 6 and "read" in {row["why"] for row in rows}, error
    assert all(row["tokens"][1] <= 200 and (row["text"] is None) == (row["why"] != "read") for row in rows)


def test_messages_of_a_round():
    name = principle_of("k", 1, [*PRINCIPLES], 0)
    revise = turn_of("k", "p", 2, {0: "a", 1: "c"}, PRINCIPLES, 0)
    assert [message["content"] for message in revise.messages][:2] == ["p", "a"] and revise.principle == name
    again = turn_of("k", "p", 3, {0: "a", 1: "c", 2: "r"}, PRINCIPLES, 0)
    assert [message["content"] for message in again.messages][:2] == ["p", "r"] and again.principle != name
    assert turn_of("k", "p", 3, {0: "a", 1: "c", 2: None}, PRINCIPLES, 0) is None
