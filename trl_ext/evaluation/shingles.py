"""Hash n-grams of words or characters, for many texts at once."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Literal

import numpy as np
import regex

from .scripts import CODES, UNSPACED, characters_of

Unit = Literal["words", "characters"]
_BASE = 0x9E3779B97F4A7C15  # odd, of the golden ratio: sums of its powers spread over 64 bits
_WIDER = 0xD1B54A32D192ED03
_PART = 1 << 17  # characters that are hashed at a time: arrays of them fit a processor's cache


def in_parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in order, in lists that are each small enough to be hashed at once."""
    part, size = [], 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size >= _PART or len(part) >= _PART // 16:
            yield part
            part, size = [], 0
    if part:
        yield part


def ngram_hashes(
    texts: Sequence[str], n: int, unit: Unit = "words", keep_short: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """
    Hash all runs of `n` words, or characters, of each text.

    Texts are split into words at white space; in scripts without spaces each character is a word. Reward functions
    count words in the same way. Equal runs have equal hashes, in every text and every process.

    Args:
        texts: (N) any texts.
        n: number of words or characters in a run.
        unit: what a run is made of: `words` or `characters`.
        keep_short: True makes one run of a text that has fewer than `n`; False gives it no run.

    Returns:
        Two arrays: (R,) unsigned hashes of 64 bits, in the order of the texts, and (R,) the index in `texts` of each
        run's text.
    """
    codes, owner = characters_of(texts)
    if unit == "words":
        codes, owner = _words(codes, owner)
    counts = np.bincount(owner, minlength=len(texts))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its text
    last = counts - n
    begins = place <= (np.maximum(last, 0) if keep_short else last)[owner]
    hashes = np.zeros(len(codes), np.uint64)
    for k in range(min(n, len(codes))):
        same = owner[k:] == owner[: len(owner) - k]
        ahead = (codes[k:] + np.uint64(1)) * np.uint64(pow(_WIDER, k + 1, 1 << 64))
        hashes[: len(codes) - k] += ahead * same  # 0 beyond the end of the text
    return _mixed(hashes[begins]), owner[begins]


def count_words(texts: Sequence[str]) -> np.ndarray:
    """Count the words of each text, (N,), as [`ngram_hashes`] divides texts into words."""
    return np.bincount(_words(*characters_of(texts))[1], minlength=len(texts))


def _words(codes: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: a hash of each word of all texts, and for each word the index of its text."""
    is_space, is_word = (table[codes] for table in _classes())
    starts = np.ones(len(codes), bool)
    starts[1:] = (owner[1:] != owner[:-1]) | is_space[:-1] | is_word[1:] | is_word[:-1]
    starts, owner, codes = starts[~is_space], owner[~is_space], codes[~is_space]
    if not len(codes):
        return codes.astype(np.uint64), owner
    at = np.flatnonzero(starts)
    lengths = np.diff(at, append=len(codes))
    powers = np.full(lengths.max(), _BASE, np.uint64).cumprod(dtype=np.uint64)
    within = np.arange(len(codes)) - np.repeat(at, lengths)
    return _mixed(np.add.reduceat((codes + np.uint64(1)) * powers[within], at)), owner[at]


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Mix the bits of hashes by splitmix64's steps, since a multiplication alone leaves the low bits unmixed."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(31))


@cache
def _classes() -> tuple[np.ndarray, np.ndarray]:
    """Return two tables by code point: whether it is white space, and whether it is a word by itself."""
    characters = "".join(map(chr, range(CODES)))
    is_space = np.zeros(CODES, bool)
    is_space[[ord(character) for character in characters if character.isspace()]] = True
    is_word = np.zeros(CODES, bool)
    is_word[[ord(character) for character in regex.findall(f"[{UNSPACED}]", characters)]] = True
    return is_space, is_word
