"""Repetition, within and across completions, and copying."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .watch import Watch, log_to, text_of


class RepetitionWatch(Watch):
    """
    Logs how much completions repeat themselves, each other and a corpus; n-grams are of words.

    - `repetition/distinct_{n}`: different n-grams of the batch ÷ all of them (Li et al. 2016, 1510.03055)
    - `repetition/repeated`: n-grams of a completion that stood in it before ÷ all of them, mean over completions
    - `repetition/top_phrase_share`: completions with the n-gram that most of them have ÷ completions; the phrase
      itself is in `completions.rank{r}.jsonl` and in the attribute `top_phrase`
    - `repetition/copied_share`: completions that have `copied_words` words in a row from the corpus ÷ completions

    Args:
        n: words in a phrase.
        corpus: texts that must not be copied, the training demonstrations for one.
        copied_words: how many words in a row are a copy.
        folder, score: see [`Watch`].
    """

    __name__ = "repetition_watch"

    def __init__(self, n: int = 3, corpus: Iterable[str] = (), copied_words: int = 13, **kwargs: Any):
        if n < 1 or copied_words < 1:
            raise ValueError(f"`n` and `copied_words` must be 1 or more, got {n} and {copied_words}")
        if isinstance(corpus, str):
            raise TypeError("`corpus` must be a list of texts, got one text: put it into a list")
        super().__init__(**kwargs)
        self.n = n
        self.copied_words = copied_words
        self.corpus = {_digest(gram) for text in corpus for gram in ngrams(text.split(), copied_words)}
        self.top_phrase = ""

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        words = [text_of(completion).split() for completion in completions]
        grams = [ngrams(row, self.n) for row in words]
        total, different = sum(map(len, grams)), len({gram for row in grams for gram in row})
        repeated = [1 - len(set(row)) / len(row) if row else 0.0 for row in grams]
        in_completions = Counter(gram for row in grams for gram in set(row))
        # Of equally frequent phrases the alphabetically first: the same on every run
        top, count = min(in_completions.items(), key=lambda item: (-item[1], item[0]), default=((), 0))
        self.top_phrase = " ".join(top)
        copied = [
            bool(self.corpus) and any(_digest(gram) in self.corpus for gram in ngrams(row, self.copied_words))
            for row in words
        ]
        log_to(
            log_metric,
            {
                f"repetition/distinct_{self.n}": different / total if total else None,
                "repetition/repeated": sum(repeated) / len(repeated),
                "repetition/top_phrase_share": count / len(completions),
                "repetition/copied_share": sum(copied) / len(copied) if self.corpus else None,
            },
        )
        scores = [
            {"repeated": share, "has_top_phrase": top in row, "top_phrase": self.top_phrase, "copied": copy}
            for share, row, copy in zip(repeated, grams, copied, strict=True)
        ]
        self.write_completions(prompts, completions, scores, trainer_state)
        return [self.score] * len(completions)


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def _digest(gram: tuple[str, ...]) -> bytes:
    """Eight bytes, the same in every process: a corpus is large."""
    return hashlib.blake2b(" ".join(gram).encode(), digest_size=8).digest()


repetition_watch = RepetitionWatch()
