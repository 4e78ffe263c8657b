"""Find answers that repeat runs of words from a corpus, such as the training set."""

from collections.abc import Iterable, Sequence

import numpy as np

from .shingles import in_parts, ngram_hashes


def corpus_ngrams(corpus: Iterable[str], words: int = 13) -> np.ndarray:
    """
    Hash every run of `words` successive words in a corpus.

    Args:
        corpus: texts.
        words: length of the runs: so many words in a row count as a copy.

    Returns:
        (R,) different hashes of 64 bits, sorted: 8 bytes a word of the corpus at most.
    """
    found = [np.unique(ngram_hashes(part, words)[0]) for part in in_parts(corpus)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint64)


def copied_shares(texts: Sequence[str], corpus: np.ndarray, words: int = 13) -> np.ndarray:
    """
    Return the share of each text that occurs word for word in a corpus.

    Args:
        texts: (N) completions.
        corpus: hashes from [`corpus_ngrams`] with the same `words`.
        words: words in a row that make a copy.

    Returns:
        (N,) runs of `words` words that the corpus has ÷ all such runs of the text; 0 for a text of fewer words.
    """
    hashes, owner = ngram_hashes(texts, words)
    places = np.searchsorted(corpus, hashes)
    found = np.zeros(len(hashes), bool)
    inside = places < len(corpus)
    found[inside] = corpus[places[inside]] == hashes[inside]
    counts = np.bincount(owner, minlength=len(texts))
    return np.bincount(owner, found, minlength=len(texts)) / np.maximum(counts, 1)
