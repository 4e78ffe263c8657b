"""Duplicates against brute force, n-grams, copied runs of words, and scripts."""

import random
from collections import Counter

import numpy as np
import pytest

from trl_ext.evaluation import (
    copied_shares,
    corpus_ngrams,
    find_duplicates,
    main_script,
    normalised,
    words_of,
)


def grams_of(text, n, unit, keep_short):
    parts = words_of(text) if unit == "words" else list(text)
    grams = [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
    return grams or ([tuple(parts)] if keep_short and parts else [])


def edited(rng, text, words, edits):
    text = text.split()
    for _ in range(edits):
        text[rng.randrange(len(text))] = rng.choice(words)
    return " ".join(text)


def corpus(seed=0, size=60, length=30):
    """Families of texts that differ by a few edits, in random order."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(400)]
    texts = []
    for _ in range(size):
        first = " ".join(rng.choices(words, k=rng.randrange(4, length)))
        texts += [first] + [edited(rng, first, words, rng.randrange(4)) for _ in range(rng.randrange(5))]
    rng.shuffle(texts)
    return texts


@pytest.mark.parametrize("unit, n, threshold", [("words", 3, 0.7), ("characters", 5, 0.8), ("words", 1, 1)])
def test_groups_are_those_of_brute_force(unit, n, threshold):
    texts = corpus()
    sets = [{*grams_of(text, n, unit, True)} for text in texts]
    likeness = np.array([[len(one & other) / len(one | other) for other in sets] for one in sets])
    group = list(range(len(texts)))
    for i, j in np.argwhere(likeness >= threshold).tolist():
        old, new = max(group[i], group[j]), min(group[i], group[j])
        group = [new if each == old else each for each in group]
    found = find_duplicates(texts, threshold, unit, n, seed=1)  # a seed may miss a pair at the threshold
    assert found.near.tolist() == group and max(Counter(group).values()) > 2
    assert found.exact.tolist() == [texts.index(text) for text in texts]
    np.testing.assert_allclose(found.similarity, likeness[range(len(texts)), group], rtol=1e-6)


def test_equal_texts():
    same = ["Hello World", "hello   world\n", "ｈｅｌｌｏ world", "HELLO\u200b WORLD", "hel\u00adlo world"]
    others = ["hello, world", "world hello", "héllo world"]
    found = find_duplicates([*same, *others, "", " \t"])
    assert found.exact.tolist() == [0] * 5 + [5, 6, 7, -1, -1] and found.near[8:].tolist() == [-1, -1]
    assert normalised("Straße ﬁ") == normalised("STRASSE fi")
    chinese = "今天天气很好我们一起去公园散步吧然后吃午饭"
    assert find_duplicates([chinese, chinese.replace("公园", "海边"), "别的"], 0.6).near.tolist() == [0, 0, 2]
    assert find_duplicates([]).near.tolist() == []


def test_scripts():
    assert words_of("hello  world 你好x\u3000ไท") == ["hello", "world", "你", "好", "x", "ไ", "ท"]
    texts = ["hello 你", "你好 ok 世界吗", "こんにちは世", "12 + 3", "привет", "", "हिन्दी", "12 + 30 = x"]
    expected = ["Latin", "Cjk", "Hiragana", "no letters", "Cyrillic", "no letters", "Devanagari", "Latin"]
    assert [*map(main_script, texts)] == expected


def test_copies_are_runs_of_words():
    """10 words, 4 in a row from the corpus: 1 of 7 runs of 4."""
    grams = corpus_ngrams(["one two three four five", "six seven"], 4)
    texts = ["a b c one two three four d e f", "two three four five", "one two three", "six seven one two three", ""]
    np.testing.assert_allclose(copied_shares(texts, grams, 4), [1 / 7, 1, 0, 0, 0])
    assert copied_shares(texts, corpus_ngrams([], 4), 4).tolist() == [0] * 5
