"""Find phrases that chosen answers contain more often than chance explains."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import regex

from .texts import UNSPACED as UNSPACED

WORD = regex.compile(rf"[{UNSPACED}]\p{{M}}*|[^\W{UNSPACED}]+(?:['’][^\W{UNSPACED}]+)*|[^\w\s]")
_SENTENCE = regex.compile(r"[^\p{Sentence_Terminal}…\n]*(?:\p{Sentence_Terminal}|…)*")
_LONGER = 0.25  # share of an n-gram's occurrences that a longer one must have to be taken instead
Gram = tuple[str, ...]


def mine_phrases(
    chosen: Sequence[str],
    rejected: Sequence[str],
    *,
    longest: int = 16,
    least: int = 20,
    level: float = 0.05,
    most: int = 20,
) -> list[str]:
    """Return phrases that chosen answers contain more often than rejected answers, the most one-sided first.

    Each n-gram is put to the vote of the pairs in which exactly one answer has it. A pair votes s = +1 if this is the
    chosen answer, else −1. The vote's weight w is the words of the pair's other answer ÷ the words of both, because a
    longer answer has more n-grams anyway. If the labels were tossed coins, or followed length alone, Σ s·w would have
    mean 0, and by Hoeffding's inequality P(Σ s·w ≥ t·√Σw²) ≤ exp(−t²/2). An n-gram passes if Σ s·w is above t·√Σw²,
    with t = √(2 ln(m / level)) for m n-grams (Bonferroni). So if the labels are tossed coins, the probability that any
    n-gram passes is at most `level`, however the n-grams depend on each other.

    The n-grams that pass become phrases in the order of the lower bound (Σ s·w − t·√Σw²) / Σw, the highest first. A
    longer one that passes, and that covers a quarter of an n-gram's occurrences, is taken in its place. The phrase's
    occurrences are then taken out of the texts: other n-grams must pass by what is left.

    Words are case-folded. A punctuation mark is a word, and so is a character of a script without spaces. An n-gram
    lies within one sentence and one line. If a text occurs in several pairs, as where answers are ranked, the pairs'
    labels are not independent of each other, and more phrases may be returned than `level` promises.

    Args:
        chosen, rejected: (N,) the answers of each pair, as texts. A pair that occurs twice counts once.
        longest: largest number of words of a phrase.
        least: number of pairs in which exactly one answer must have the phrase; a rarer phrase may be chance.
        level: largest probability that any phrase is returned if the labels are tossed coins.
        most: largest number of phrases to return.

    Returns:
        Up to `most` phrases, written as the answers have them.
    """
    words = _Words([text for pair in sorted(set(zip(chosen, rejected, strict=True))) for text in pair])
    found = words.frequent(longest, least)
    counted = {gram: votes for gram, places in found.items() if len(votes := words.votes(places)) >= least}
    t = math.sqrt(2 * math.log(max(len(counted), 1) / level))
    passing = {gram: value for gram, votes in counted.items() if (value := _bound(votes, t)) > 0}
    covered: set[int] = set()
    phrases: list[str] = []

    def left(gram: Gram) -> tuple[list[int], float]:
        """Return the places of an n-gram that no phrase covers, and the bound by these alone."""
        places = [at for at in found[gram] if covered.isdisjoint(range(at, at + len(gram)))]
        return places, _bound(words.votes(places), t)

    queue = [(-value, gram) for gram, value in passing.items()]
    heapq.heapify(queue)
    while queue and len(phrases) < most:
        _, popped = heapq.heappop(queue)
        gram, (places, value) = popped, left(popped)
        if value <= 0:
            continue
        if queue and value < -queue[0][0]:  # with what is left of it, it comes later
            heapq.heappush(queue, (-value, popped))
            continue
        while longer := [
            (len(at), each, at)
            for each in passing
            if len(each) == len(gram) + 1 and gram in (each[1:], each[:-1])
            for at, value_of_longer in [left(each)]
            if value_of_longer > 0 and len(at) >= _LONGER * len(places)
        ]:
            _, gram, places = max(longer)
        if gram != popped:
            heapq.heappush(queue, (-value, popped))
        covered |= {at + k for at in places for k in range(len(gram))}
        phrases.append(words.written(places[0], len(gram)))
    return phrases


def _bound(votes: list[tuple[int, float]], t: float) -> float:
    """Return the lower confidence bound of the mean vote; if it is above 0, chance does not explain the votes."""
    weights = sum(weight for _, weight in votes)
    deviation = math.sqrt(sum(weight**2 for _, weight in votes))
    return (sum(sign * weight for sign, weight in votes) - t * deviation) / weights if weights else -1.0


class _Words:
    """Hold the words of all answers in one list. Texts 2i and 2i + 1 are the chosen and rejected answer of pair i."""

    def __init__(self, texts: list[str]):
        self.texts = texts
        self.words: list[str] = []  # an empty word ends a sentence
        self.owner: list[int] = []  # the text of each word
        self.spans: list[tuple[int, int]] = []  # its place in the text
        for number, text in enumerate(texts):
            for sentence in _SENTENCE.finditer(text):
                for match in (*WORD.finditer(text, *sentence.span()), None):
                    self.words.append(match[0].casefold() if match else "")
                    self.spans.append(match.span() if match else (0, 0))
                    self.owner.append(number)
        self.sizes = Counter(number for word, number in zip(self.words, self.owner, strict=True) if word)

    def votes(self, places: Iterable[int]) -> list[tuple[int, float]]:
        """Return the sign and the weight of each pair in which exactly one text has one of the places."""
        having = {self.owner[place] for place in places}
        alone = (number for number in having if number ^ 1 not in having)
        return [(1 - 2 * (i % 2), self.sizes[i ^ 1] / (self.sizes[i] + self.sizes[i ^ 1])) for i in alone]

    def frequent(self, longest: int, least: int) -> dict[Gram, list[int]]:
        """Return the places of each n-gram that `least` texts or more have."""
        found: dict[Gram, list[int]] = {}
        starts: Iterable[int] = range(len(self.words))
        for n in range(1, longest + 1):
            level: dict[Gram, list[int]] = defaultdict(list)
            for place in starts:
                level[tuple(self.words[place : place + n])].append(place)
            for gram in [*level]:
                if "" in gram or len({self.owner[place] for place in level[gram]}) < least:
                    del level[gram]
            found |= level
            # An (n+1)-gram is two n-grams that are both frequent enough, at one place and the next
            frequent = {place for places in level.values() for place in places}
            starts = sorted(place for place in frequent if place + 1 in frequent)
        return found

    def written(self, place: int, size: int) -> str:
        """Return `size` words from a place on, as their text has them."""
        return self.texts[self.owner[place]][self.spans[place][0] : self.spans[place + size - 1][1]]
