"""The form in which trainers get rows, and the split: no prompt is in a completion, and none is in both splits."""

import itertools

import pytest
from datasets import Dataset, IterableDataset

from trl_ext.data import hold_out_prompts, one_form, prompt_hashes, usable_pairs


def turn(role, content):
    return [{"role": role, "content": content}]


ASKED, SYSTEM = turn("user", "the cat"), turn("system", "on")
TEXT = {"prompt": "the cat ", "chosen": "sat on", "rejected": "ran"}
CHAT = {"prompt": ASKED, "chosen": turn("assistant", "sat on"), "rejected": turn("assistant", "ran")}
BLOCKS = turn("user", [{"type": "text", "text": "the cat"}])


def whole(row, before=()):
    """The row with answers that begin with its prompt; of messages, with those of `before` in front."""
    begin = row["prompt"] if isinstance(row["prompt"], str) else [*before, *row["prompt"]]
    return {**row, **{name: begin + row[name] for name in ("chosen", "rejected")}}


def chat_in_other_shapes():
    yield whole(CHAT), CHAT
    yield {**whole(CHAT), "prompt": "the cat"}, CHAT  # as in ultrafeedback_binarized
    yield {**whole(CHAT), "prompt": SYSTEM + ASKED}, {**CHAT, "prompt": SYSTEM + ASKED}
    yield whole(CHAT, SYSTEM), {**CHAT, "prompt": SYSTEM + ASKED}
    yield {**whole(CHAT), "prompt": BLOCKS}, {**CHAT, "prompt": BLOCKS}
    yield {**CHAT, "prompt": "the cat"}, CHAT
    yield {**TEXT, "prompt": ASKED}, CHAT


@pytest.mark.parametrize("given, expected", [(whole(TEXT), TEXT), *chat_in_other_shapes()])
def test_answers_are_cut_off_their_prompt(given, expected, capsys):
    made = one_form(Dataset.from_list([given] * 3), "the rows")
    assert made.to_list() == [expected] * 3
    assert capsys.readouterr().out.count("3 of 3 rows") == 1  # warned once
    assert one_form(made, "the rows") is made and not capsys.readouterr().out
    if isinstance(given["chosen"], list):
        stream = IterableDataset.from_generator(lambda: iter([given]), features=Dataset.from_list([given]).features)
        assert list(one_form(stream, "a stream")) == [expected]


def test_useless_pairs_are_refused_or_left_out(capsys):
    def talk(text):
        return [{"role": "assistant", "content": text}]

    texts = {"chosen": ["a", "", None, "a", "a"], "rejected": ["b", "b", "b", "a", "b"]}
    chats = {"chosen": [talk("a")] * 3, "rejected": [talk("b"), talk(" "), talk("a")], "prompt": ["p"] * 3}
    for rows, kept in ((texts, [0, 4]), (chats, [0])):
        dataset = Dataset.from_dict({**rows, "row": range(len(rows["chosen"]))})
        with pytest.raises(ValueError, match=rf"the data: {len(dataset) - len(kept)} of {len(dataset)} pairs .*row 1"):
            usable_pairs(dataset, "the data")
        assert usable_pairs(dataset, "the data", drop=True)["row"] == kept
        assert f"the data: {len(dataset) - len(kept)} of {len(dataset)} pairs" in capsys.readouterr().out


def test_rows_are_read_in_batches(monkeypatch):
    """One by one, 200,000 rows take 15 seconds."""
    monkeypatch.setattr(Dataset, "__iter__", None)
    dataset = Dataset.from_list([TEXT] * 1001 + [{**TEXT, "chosen": "ran"}])
    assert one_form(dataset, "the data") is dataset
    with pytest.raises(ValueError, match=r"the data: 1 of 1,002 pairs .*row 1001"):
        usable_pairs(dataset, "the data")


# ---- Equal prompts and held-out rows ----


def test_a_prompt_is_the_same_in_every_shape():
    shapes = ["the cat", " The  cat ", ASKED, SYSTEM + ASKED, BLOCKS]
    hashes = [prompt_hashes(Dataset.from_list([{"prompt": shape}]))[0] for shape in shapes]
    assert len({*hashes}) == 1 and hashes[0]
    others = ["the dog", SYSTEM, SYSTEM + turn("user", "the dog"), ASKED * 2]
    others = [prompt_hashes(Dataset.from_list([{"prompt": shape}]))[0] for shape in others]
    assert len({*others, *hashes}) == 4  # "the dog" is there twice


def several(count=40, answers=3):
    """Pairs of all answers to each prompt."""
    for prompt in range(count):
        for a, b in itertools.combinations(range(answers), 2):
            yield {"prompt": f"ask {prompt} ", "chosen": f"say {prompt} {a}", "rejected": f"say {prompt} {b}"}


SHAPES = {
    "text": lambda row: row,
    "text without a prompt": lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")},
    "messages": lambda row: {
        name: turn("user", row["prompt"]) + turn("assistant", row[name]) for name in ("chosen", "rejected")
    },
    "SFT": lambda row: {"messages": turn("user", row["prompt"]) + turn("assistant", row["chosen"])},
    "rollouts": lambda row: {"prompt_ids": [int(row["prompt"].split()[1])], "completion_ids": [len(row["chosen"])]},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eval_size", [1, 60])
def test_no_prompt_is_in_both_splits(shape, eval_size, capsys):
    rows = [{**SHAPES[shape](row), "n": n} for n, row in enumerate(several())]
    train, held_out = hold_out_prompts(Dataset.from_list(rows), eval_size, seed=eval_size)
    numbers = [sorted(each["n"]) for each in (train, held_out)]
    assert sorted(sum(numbers, [])) == list(range(len(rows)))
    assert not {n // 3 for n in numbers[0]} & {n // 3 for n in numbers[1]}  # three pairs per prompt
    assert len(held_out) == max(eval_size // 3 * 3, 3)
    said = f"{len(held_out)} of 120 rows, all rows of {len(held_out) // 3} of the 40 prompts."
    assert said in capsys.readouterr().out
    again = hold_out_prompts(Dataset.from_list(rows), eval_size, seed=eval_size)
    assert [each["n"] for each in again] == [each["n"] for each in (train, held_out)]
    assert hold_out_prompts(Dataset.from_list(rows), eval_size, seed=99)[1]["n"] != held_out["n"]


def test_distinct_prompts_are_split_as_datasets_splits_rows():
    rows = Dataset.from_dict({"prompt": [f"ask {n}" for n in range(50)]})
    expected = rows.train_test_split(7, seed=3)
    assert [part["prompt"] for part in hold_out_prompts(rows, 7, seed=3)] == [
        expected[part]["prompt"] for part in ("train", "test")
    ]


def test_rows_of_one_prompt_are_split_with_a_warning(capsys):
    rows = Dataset.from_dict({"prompt": ["go"] * 9, "n": list(range(9))})
    train, held_out = hold_out_prompts(rows, 4, seed=0)
    assert (len(train), len(held_out)) == (5, 4) and "9 rows have the same prompt" in capsys.readouterr().out
