"""Find answers that repeat runs of words from a corpus, such as the training set."""

from collections.abc import Iterable, Sequence

import numpy as np

from .shingles import in_parts, ngram_hashes


def corpus_ngrams(corpus: Iterable[str], words: int = 13) -> np.ndarray:
    """
    Hash every run of `words` successive words in a corpus.

    Args:
        corpus: texts.
        words: number of words in a run, which is how many words in a row count as a copy.

    Returns:
        (R,) hashes of 64 bits, sorted, one for each different run. They take at most 8 bytes for each word of the
        corpus.
    """
    found = [np.unique(ngram_hashes(part, words)[0]) for part in in_parts(corpus)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint64)


def copied_shares(texts: Sequence[str], corpus: np.ndarray, words: int = 13) -> np.ndarray:
    """
    Return the share of each text that occurs word for word in a corpus.

    Args:
        texts: (N) completions.
        corpus: hashes from [`corpus_ngrams`] with the same `words`.
        words: how many words in a row count as a copy.

    Returns:
        (N,) the text's runs of `words` words that the corpus has ÷ all its runs of `words` words; 0 for a text of
        fewer words.
    """
    hashes, owner = ngram_hashes(texts, words)
    places = np.searchsorted(corpus, hashes)
    found = np.zeros(len(hashes), bool)
    inside = places < len(corpus)
    found[inside] = corpus[places[inside]] == hashes[inside]
    counts = np.bincount(owner, minlength=len(texts))
    return np.bincount(owner, found, minlength=len(texts)) / np.maximum(counts, 1)
