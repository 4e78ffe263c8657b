import json

import pytest

from recipes.hh_rlhf import main, split_dialogue, split_pair

QUESTION = "\n\nHuman: What is a dog?\n\nAssistant: An animal.\n\nHuman: And a\n\ncat?"


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_consecutive_turns_are_one_message_and_a_colon_is_no_turn():
    text = "\n\nHuman: a\n\nHuman: b\n\nAssistant:\n\nAssistant: I say, Human: no\nAssistant: x"
    assert split_dialogue(text) == [user("a\n\nb"), assistant("I say, Human: no\nAssistant: x")]


def test_a_pair_is_a_prompt_and_two_answers_with_their_paragraphs():
    pair = split_pair(f"{QUESTION}\n\nAssistant: One, too.", f"{QUESTION}\n\nAssistant: No.\n\nIdea. ")
    assert pair["prompt"] == [user("What is a dog?"), assistant("An animal."), user("And a\n\ncat?")]
    assert pair["chosen"] == [assistant("One, too.")] and pair["rejected"] == [assistant("No.\n\nIdea.")]


def test_a_row_that_is_no_pair_raises(subtests):
    for chosen, rejected in [
        (f"{QUESTION}\n\nAssistant: x", f"{QUESTION} or not?\n\nAssistant: y"),
        (f"{QUESTION}\n\nAssistant: x", f"{QUESTION}\n\nAssistant:"),
        ("\n\nAssistant: x", "\n\nAssistant: y"),
        ("Good day", "Good day"),
    ]:
        with subtests.test(rejected=rejected), pytest.raises(ValueError, match="leave the pair out"):
            split_pair(chosen, rejected)


def test_the_script_writes_three_folders_without_shared_prompts(tmp_path, capsys):
    rows = [
        {"chosen": f"\n\nHuman: q{i}\n\nAssistant: good {i % 7}", "rejected": f"\n\nHuman: q{i}\n\nAssistant: bad"}
        for i in [*range(40), 3]
    ]
    rows += [{"chosen": "\n\nHuman: q", "rejected": "\n\nHuman: q\n\nAssistant: x"}]
    (tmp_path / "hh").mkdir()
    for split in ("train", "test"):
        (tmp_path / "hh" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["--dataset_name", str(tmp_path / "hh"), "--output_dir", str(tmp_path / "out")])

    def read(name):
        return [json.loads(line) for line in (tmp_path / "out" / name / "train.jsonl").read_text().splitlines()]

    assert "train: 41 pairs, 1 left out" in capsys.readouterr().out
    assert read("preference")[3] == split_pair(**rows[3])
    sft, ppo = ([row["prompt"][0]["content"] for row in read(name)] for name in ("sft", "prompts"))
    assert set(sft) | set(ppo) == {f"q{i}" for i in range(40)} and not set(sft) & set(ppo)
    assert len(set(ppo)) == len(ppo) and 10 < len(ppo) < 30  # each prompt once; about half
    answers = {row["prompt"][0]["content"]: row["chosen"] for row in read("preference")}
    assert all(row["completion"] == answers[row["prompt"][0]["content"]] for row in read("sft"))
