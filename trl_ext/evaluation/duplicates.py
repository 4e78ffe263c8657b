"""Find texts that are the same or nearly the same, by MinHash and a check of the real similarity."""

import tempfile
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import regex
import xxhash

from ..upstream.packages import need
from .shingles import Unit, in_parts, ngram_hashes

_WINDOW = 16  # number of texts of the same bucket that each text is compared with
_ELEMENTS = 1 << 22  # n-grams that are compared at a time
_WEIGHTS = (0.01, 0.99)  # of false candidates, which only cost the time of a check, and of missed duplicates
_LONGEST_BANDS = 0.95  # threshold above which bands are made no longer
_UNSEEN = regex.compile(r"\p{Cf}+")  # soft hyphens, marks of direction, joiners


@dataclass(frozen=True)
class Duplicates:
    """
    Say which of N texts are duplicates of each other.

    Args:
        exact: (N,) a number for each text: the place of the first text that equals it but for case, white space and
            forms of letters; -1 for an empty text. Exact duplicates thus have the same number.
        near: (N,) a number for each text: the place of the first text of its group of near duplicates; -1 for an empty
            text. Near duplicates thus have the same number; a text without any is a group by itself.
        similarity: (N,) Jaccard similarity of each text to the first text of its group. It is below the threshold if
            the text is a near duplicate of another text of the group, but not of the first.
    """

    exact: np.ndarray
    near: np.ndarray
    similarity: np.ndarray


def normalised(text: str) -> str:
    """Return a text in lower case, in Unicode's form NFKC, without invisible characters, and with single spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text))
    return " ".join(text.casefold().split())


def find_duplicates(
    texts: Iterable[str], threshold: float = 0.7, unit: Unit = "words", n: int = 3, num_perm: int = 128, seed: int = 0
) -> Duplicates:
    """
    Find texts that are equal, and texts that are nearly equal by the Jaccard similarity of their n-grams.

    The similarity of two texts with the n-grams A and B is |A ∩ B| ÷ |A ∪ B|. MinHash (Broder 1997) puts texts that
    are probably similar into the same bucket; the true similarity of two texts in a bucket then decides. Near pairs
    are joined to groups, so that two texts of one group may be less similar than `threshold`.

    A pair whose similarity equals the threshold is found with a probability of about 99 %, a more similar pair almost
    surely. In a bucket of many texts fewer pairs are found, since each text is compared with only 16 others. Memory is
    some 600 bytes a text, whatever its length; n-grams go to a temporary file, 4 bytes each.

    Args:
        texts: the texts, which are read once.
        threshold: least similarity of near duplicates, in (0, 1].
        unit: `words` or `characters`. In scripts without spaces a character is a word.
        n: words or characters in an n-gram. A text of fewer is a single n-gram, and has no near duplicates.
        num_perm: number of hashes in a text's MinHash signature. More hashes find more duplicates, and take more time.
        seed: seed of the hashes.

    Raises:
        ImportError: datasketch is missing.
        ValueError: a setting is out of its range.
    """
    if not 0 < threshold <= 1 or n < 1 or num_perm < 16 or unit not in ("words", "characters"):
        raise ValueError(
            "`threshold` must be in (0, 1], `n` 1 or more, `num_perm` 16 or more and `unit` words or characters, got "
            f"{threshold}, {n}, {num_perm} and {unit!r}"
        )
    need("datasketch", "finding duplicates")
    with tempfile.TemporaryFile() as file:
        digests, bands, ends = _read(texts, threshold, unit, n, num_perm, seed, file)
        _, firsts, exact = np.unique(digests, return_index=True, return_inverse=True)
        exact = firsts[exact]
        is_empty = digests == 0
        representatives = np.flatnonzero((exact == np.arange(len(exact))) & ~is_empty)
        grams = np.memmap(file, np.uint32, "r") if len(ends) and ends[-1] else np.zeros(0, np.uint32)
        sets = _Sets(grams, ends, threshold)
        labels = _joined([band[representatives] for band in bands], representatives, sets)
        near = np.arange(len(exact))
        near[representatives] = labels
        near = near[exact]
        similarity = np.ones(len(exact), np.float64)
        joined = np.flatnonzero((near != exact) & (exact == np.arange(len(exact))) & ~is_empty)
        similarity[joined] = sets.similarity(joined, near[joined])
        similarity = similarity[exact]
    exact[is_empty] = near[is_empty] = -1
    return Duplicates(exact, near, similarity)


def similarity_of(one: str, other: str, unit: Unit = "words", n: int = 3) -> float:
    """Return the Jaccard similarity of two texts' n-grams, as [`find_duplicates`] computes it."""
    sets = [{*ngram_hashes([normalised(text)], n, unit, keep_short=True)[0].tolist()} for text in (one, other)]
    return len(sets[0] & sets[1]) / max(len(sets[0] | sets[1]), 1)


def _read(texts, threshold, unit, n, num_perm, seed, file):
    """
    Read the texts and write their n-grams to `file`; return three things:

    - (N,) a digest of each text, 0 if it is empty
    - for each band of the MinHash signature, (N,) the texts' keys
    - (N,) where each text's n-grams end in the file
    """
    from datasketch import MinHash, MinHashLSH

    # At a threshold near 1 datasketch would choose one long band, and refuse it. Shorter bands find more candidates,
    # among which the true similarity decides
    lsh = MinHashLSH(min(threshold, _LONGEST_BANDS), num_perm, weights=_WEIGHTS)
    empty = MinHash(num_perm, seed, hashfunc=int)
    digests: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for part in in_parts(map(normalised, texts)):
        digests.append(np.array([_digest(text) for text in part], np.uint64))
        hashes, owner = ngram_hashes(part, n, unit, keep_short=True)
        grams = np.unique(owner.astype(np.uint64) << np.uint64(32) | hashes >> np.uint64(32))
        counts.append(np.bincount((grams >> np.uint64(32)).astype(np.int64), minlength=len(part)))
        grams = grams.astype(np.uint32)
        grams.tofile(file)
        signatures = np.empty((len(part), lsh.b, lsh.r), np.uint32)
        for place, of_text in enumerate(np.split(grams, np.cumsum(counts[-1])[:-1])):
            sketch = empty.copy()
            sketch.update_batch(of_text.tolist())
            signatures[place] = sketch.hashvalues[: lsh.b * lsh.r].reshape(lsh.b, lsh.r)
        keys.append(_band_keys(signatures))
    file.flush()
    if not keys:
        return np.zeros(0, np.uint64), [], np.zeros(0, np.int64)
    bands = [np.concatenate([part[band] for part in keys]) for band in range(lsh.b)]
    return np.concatenate(digests), bands, np.cumsum(np.concatenate(counts))


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) | 1 if text else 0


def _band_keys(signatures: np.ndarray) -> np.ndarray:
    """Return a key of 32 bits for each band of each signature, (b, N). Different bands may share a key by chance."""
    mixed = np.zeros(signatures.shape[:2], np.uint64)
    for row in range(signatures.shape[2]):
        mixed = (mixed ^ signatures[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    return mixed.astype(np.uint32).T.copy()


def _joined(bands: list[np.ndarray], places: np.ndarray, sets: "_Sets") -> np.ndarray:
    """
    Join near duplicates to groups; return for each text the place of the first text in its group.

    Args:
        bands: (M,) keys of the texts in each band of the MinHash signature.
        places: (M,) places of the texts in the data, where exact copies of an earlier text are left out.
        sets: the n-grams of all texts in the data.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = len(places)
    labels = np.arange(size)
    for band, keys in enumerate(bands):
        # In a bucket, texts that also share the next band's bucket stand side by side: they are most likely near
        order = np.lexsort((bands[(band + 1) % len(bands)], keys))
        in_bucket = keys[order]
        many = np.zeros(size, bool)
        many[1:] |= in_bucket[1:] == in_bucket[:-1]
        many[:-1] |= in_bucket[1:] == in_bucket[:-1]
        order, in_bucket = order[many], in_bucket[many]
        for distances in ((1,), range(2, _WINDOW + 1)):  # neighbours first: what they join need not be compared again
            pairs = []
            for distance in distances:
                near = in_bucket[distance:] == in_bucket[:-distance]
                one, other = order[distance:][near], order[:-distance][near]
                apart = labels[one] != labels[other]
                pairs.append(np.stack([one[apart], other[apart]]))
            one, other = np.concatenate(pairs, axis=1)
            if not len(one):
                continue
            is_near = sets.are_near(places[one], places[other])
            one, other = labels[one[is_near]], labels[other[is_near]]
            if len(one):
                graph = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(size, size))
                labels = connected_components(graph, directed=False)[1][labels]
                _, firsts, labels = np.unique(labels, return_index=True, return_inverse=True)
                labels = firsts[labels]
    return places[labels]


class _Sets:
    """Hold the n-grams of all texts in one array: text i has those from ends[i - 1] to ends[i], sorted."""

    def __init__(self, grams: np.ndarray, ends: np.ndarray, threshold: float):
        self.grams, self.threshold = grams, threshold
        self.counts = np.diff(ends, prepend=0)
        self.begins = ends - self.counts

    def are_near(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return for each pair of places, from `one` and from `other`, whether these texts are near duplicates."""
        counts = self.counts[one], self.counts[other]
        near = np.minimum(*counts) >= self.threshold * np.maximum(*counts) - 1e-9  # else their sizes differ too much
        near[near] = self.similarity(one[near], other[near]) >= self.threshold
        return near

    def similarity(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return for each pair of places, from `one` and from `other`, the Jaccard similarity of these texts."""
        sizes = self.counts[one] + self.counts[other]
        result = np.zeros(len(one), np.float64)
        part = np.cumsum(sizes) // _ELEMENTS
        for pairs in np.split(np.arange(len(one)), np.flatnonzero(np.diff(part)) + 1):
            found = np.sort(np.concatenate([self._keyed(one[pairs]), self._keyed(other[pairs])]))
            twice = (found[1:][found[1:] == found[:-1]] >> np.uint64(32)).astype(np.int64)
            shared = np.bincount(twice, minlength=len(pairs))
            result[pairs] = shared / np.maximum(sizes[pairs] - shared, 1)
        return result

    def _keyed(self, places: np.ndarray) -> np.ndarray:
        """Return the n-grams of the texts at `places`; the upper 32 bits of each have the text's index in `places`."""
        counts = self.counts[places]
        number = np.repeat(np.arange(len(places)), counts)
        within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = self.grams[self.begins[places][number] + within]
        return number.astype(np.uint64) << np.uint64(32) | found
