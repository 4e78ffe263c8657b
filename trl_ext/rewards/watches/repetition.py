"""Measure how much completions repeat themselves and each other, and how many copy from a corpus."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...evaluation.texts import copied_shares, corpus_ngrams
from ..member import log_to
from ..texts import text_of, words_of
from .watch import Watch


class RepetitionWatch(Watch):
    """
    Log how much completions repeat themselves, each other and a corpus, by n-grams of words.

    In scripts without spaces, such as Chinese, Japanese and Thai, each character counts as a word.

    - `repetition/distinct_{n}`: different n-grams of the batch ÷ all n-grams of the batch (Li et al. 2016, 1510.03055)
    - `repetition/repeated`: a completion's n-grams that it already had at an earlier place ÷ all its n-grams, mean
      over completions
    - `repetition/top_phrase_share`: completions with the top phrase ÷ all completions. The top phrase is the n-gram
      that the most completions have; the attribute `top_phrase` and `completions.rank{r}.jsonl` say which it is
    - `repetition/copied_share`: completions with `copied_words` words in a row from the corpus ÷ all completions

    Args:
        n: words in an n-gram.
        corpus: texts that must not be copied, such as the training demonstrations.
        copied_words: how many words in a row from the corpus count as a copy.
        folder, score: see [`Watch`].

    Examples:
        >>> from trl_ext.rewards import RepetitionWatch
        >>> watch = RepetitionWatch(n=1)
        >>> scores = watch(prompts=["Go on."] * 2, completions=["la la la la", "and so on"], log_metric=print)
        repetition/distinct_1 0.5714285714285714
        repetition/repeated 0.375
        repetition/top_phrase_share 0.5
        >>> watch.top_phrase
        'and'
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
        self.corpus = corpus_ngrams(corpus, copied_words)
        self.top_phrase = ""

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        metrics, scores = self.measure(completions)
        log_to(log_metric, metrics)
        self.write_completions(prompts, completions, scores, trainer_state)
        return [self.score] * len(completions)

    def measure(self, completions: list) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Return the metrics to log, and for each completion the scores to write to its file; set `top_phrase`."""
        texts = [text_of(completion) for completion in completions]
        grams = [ngrams(words_of(text), self.n) for text in texts]
        total, different = sum(map(len, grams)), len({gram for row in grams for gram in row})
        repeated = [1 - len(set(row)) / len(row) if row else 0.0 for row in grams]
        in_completions = Counter(gram for row in grams for gram in set(row))
        # Of equally frequent phrases take the alphabetically first, so that every run finds the same
        count = max(in_completions.values(), default=0)
        top = min((gram for gram, times in in_completions.items() if times == count), default=())
        self.top_phrase = " ".join(top)
        copied = (copied_shares(texts, self.corpus, self.copied_words) > 0).tolist()
        metrics = {
            f"repetition/distinct_{self.n}": different / total if total else None,
            "repetition/repeated": sum(repeated) / len(repeated),
            "repetition/top_phrase_share": count / len(completions),
            "repetition/copied_share": sum(copied) / len(copied) if len(self.corpus) else None,
        }
        scores = [
            {"repeated": share, "has_top_phrase": top in row, "top_phrase": self.top_phrase, "copied": copy}
            for share, row, copy in zip(repeated, grams, copied, strict=True)
        ]
        return metrics, scores


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of `n` successive words, in order."""
    return list(zip(*(words[i:] for i in range(n)), strict=False))


repetition_watch = RepetitionWatch()
