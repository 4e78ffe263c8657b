"""`trl-ext prompts`: prompts of data sets, left-out rows, splits, the report, the copies, the bounds."""

import json
import random
import re

import numpy as np
import pytest
from datasets import Dataset

from tests.evaluation.test_words import corpus
from trl_ext import load_dataset_split
from trl_ext.workbench.reports import PromptSet, divide, examine_prompts, left_out
from trl_ext.workbench.reports.prompts import main, write_rows

LONG = "please write a short story about a brave knight who loses his sword in a dark and quiet forest"
ANSWER = "the quick brown fox jumps over the lazy dog and then it sleeps all day long"


def made(name, **columns):
    return PromptSet(name, Dataset.from_dict(columns))


def test_shared_prompts_are_reported_and_left_out():
    """Preference rows with two pairs of one prompt, RL prompts, and an evaluation set that leaks into both."""
    rl = [f"question number {i} about topic {i * 7} and place {i * 13} please" for i in range(40)]
    report = examine_prompts(
        [
            made("pref", prompt=[LONG, LONG, LONG, "what is 1 + 1"], chosen=[*"aba", "2"], rejected=[*"cdc", "3"]),
            made("rl", prompt=[*rl, rl[3].upper(), "", "  ", None]),
            made("eval", prompt=[LONG.replace("brave", "shy"), rl[5], "something of its own"]),
        ]
    )
    assert report.shared("eval", ["pref", "rl"], "near").tolist() == [True, True, False]
    assert report.shared("eval", ["pref", "rl"], "exact").tolist() == [False, True, False]
    assert np.flatnonzero(report.repeated("rl", "exact")).tolist() == [40]

    def reasons(**kwargs):
        return {name: {i: why for i, why in enumerate(of) if why} for name, of in left_out(report, **kwargs).items()}

    empty = {41: "empty", 42: "empty", 43: "empty"}
    shared = "shared with a held-out set"
    assert reasons() == {"pref": {2: "duplicate"}, "rl": {40: "duplicate", **empty}, "eval": {}}
    near = reasons(held_out=["eval"])
    assert near == {"pref": dict.fromkeys(range(3), shared), "rl": {5: shared, 40: "duplicate", **empty}, "eval": {}}
    assert reasons(remove="none", held_out=["eval"]) == {"pref": {}, "rl": empty, "eval": {}}


def test_no_group_is_in_two_splits():
    rng = random.Random(0)
    texts = corpus(1, size=150)
    report = examine_prompts([made(name, prompt=rng.sample(texts, 200)) for name in ("a", "b", "sft")])
    shares = {"train": 0.7, "test": 0.3}
    splits = divide(report, left_out(report, "none"), shares, ["a", "b"], ["length", "script"])
    where = {}
    for name in ("a", "b"):
        for group, split in zip(report.duplicates.near[report.places[name]], splits[name], strict=True):
            where.setdefault(group, set()).add(split)
    assert max(map(len, where.values())) == 1 and set(shares) == set.union(*where.values())
    undivided = {*report.duplicates.near[report.places["sft"]].tolist()}
    assert all(split == {"train"} for group, split in where.items() if group in undivided)


def test_chat_is_compared_by_all_turns_or_the_last():
    def chat(*contents):
        return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]

    joke = "tell me a joke please"
    sets = [
        made("chat", prompt=[chat("hello", "yes", joke), chat(joke), chat("hello", "yes", "what is the time")]),
        made("sft", messages=[chat(joke, "no"), chat("hello", "yes", joke, "ha")]),
        made("pref", chosen=[chat(joke, "no"), chat(joke, "ha")]),
        made("text", prompt=[joke.title()]),
    ]
    assert examine_prompts(sets).duplicates.exact.tolist() == [0, 1, 2, 1, 0, 1, 1, 1]
    assert examine_prompts(sets, by="last_turn").duplicates.exact.tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    assert sets[1].answers() == ["no", "ha"] == sets[2].answers()


# ---- The command ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """SFT and RL prompts with a near and an exact duplicate of the evaluation set; pairs with SFT's answer."""
    monkeypatch.chdir(tmp_path)
    asked = [f"how do i get from place {i} to place {i * 7} before {i % 12} o'clock <b>&amp;" for i in range(60)]
    rl = enumerate([*asked, asked[3].upper(), ""])
    chat = [{"role": "user", "content": "你好"}]
    sets = {
        "rl": [{"prompt": text, "topic": "ab"[i % 3 == 0], "x": i / 3} for i, text in rl],
        "sft": [{"prompt": LONG, "completion": ANSWER}, {"prompt": "b", "completion": "no"}],
        "pairs": [{"prompt": chat, "chosen": chosen, "rejected": "x"} for chosen in (ANSWER, "other")],
        "eval": [{"prompt": LONG.replace("brave", "shy")}, {"prompt": asked[5]}, {"prompt": "of its own"}],
    }
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(capsys, words):
    """Exit status, what was printed, and the last line of errors."""
    try:
        main(words.split())
        status = 0
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, (printed.err.splitlines() or [""])[-1]


ALL = "--sets sft=sft.jsonl pairs=pairs.jsonl rl=rl.jsonl eval=eval.jsonl"


@pytest.mark.slow
def test_report_and_copies(folder, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    outputs = []
    for output in ("one", "two"):
        words = f"{ALL} --split train=0.8 test=0.2 --stratify topic --split_sets rl --copied_from sft"
        status, printed, _ = run(capsys, f"{words} --output_dir {output}")
        assert status == 0 and printed.startswith(f"Report: {output}/prompts.html\n")
        files = sorted((folder / output).rglob("*.*"))
        outputs.append({path.relative_to(folder / output).as_posix(): path.read_bytes() for path in files})
    assert outputs[0] == outputs[1]  # the seed decides
    assert {name: (folder / name).read_bytes() for name in before} == before
    found = json.loads(outputs[0]["prompts.json"])["sets"]
    assert found["rl"]["left_out"] == {"empty": 1, "shared with a held-out set": 1, "duplicate": 1}
    # Other answers make other rows; the held-out prompts stay
    assert [found[name]["kept"] for name in ("rl", "sft", "pairs", "eval")] == [59, 1, 2, 3]
    assert found["eval"]["shared_near"] == 2 and found["pairs"]["copied"] == 1
    splits = {split: load_dataset_split("one/rl", split).to_list() for split in ("train", "test")}
    given = load_dataset_split("rl.jsonl").to_list()
    kept = sorted((row for split in splits.values() for row in split), key=lambda row: row["x"])
    assert kept == [row for i, row in enumerate(given) if i not in (5, 60, 61)]
    assert abs(len(splits["test"]) - 12) <= 2
    assert load_dataset_split("one/sft.jsonl").to_list() == [{"prompt": "b", "completion": "no"}]
    assert "你好" in outputs[0]["pairs.jsonl"].decode()

    page = outputs[0]["prompts.html"].decode()
    assert "&lt;b&gt;&amp;amp;" in page and not re.search(r"<b>&amp;|<script|(src|href)=.http", page)


@pytest.mark.slow
def test_a_broken_bound_ends_with_one_sentence(folder, capsys):
    status, _, said = run(capsys, f"{ALL} --output_dir out --max_overlap eval=0.7 --max_duplicates rl=0.01")
    assert status == 1 and "1 of 62 rows of 'rl' (1.61%) have a duplicate before them in the set" in said
    bounds = json.loads((folder / "out/prompts.json").read_text())["bounds"]
    assert [bound["broken"] for bound in bounds] == [False, True] and (folder / "out/rl.jsonl").is_file()
    assert run(capsys, f"{ALL} --output_dir y --copied_from sft --max_copied pairs=0.4")[0] == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("--sets Rl=rl.jsonl --held_out rl --output_dir new", "'rl' is not one of `sets`"),
        ("--sets rl=rl.jsonl --output_dir .", "'rl' is a set whose data are in `output_dir`"),
        ("--sets ../rl=rl.jsonl --output_dir new", "'../rl' cannot name a file"),
        ("--sets rl=rl.jsonl --max_copied rl=0.1 --output_dir new", "'rl' has a bound in `max_copied`"),
        (f"{ALL} --copied_from sft --max_copied rl=0.1 --output_dir new", "'rl', a set without answers"),
    ],
)
def test_leaks_and_overwrites_are_refused_at_once(folder, capsys, words, message):
    status, printed, said = run(capsys, words)
    assert status == 2 and ": error: " in said and message in said and not printed


def test_a_shipped_configuration_and_an_interrupted_run(folder, capsys, monkeypatch):
    words = "--config labels/prompts --sets rl=rl.jsonl eval=eval.jsonl --output_dir out"
    status, _, said = run(capsys, words)
    assert status == 1 and "of 'eval'" in said
    assert {path.name for path in (folder / "out/rl").iterdir()} == {"train.jsonl", "test.jsonl"}

    def write(path, rows):
        if path.stem == "test":
            raise KeyboardInterrupt
        write_rows(path, rows)

    monkeypatch.setattr("trl_ext.workbench.reports.prompts.write_rows", write)
    with pytest.raises(KeyboardInterrupt):
        run(capsys, f"{words} --seed 1")
    assert [path.name for path in (folder / "out/rl").iterdir()] == ["train.jsonl"]  # not the other seed's test split
