"""Duplicates against brute force, splits that nothing straddles, copies, and what a chat prompt is."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from trl_ext.data import balanced_rows, split_groups
from trl_ext.evaluation import (
    SCRIPTS,
    copied_shares,
    corpus_ngrams,
    count_words,
    find_duplicates,
    main_scripts,
    ngram_hashes,
    normalised,
    similarity_of,
)
from trl_ext.rewards.texts import words_of
from trl_ext.workbench.prompts.examine import PromptSet, examine_prompts
from trl_ext.workbench.prompts.filtering import REASONS, balance, divide, left_out, strata

ODD = [
    "",
    " \n",
    "a",
    "hello  world 你好 x",
    "ไทย ab",
    "x\ud800y z",
    "\u3000full　width\u3000",
    "one two",
    "é e\u0301 👍🏽 .",
    "日本語",
]


def grams_of(text, n, unit, keep_short):
    parts = words_of(text) if unit == "words" else list(text)
    grams = [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
    return grams or ([tuple(parts)] if keep_short and parts else [])


def edited(draw, text, words, edits):
    text = text.split()
    for _ in range(edits):
        text[draw.randrange(len(text))] = draw.choice(words)
    return " ".join(text)


def corpus(seed=0, size=60, length=30):
    """Families of texts with a few edits each, in random order."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(400)]
    texts = []
    for _ in range(size):
        first = " ".join(draw.choices(words, k=draw.randrange(4, length)))
        texts += [first] + [edited(draw, first, words, draw.randrange(4)) for _ in range(draw.randrange(5))]
    draw.shuffle(texts)
    return texts


def chats(*rows):
    return [[{"role": role, "content": content} for role, content in row] for row in rows]


# ---- N-grams ----


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("keep_short", [True, False])
def test_ngrams_are_those_of_the_rewards_words(unit, keep_short):
    """Equal n-grams have equal hashes, different ones different hashes, in the order of the texts."""
    draw = random.Random(0)
    texts = ODD + ["".join(draw.choices("ab 你ไ é", k=draw.randrange(40))) for _ in range(200)]
    for n in (1, 2, 5):
        hashes, owner = ngram_hashes(texts, n, unit, keep_short)
        expected = [(i, gram) for i, text in enumerate(texts) for gram in grams_of(text, n, unit, keep_short)]
        assert owner.tolist() == [i for i, _ in expected]
        of = dict(zip((gram for _, gram in expected), hashes.tolist(), strict=True))
        assert [of[gram] for _, gram in expected] == hashes.tolist() and len({*of.values()}) == len(of)
    assert count_words(texts).tolist() == [len(words_of(text)) for text in texts]


# ---- Duplicates ----


@pytest.mark.parametrize(
    "unit, n, threshold", [("words", 3, 0.7), ("words", 2, 0.5), ("characters", 5, 0.8), ("words", 1, 1)]
)
def test_groups_are_those_of_brute_force(unit, n, threshold):
    texts = corpus()
    sets = [{*grams_of(text, n, unit, True)} for text in texts]
    group = list(range(len(texts)))
    for i, j in itertools.combinations(range(len(texts)), 2):
        similarity = len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        if similarity >= threshold and group[i] != group[j]:
            old, new = max(group[i], group[j]), min(group[i], group[j])
            group = [new if each == old else each for each in group]
    found = find_duplicates(texts, threshold, unit, n, seed=1)  # a seed may miss a pair at the threshold
    assert found.near.tolist() == group and max(Counter(group).values()) > 2
    assert found.exact.tolist() == [texts.index(text) for text in texts]
    firsts = [len(sets[i] & sets[j]) / len(sets[i] | sets[j]) for i, j in enumerate(group)]
    np.testing.assert_allclose(found.similarity, firsts, rtol=1e-6)
    assert similarity_of(texts[0], texts[1], unit, n) == len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_a_large_bucket_of_one_text_is_one_group_and_costs_little():
    """What shares most of a long template is near, however many there are; others stay alone."""
    template = " ".join(f"t{i}" for i in range(60))
    texts = [f"{template} item {i}" for i in range(3000)] + ["something else entirely", "x"]
    found = find_duplicates(texts)
    assert {*found.near[:3000].tolist()} == {0} and found.near[3000:].tolist() == [3000, 3001]


def test_what_counts_as_the_same():
    same = ["Hello World", "hello   world\n", "ｈｅｌｌｏ world", "HELLO\u200b WORLD", "hel\u00adlo world"]
    others = ["hello, world", "world hello", "héllo world"]
    found = find_duplicates([*same, *others, "", " \t"])
    assert found.exact.tolist() == [0] * 5 + [5, 6, 7, -1, -1] and found.near[8:].tolist() == [-1, -1]
    assert normalised("Straße ﬁ") == normalised("STRASSE fi")
    chinese = "今天天气很好我们一起去公园散步吧然后吃午饭"
    assert find_duplicates([chinese, chinese.replace("公园", "海边"), "别的"], 0.6).near.tolist() == [0, 0, 2]


def test_one_row_and_none():
    assert find_duplicates(["a"]).near.tolist() == [0]
    assert find_duplicates([]).near.tolist() == [] and find_duplicates([""]).near.tolist() == [-1]
    with pytest.raises(ValueError, match=r"`threshold` must be in \(0, 1\]"):
        find_duplicates(["a"], threshold=0)


# ---- Splits ----


def test_splits_keep_groups_whole_and_shares_alike():
    draw = np.random.default_rng(0)
    groups = draw.integers(0, 2000, 4000)
    topic = draw.choice(list("aaabbc"), 2000)[groups]
    shares = {"test": 0.1, "train": 0.7, "val": 0.2}
    split = split_groups(groups, shares, topic, seed=1)
    assert all(len({*split[groups == group]}) == 1 for group in np.unique(groups)[:500])
    for value in "abc":
        for name, share in shares.items():
            rows = topic == value
            assert (split[rows] == name).sum() == pytest.approx(share * rows.sum(), abs=8)  # groups of 2 in the mean
    assert (split_groups(groups, shares, topic, seed=1) == split).all()
    assert (split_groups(groups, shares, topic, seed=2) != split).mean() > 0.2
    rare = split_groups(range(4000), {"train": 0.9, "test": 0.1}, [i % 1000 for i in range(4000)])
    assert (rare == "test").sum() == pytest.approx(400, abs=3)


def test_a_group_that_is_larger_than_a_split_goes_to_the_largest():
    groups = [0] * 50 + list(range(1, 51))
    split = split_groups(groups, {"test": 0.2, "train": 0.8})
    assert {*split[:50]} == {"train"} and (split == "test").sum() == pytest.approx(20, abs=2)


def test_balance():
    values = ["a"] * 30 + ["b"] * 10 + ["c"] * 3
    for most, counts in ((None, (3, 3, 3)), (5, (5, 5, 3)), (100, (30, 10, 3))):
        kept = balanced_rows(values, most, seed=0)
        assert tuple(Counter(np.array(values)[kept])[value] for value in "abc") == counts
    assert (balanced_rows(values, 5, seed=0) != balanced_rows(values, 5, seed=1)).any()


# ---- Sets ----


def made(**kwargs):
    """Preference rows with two pairs for one prompt, RL prompts, and an evaluation set that leaks into both."""
    long = "please write a short story about a brave knight who loses his sword in a dark and quiet forest"
    near = long.replace("brave", "shy")
    rl = [f"question number {i} about topic {i * 7} and place {i * 13} please" for i in range(40)]
    sets = [
        PromptSet(
            "pref",
            Dataset.from_dict(
                {
                    "prompt": [long, long, long, "what is one plus one"],
                    "chosen": ["a", "b", "a", "two"],
                    "rejected": ["c", "d", "c", "three"],
                }
            ),
        ),
        PromptSet("rl", Dataset.from_dict({"prompt": [*rl, rl[3].upper(), "", "  ", None], "topic": list("ab") * 22})),
        PromptSet("eval", Dataset.from_dict({"prompt": [near, rl[5], "something of its own"]})),
    ]
    return examine_prompts(sets, **kwargs)


@pytest.mark.slow
def test_what_is_shared_and_left_out():
    report = made()
    assert report.shared("eval", ["pref", "rl"], "near").tolist() == [True, True, False]
    assert report.shared("eval", ["pref", "rl"], "exact").tolist() == [False, True, False]
    assert np.flatnonzero(report.repeated("rl", "exact")).tolist() == [40]

    def reasons(**kwargs):
        found = left_out(report, **kwargs)
        return {name: {int(i): REASONS[of[i]] for i in np.flatnonzero(of)} for name, of in found.items()}

    empty = {41: "empty", 42: "empty", 43: "empty"}
    shared = "shared with a held-out set"
    assert reasons() == {"pref": {2: "duplicate"}, "rl": {40: "duplicate", **empty}, "eval": {}}
    near = reasons(held_out=["eval"])
    assert near == {"pref": dict.fromkeys(range(3), shared), "rl": {5: shared, 40: "duplicate", **empty}, "eval": {}}
    assert reasons(remove="exact", held_out=["eval"])["pref"] == {2: "duplicate"}
    assert reasons(remove="none", held_out=["eval"]) == {"pref": {}, "rl": empty, "eval": {}}


def test_no_group_is_in_two_splits_of_one_set_or_of_two():
    draw = random.Random(0)
    texts = corpus(1, size=150)
    sets = [PromptSet(name, Dataset.from_dict({"prompt": draw.sample(texts, 200)})) for name in ("a", "b", "sft")]
    report = examine_prompts(sets)
    reasons = left_out(report, "none")
    splits = divide(report, reasons, {"train": 0.7, "test": 0.3}, ["a", "b"], ["length"])
    where = {}
    for name in ("a", "b"):
        for group, split in zip(report.duplicates.near[report.places[name]], splits[name], strict=True):
            where.setdefault(group, set()).add(split)
    assert max(map(len, where.values())) == 1 and {"train", "test"} == set.union(*where.values())
    undivided = {*report.duplicates.near[report.places["sft"]].tolist()}
    assert all(split == {"train"} for group, split in where.items() if group in undivided)


def test_strata_and_balance_of_a_set():
    report = made()
    assert {value for (value,) in strata(report, "rl", ["topic"])} == {"a", "b"}
    lengths = Counter(strata(report, "rl", ["length"]))
    assert lengths == {("up to 10 words",): 44}
    reasons = balance(report, left_out(report), ["rl"], ["topic"], most=4)
    kept = np.array(report.sets["rl"].rows["topic"])[reasons["rl"] == 0]
    assert Counter(kept) == {"a": 4, "b": 4}
    with pytest.raises(
        ValueError, match=r"set 'rl' lacks the column 'subject': choose one of 'prompt', 'topic', `length`"
    ):
        strata(report, "rl", ["subject"])
    many = examine_prompts([PromptSet("s", Dataset.from_dict({"prompt": [f"p {i}" for i in range(60)]}))])
    with pytest.raises(
        ValueError, match="60 different values in the column 'prompt', in 60 rows: choose one with fewer"
    ):
        strata(many, "s", ["prompt"])


def test_chat_is_compared_by_all_turns_or_the_last():
    one = [("system", "be short"), ("user", "hello there"), ("assistant", "yes"), ("user", "tell me a joke please")]
    two = [("user", "tell me a joke please"), ("assistant", "no")]
    three = [*one[:3], ("user", "what is the time")]
    sets = [
        PromptSet("chat", Dataset.from_dict({"prompt": chats(one, two[:1], three, one)})),
        PromptSet("sft", Dataset.from_dict({"messages": chats(two, [*one, ("assistant", "ha")])})),
        PromptSet("pref", Dataset.from_dict({"chosen": chats(two, two)})),
        PromptSet("text", Dataset.from_dict({"prompt": ["Tell me a joke, please".replace(",", "")]})),
    ]
    whole = examine_prompts(sets)
    assert whole.duplicates.exact.tolist() == [0, 1, 2, 0, 1, 0, 1, 1, 1]
    last = examine_prompts(sets, by="last_turn")
    assert last.duplicates.exact.tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert len({*whole.other_view.tolist()}) == 2 and len({*last.other_view.tolist()}) == 3
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what is this"}]
    with_picture = PromptSet("p", Dataset.from_dict({"prompt": [[{"role": "user", "content": parts}]]}))
    assert with_picture.prompt(0).strip() == "what is this"
    assert sets[1].prompt(1, "last_turn") == "tell me a joke please"
    assert list(sets[1].answers()) == ["no", "ha"] and list(sets[2].answers()) == ["no", "no"]


def test_scripts():
    texts = ["hello 你", "你好 ok 世界吗", "こんにちは世", "12 + 3", "привет", "", "हिन्दी", "ᚠᚡ", "12 + 30 = x"]
    expected = ["Latin", "Han", "Kana", "no letters", "Cyrillic", "no letters", "Devanagari", "another", "Latin"]
    assert [SCRIPTS[place] for place in main_scripts(texts)] == expected


# ---- Copies ----


def test_copies_are_runs_of_words():
    """10 words, 4 in a row from the corpus: 1 of 7 runs of 4."""
    grams = corpus_ngrams(["one two three four five", "six seven"], 4)
    texts = ["a b c one two three four d e f", "two three four five", "one two three", "six seven one two three", ""]
    np.testing.assert_allclose(copied_shares(texts, grams, 4), [1 / 7, 1, 0, 0, 0])
    assert copied_shares(texts, corpus_ngrams([], 4), 4).tolist() == [0] * 5
    answer = "the quick brown fox jumps over the lazy dog and then it sleeps all day long"
    sets = [
        PromptSet("sft", Dataset.from_dict({"prompt": ["a"], "completion": [answer]})),
        PromptSet(
            "dpo", Dataset.from_dict({"prompt": ["b"] * 2, "chosen": [answer.title(), "no"], "rejected": ["", ""]})
        ),
        PromptSet("rl", Dataset.from_dict({"prompt": ["c"]})),
    ]
    report = examine_prompts(sets, copied_from=["sft"])
    assert {name: shares.tolist() for name, shares in report.copied.items()} == {"dpo": [1.0, 0.0]}


# ---- Bad input ----


def test_wrong_sets_are_one_sentence(subtests):
    for rows, column, message in [
        (
            {"question": ["a"]},
            "",
            "lacks a column 'prompt', 'messages', 'chosen', 'text'; it has 'question': name one",
        ),
        ({"prompt": ["a"]}, "text", "lacks the column 'text'; it has 'prompt'"),
        ({"prompt": []}, "", "has no rows"),
        ({"chosen": ["a"], "rejected": ["b"]}, "", "has no column 'prompt', and the texts in 'chosen' do not show"),
        ({"prompt": [1, 2]}, "", "must hold text or messages, but row 0 has 1"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            examine_prompts([PromptSet("s", Dataset.from_dict(rows), column)])
    one = PromptSet("s", Dataset.from_dict({"prompt": ["a"]}))
    for sets, kwargs, message in [
        ([one, one], {}, "with different names"),
        ([], {}, "give one set or more"),
        ([one], {"copied_from": ["s"]}, "set 's' has no answers"),
        ([one], {"copied_from": ["t"]}, "there is no set 't'"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            examine_prompts(sets, **kwargs)
