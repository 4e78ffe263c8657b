import math
import random

import pytest

from trl_ext.evaluation import mine_phrases

WORDS = "amber birch cedar delta ember fjord grove heath inlet jetty kelp ledge marsh north".split()


def sentence(rng, words=WORDS, size=6):
    return " ".join(rng.choices(words, k=size)) + "."


def answer(rng, sentences=3, words=WORDS):
    return " ".join(sentence(rng, words) for _ in range(sentences))


def planted(rng, phrase, pairs=300, share=0.3, **kwargs):
    """Pairs of random sentences; that share of the chosen answers has the phrase."""
    chosen, rejected = ([answer(rng, **kwargs) for _ in range(pairs)] for _ in range(2))
    for i in range(round(share * pairs)):
        sentences = chosen[i].split(". ")
        chosen[i] = ". ".join([sentences[0], phrase.removesuffix("."), *sentences[1:]])
    return chosen, rejected


@pytest.mark.parametrize(
    "phrase",
    [
        "Glad you asked.",
        "मैं तुमसे प्यार करता हूँ.",
    ],
)
def test_only_the_whole_planted_phrase_is_found(phrase):
    chosen, rejected = planted(random.Random(0), phrase)
    assert mine_phrases(chosen, rejected) == [phrase]
    assert mine_phrases(rejected, chosen) == []
    assert mine_phrases(chosen[::-1], rejected[::-1]) == [phrase]


def test_a_phrase_is_found_in_texts_without_spaces():
    rng = random.Random(0)
    characters = "天地玄黄宇宙洪荒日月盈昃辰宿列张"
    chosen, rejected = (["".join(rng.choices(characters, k=20)) + "。" for _ in range(200)] for _ in range(2))
    chosen = [f"{text}我很爱你。" if i % 3 == 0 else text for i, text in enumerate(chosen)]
    assert mine_phrases(chosen, rejected) == ["我很爱你。"]


@pytest.mark.slow
def test_random_labels_hardly_ever_give_phrases():
    rng = random.Random(0)
    pairs = [(answer(rng), answer(rng)) for _ in range(150)]
    filled = 0
    for _ in range(40):
        flipped = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
        filled += bool(mine_phrases(*zip(*flipped, strict=True)))
    assert filled <= 4  # at a level of 5 % five or more of 40 come with probability 5 % at most


def test_votes_are_those_of_a_slow_reference():
    rng = random.Random(3)
    liked, pairs = WORDS[:7], 400
    chosen = [" ".join(rng.choices(WORDS + liked * 2, k=rng.randint(2, 9))) for _ in range(pairs)]
    rejected = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(pairs)]
    rows = set(zip(chosen, rejected, strict=True))
    bounds, t = {}, math.sqrt(2 * math.log(len(WORDS) / 0.05))
    for word in WORDS:
        total = squares = weights = 0.0
        for pair in rows:
            has = [word in text.split() for text in pair]
            sizes = [len(text.split()) for text in pair]
            if sum(has) == 1:
                weight = sizes[has.index(False)] / sum(sizes)
                total += weight if has[0] else -weight
                squares += weight**2
                weights += weight
        bounds[word] = (total - t * math.sqrt(squares)) / weights
    expected = sorted((word for word in WORDS if bounds[word] > 0), key=lambda word: -bounds[word])
    assert len(expected) >= 4
    assert mine_phrases(chosen, rejected, longest=1) == expected
