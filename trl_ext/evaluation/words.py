"""Split texts into words; find duplicate and nearly duplicate texts, copied runs of words, and a text's script."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import regex
import xxhash

Unit = Literal["words", "characters"]
_HASHES = 128  # of a MinHash signature
_MISSED = 0.015  # largest probability that the signatures miss a pair whose similarity equals the threshold
_WINDOW = 16  # texts of the same bucket that each text is compared with
_UNSEEN = regex.compile(r"\p{Cf}+")  # soft hyphens, marks of direction, joiners
# Scripts that put no spaces between words, by their names in `regex`: each of their characters counts as a word
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_WORDS = regex.compile(rf"[{UNSPACED}]|[^{UNSPACED}]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text; in scripts without spaces each character counts as one word."""
    if text.isascii():  # all its scripts have spaces
        return text.split()
    return [part for word in text.split() for part in _WORDS.findall(word)]


def normalised(text: str) -> str:
    """Return a text in lower case, in Unicode's form NFKC, without invisible characters, and with single spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text))
    return " ".join(text.casefold().split())


def main_script(text: str) -> str:
    """
    Return the script that most letters of a text have, such as `Latin` or `Cjk`; "no letters" if it has none. A
    letter's script is the first word of its Unicode name.
    """
    scripts: Counter[str] = Counter()
    for letter, times in Counter(filter(str.isalpha, text)).items():
        scripts[unicodedata.name(letter, "another").split()[0].capitalize()] += times
    return max(scripts, key=lambda script: scripts[script], default="no letters")


def text_hash(text: str) -> int:
    """Return a hash of 64 bits of a text, which is the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def ngram_hashes(text: str, n: int, unit: Unit = "words", keep_short: bool = False) -> np.ndarray:
    """
    Hash all R runs of `n` successive parts of a text, words or characters as `unit` says; return (R,) unsigned hashes
    of 64 bits.

    With `keep_short`, a text with fewer than `n`, but at least one, counts as one run; otherwise it has no run.
    """
    parts = words_of(text) if unit == "words" else list(text)
    count = len(parts) - n + 1
    if keep_short and parts:
        count = max(count, 1)
    return np.array([text_hash(" ".join(parts[i : i + n])) for i in range(count)], np.uint64)


def corpus_ngrams(corpus: Iterable[str], words: int = 13) -> np.ndarray:
    """
    Hash every run of `words` successive words in a corpus.

    Args:
        corpus: texts.
        words: number of words in a run, which is how many words in a row count as a copy.

    Returns:
        (R,) hashes of 64 bits, sorted, one for each different run.
    """
    hashes = [ngram_hashes(text, words) for text in corpus]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))


def copied_shares(texts: Sequence[str], corpus: np.ndarray, words: int = 13) -> np.ndarray:
    """
    Return the share of each text that occurs word for word in a corpus.

    Args:
        texts: (N) texts, such as completions.
        corpus: hashes from [`corpus_ngrams`] with the same `words`.
        words: how many words in a row count as a copy.

    Returns:
        (N,) number of the text's runs of `words` words that occur in the corpus ÷ number of all its runs; 0 for a text
        with fewer words.
    """
    shares = np.zeros(len(texts))
    for row, text in enumerate(texts):
        if len(corpus) and len(runs := ngram_hashes(text, words)):
            shares[row] = (corpus.take(corpus.searchsorted(runs), mode="clip") == runs).mean()
    return shares


@dataclass(frozen=True)
class Duplicates:
    """
    Say which of N texts are duplicates of each other.

    Args:
        exact: (N,) a number for each text: the index of the first text that is equal to it except for case, white
            space, invisible characters and Unicode form; -1 for an empty text. Exact duplicates thus have the same
            number.
        near: (N,) a number for each text: the index of the first text of its group of near duplicates; -1 for an empty
            text. Near duplicates thus have the same number; a text without any is a group by itself.
        similarity: (N,) Jaccard similarity of each text to the first text of its group. It is below the threshold if
            the text is a near duplicate of another text of the group, but not of the first. 1 for an empty text.
    """

    exact: np.ndarray
    near: np.ndarray
    similarity: np.ndarray


def find_duplicates(
    texts: Iterable[str], threshold: float = 0.7, unit: Unit = "words", n: int = 3, seed: int = 0
) -> Duplicates:
    """
    Find texts that are equal, and texts that are nearly equal by the Jaccard similarity of their n-grams.

    The similarity of two texts with the n-grams A and B is |A ∩ B| ÷ |A ∪ B|. MinHash (Broder 1997) puts texts that
    are probably similar into the same bucket; the true similarity of two texts in a bucket then decides. Similar pairs
    are joined into groups, so two texts of one group may be less similar than `threshold`.

    A pair whose similarity equals the threshold is found with a probability of about 99 %, a more similar pair almost
    surely. In a bucket of many texts fewer pairs are found, since each text is compared with only 16 others.

    Args:
        texts: the texts, which are read once.
        threshold: least similarity of near duplicates, in (0, 1].
        unit: `words` or `characters`. In scripts without spaces a character is a word.
        n: words or characters in an n-gram. A text with fewer is a single n-gram, and has no near duplicates.
        seed: seed of the hashes.
    """
    factors, offsets = np.random.default_rng(seed).integers(0, 2**64, (2, _HASHES), np.uint64)
    firsts: dict[int, int] = {}
    exact: list[int] = []
    grams: dict[int, np.ndarray] = {}  # of the first of equal texts
    signatures: dict[int, bytes] = {}
    for place, text in enumerate(map(normalised, texts)):
        exact.append(firsts.setdefault(text_hash(text), place) if text else -1)
        if exact[-1] == place:
            grams[place] = np.unique(ngram_hashes(text, n, unit, keep_short=True))
            # Multiply and shift: the factor must be odd
            hashed = grams[place][:, None] * (factors | np.uint64(1)) + offsets >> np.uint64(32)
            signatures[place] = hashed.min(0).astype(np.uint32).tobytes()
    group = {place: place for place in grams}

    def first(place: int) -> int:
        while group[place] != place:
            group[place] = group[group[place]]  # halves the way for later calls
            place = group[place]
        return place

    # Bands as long as may be: longer ones put fewer texts that are not similar into one bucket
    lengths = [rows for rows in range(1, 17) if (1 - threshold**rows) ** (_HASHES // rows) <= _MISSED]
    size = 4 * max(lengths, default=1)  # bytes of a band
    for begin in range(0, 4 * _HASHES - size + 1, size):
        buckets = defaultdict(list)
        for place, signature in signatures.items():
            buckets[signature[begin : begin + size]].append(place)
        for bucket in buckets.values():
            for i, one in enumerate(bucket):
                for other in bucket[i + 1 : i + 1 + _WINDOW]:
                    low, high = sorted((first(one), first(other)))
                    if low != high and _jaccard(grams[one], grams[other]) >= threshold:
                        group[high] = low
    near = [first(place) if place >= 0 else -1 for place in exact]
    similarity = {place: _jaccard(grams[place], grams[first(place)]) for place in grams}
    similarities = [similarity.get(place, 1.0) for place in exact]
    return Duplicates(np.array(exact, int), np.array(near, int), np.array(similarities))


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)
