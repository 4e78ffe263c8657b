"""Find phrases that chosen answers contain more often than chance explains."""

import heapq
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import regex

from ..upstream.scripts import UNSPACED as UNSPACED

WORD = regex.compile(rf"[{UNSPACED}]\p{{M}}*|[^\W{UNSPACED}]+(?:['’][^\W{UNSPACED}]+)*|[^\w\s]")
# What ends a sentence: marks, and line breaks, which are no words
ENDS = regex.compile(r"\p{Sentence_Terminal}|…|\n")
_WORD_OR_BREAK = regex.compile(rf"{WORD.pattern}|\n")


def mine_phrases(
    chosen: Sequence[str],
    rejected: Sequence[str],
    *,
    longest: int = 6,
    least: int = 20,
    level: float = 0.05,
    together: float = 0.95,
    most: int = 20,
) -> list[str]:
    """Return phrases that chosen answers contain more often than rejected answers, the most one-sided first.

    Each n-gram is put to the vote of the pairs in which exactly one answer has it. A pair votes s = +1 if this is the
    chosen answer, else −1. The vote's weight w is the words of the pair's other answer ÷ the words of both, because a
    longer answer has more n-grams anyway. If the labels were tossed coins, or followed length alone, Σ s·w would have
    mean 0, and by Hoeffding's inequality P(Σ s·w ≥ t·√Σw²) ≤ exp(−t²/2). An n-gram passes if Σ s·w is above t·√Σw²,
    with t = √(2 ln(m / level)) for m n-grams (Bonferroni). So if the labels are tossed coins, the probability that any
    n-gram passes is at most `level`, however the n-grams depend on each other.

    The n-grams that pass become phrases in the order of the lower bound (Σ s·w − t·√Σw²) / Σw, the highest first. Each
    is first extended, as long as nearly all of its occurrences have the same word beside them. Its occurrences are
    then taken out of the texts: an n-gram that lies within the phrase, crosses its border or contains it must pass by
    its other occurrences. If an n-gram passes, and so does a longer one, with one more word, which covers at least a
    quarter of its occurrences, the longer one comes first.

    Words are case-folded. A punctuation mark is a word, and so is a character of a script without spaces. An n-gram
    lies within one sentence and one line. If a text occurs in several pairs, as where answers are ranked, the pairs'
    labels are not independent of each other, and more phrases may be returned than `level` promises.

    Args:
        chosen, rejected: (N,) the answers of each pair, as texts. A pair that occurs twice counts once.
        longest: largest number of words of the n-grams that are counted; a phrase is longer if it is extended.
        least: number of pairs in which exactly one answer must have the phrase; a rarer phrase may be chance.
        level: largest probability that any phrase is returned if the labels are tossed coins.
        together: share of a phrase's occurrences that must have the same word beside them, for the phrase to be
            extended by this word.
        most: largest number of phrases to return.

    Returns:
        Up to `most` phrases, written as the answers have them.

    Raises:
        ValueError: there are not as many rejected as chosen answers, or an answer is not a text.
    """
    if len(chosen) != len(rejected) or not all(isinstance(text, str) for text in (*chosen, *rejected)):
        raise ValueError(
            f"chosen and rejected must be equally many texts, got {len(chosen)} and {len(rejected)} values: give a "
            "chosen and a rejected text for each pair; of a conversation, the text of its answer"
        )
    pairs = sorted(set(zip(chosen, rejected, strict=True)))
    texts = _Texts([text for pair in pairs for text in pair])
    grams = [gram for n in _levels(texts, longest, least) for gram in n]
    t = math.sqrt(2 * math.log(max(len(grams), 1) / level))
    waiting = {gram: strength for gram, votes in grams if (strength := _strength(votes, t)) > 0}
    queue = [(-strength, gram) for gram, strength in waiting.items()]
    heapq.heapify(queue)
    covered = np.zeros(len(texts.words) + 1, bool)
    phrases: list[str] = []
    while queue and len(phrases) < most:
        place, gram = heapq.heappop(queue)
        del waiting[gram]
        at = texts.occurrences(gram)
        at = at[~covered[at[:, None] + np.arange(len(gram))].any(1)]
        place = max(place, -_strength(texts.votes(texts.owner[at]), t))  # by the occurrences that are left
        if place >= 0:
            continue
        # An n-gram that is largely a part of longer ones comes after them, with its remaining occurrences
        place = max([place, *(1e-9 - waiting[longer] for longer in texts.longer(gram, at, waiting))])
        if place < 0 and queue and place > queue[0][0] + 1e-12:
            waiting[gram] = -place
            heapq.heappush(queue, (place, gram))
            continue
        at, length = texts.grown(at, len(gram), together, covered)
        covered[at[:, None] + np.arange(length)] = True
        phrases.append(texts.written(at[0], length))
    return phrases


class _Texts:
    """Hold the words of all answers as numbers. Texts 2i and 2i + 1 are the chosen and rejected answer of pair i."""

    def __init__(self, texts: list[str]):
        numbers: dict[str, int] = {}  # of words as written
        folded: dict[str, int] = {}
        parts, lengths = [np.zeros(0, np.int32)], []
        for text in texts:
            found = _WORD_OR_BREAK.findall(text)
            for word in found:
                if word not in numbers:
                    numbers[word] = folded.setdefault(word.casefold(), len(folded))
            parts.append(np.fromiter(map(numbers.__getitem__, found), np.int32, len(found)))
            lengths.append(len(found))
        self.texts = texts
        self.lengths = np.array(lengths, np.int64)
        self.words = np.concatenate(parts)
        self.owner = np.repeat(np.arange(len(texts)), self.lengths)
        self.starts = np.cumsum(self.lengths) - self.lengths
        ends = [number for word, number in folded.items() if ENDS.fullmatch(word)]
        is_end = np.isin(self.words, ends)
        begins = np.ones(len(self.words), bool)
        self.is_break = self.words == folded.get("\n", -1)
        begins[1:] = (self.owner[1:] != self.owner[:-1]) | (is_end[:-1] & ~is_end[1:])
        begins[1:] |= self.is_break[1:] | self.is_break[:-1]
        self.sentence = np.append(begins.cumsum(), -1)  # of each word; and -1, no sentence, for the end of the words
        self.order = np.argsort(self.words, kind="stable")
        self.firsts = np.searchsorted(self.words[self.order], np.arange(len(folded) + 1))

    def votes(self, owners: np.ndarray) -> tuple[float, float, float]:
        """Return Σ s·w, Σw² and Σw over the pairs with exactly one text in `owners`, those with the phrase."""
        owners = np.unique(owners)
        alone = owners[~np.isin(owners ^ 1, owners)]
        weights = self.weights[alone]
        signed = np.where(alone % 2, -weights, weights)
        return signed.sum(), (weights**2).sum(), weights.sum()

    @property
    def weights(self) -> np.ndarray:
        """Return for each text the words of the pair's other text ÷ the words of both."""
        both = self.lengths.reshape(-1, 2)
        return (both[:, ::-1] / np.maximum(both.sum(1, keepdims=True), 1)).ravel()

    def occurrences(self, gram: tuple[int, ...]) -> np.ndarray:
        """Return the places where the words of `gram` follow each other within one sentence."""
        k = min(range(len(gram)), key=lambda k: self.firsts[gram[k] + 1] - self.firsts[gram[k]])
        at = self.order[self.firsts[gram[k]] : self.firsts[gram[k] + 1]] - k
        at = at[(at >= 0) & (at + len(gram) <= len(self.words))]
        at = at[self.sentence[at] == self.sentence[at + len(gram) - 1]]
        for i, word in enumerate(gram):
            at = at[self.words[at + i] == word]
        return at

    def longer(
        self, gram: tuple[int, ...], at: np.ndarray, known: Collection[tuple[int, ...]], share: float = 0.25
    ) -> list[tuple[int, ...]]:
        """
        Return the n-grams in `known` that are `gram` with one more word, before or after it.

        `at` holds places where `gram` occurs. Leave out an n-gram that occurs at less than `share` of these places.
        """
        found = []
        for offset in (len(gram), -1):
            beside = at + offset  # before the first word this is -1, the place of the end, which is in no sentence
            beside = beside[self.sentence[beside] == self.sentence[at]]
            words, counts = np.unique(self.words[beside], return_counts=True)
            for word in words[counts >= share * len(at)].tolist():
                found.append((word, *gram) if offset < 0 else (*gram, word))
        return [longer for longer in found if longer in known]

    def grown(self, at: np.ndarray, length: int, together: float, covered: np.ndarray) -> tuple[np.ndarray, int]:
        """
        Extend a phrase, as long as nearly all of its occurrences `at` have the same word beside them.

        Words that are `covered` by another phrase are not taken. Return the places where the extended phrase occurs,
        and its length in words.
        """
        grew = True
        while grew:
            grew = False
            for offset in (length, -1):
                beside = at + offset
                inside = (self.sentence[beside] == self.sentence[at]) & ~covered[beside]
                counts = np.bincount(self.words[beside[inside]], minlength=1)
                if counts.max() >= together * len(at):
                    at = at[inside & (self.words[np.where(inside, beside, 0)] == counts.argmax())]
                    at, length, grew = at + min(offset, 0), length + 1, True
                    break
        return at, length

    def written(self, at: int, length: int) -> str:
        """Return `length` words from place `at` on, written as in their text."""
        text = self.texts[self.owner[at]]
        spans = [match.span() for match in _WORD_OR_BREAK.finditer(text)]
        first = at - self.starts[self.owner[at]]
        return text[spans[first][0] : spans[first + length - 1][1]]


def _strength(votes: tuple[float, float, float], t: float) -> float:
    """Return the lower confidence bound of the mean vote; if it is above 0, chance does not explain the votes."""
    total, squares, weight = votes
    return (total - t * math.sqrt(squares)) / weight if weight else -1.0


def _levels(
    texts: _Texts, longest: int, least: int
) -> Iterator[list[tuple[tuple[int, ...], tuple[float, float, float]]]]:
    """
    For each n up to `longest`, yield the n-grams that only one answer of a pair has, in `least` pairs or more.

    Each comes with three sums over these pairs, Σ s·w, Σw² and Σw: w is the pair's weight, and s is 1 where the first
    answer has the n-gram, −1 where the second has it.
    """
    size, weights = len(texts.texts), texts.weights
    owner = texts.owner
    at = np.flatnonzero(~texts.is_break)
    grams = texts.words[at].astype(np.int64)
    for n in range(1, longest + 1):
        numbers, grams = np.unique(grams, return_inverse=True)
        seen = np.unique(grams * size + owner[at])  # each n-gram counts once in each text
        frequent = np.bincount(seen // size, minlength=len(numbers)) >= least
        which, text = seen // size, seen % size
        same_pair = (which[1:] == which[:-1]) & (text[1:] == text[:-1] + 1) & (text[1:] % 2 == 1)
        alone = np.ones(len(seen), bool)
        alone[1:] &= ~same_pair
        alone[:-1] &= ~same_pair
        which, text = which[alone], text[alone]
        weight = weights[text]
        total, squares, sums = (
            np.bincount(which, values, minlength=len(numbers))
            for values in (np.where(text % 2, -weight, weight), weight**2, weight)
        )
        counts = np.bincount(which, minlength=len(numbers))
        first = np.zeros(len(numbers), np.int64)
        first[grams[::-1]] = at[::-1]
        yield [
            (
                tuple(texts.words[first[g] : first[g] + n].tolist()),
                (total[g].item(), squares[g].item(), sums[g].item()),
            )
            for g in np.flatnonzero(counts >= least)
        ]
        # An (n+1)-gram is two n-grams that are both frequent enough, at one place and the next
        number = np.full(len(owner) + 1, -1, np.int64)
        number[at] = np.where(frequent[grams], grams, -1)
        left, right = number[at], number[at + 1]
        kept = (left >= 0) & (right >= 0) & (texts.sentence[at] == texts.sentence[at + 1])
        at, grams = at[kept], left[kept] * len(numbers) + right[kept]
        if not len(at):
            return
