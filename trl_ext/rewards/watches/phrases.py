"""Queue completions with unacceptable phrases for people to review."""

import unicodedata
from collections.abc import Iterable
from typing import Any

import regex
from accelerate import PartialState

from ..member import log_to
from ..texts import UNSPACED, text_of
from .watch import Watch

# Characters of words; in scripts without spaces nothing marks where a word ends
_WORD = rf"[[\p{{L}}\p{{N}}\p{{M}}]--[{UNSPACED}]]"
_HIDDEN = r"\p{Cf}"  # zero-width spaces and joiners, soft hyphens
# More marks in a row than any language has (Unicode's annex 15, stream-safe texts): sorting them takes quadratic time
_MARKS = regex.compile(r"(\p{M}{30})\p{M}+")


class PhraseReviewReward(Watch):
    """
    Queue completions with unacceptable phrases for review, and log their share as `phrase_review/share`.

    The queue is the file `review.rank{r}.jsonl` in `folder`. Each line is one completion with a phrase: step, rank,
    prompt, completion, phrases found.

    Args:
        phrases: phrases to find as whole words, in any case, with any space between words; invisible characters are
            ignored. In scripts without spaces, such as Chinese, Japanese and Thai, they are found within words, too.
        veto: score of a completion with one of the phrases; all others score 0.0. It has an effect only if the
            function also gets a weight other than 0. None: all completions get `score`.
        folder, score: see [`Watch`].

    Examples:
        >>> from trl_ext.rewards import PhraseReviewReward
        >>> reward = PhraseReviewReward(["shut up"], veto=-1.0)
        >>> reward(prompts=["Help!"] * 2, completions=["SHUT  UP.", "Gladly."], log_metric=print)
        phrase_review/share 0.5
        [-1.0, 0.0]
    """

    __name__ = "phrase_review"

    def __init__(self, phrases: Iterable[str], veto: float | None = None, **kwargs: Any):
        phrases = [phrases] if isinstance(phrases, str) else list(phrases)
        if not phrases or not all(isinstance(phrase, str) and _composed(phrase, "").strip() for phrase in phrases):
            raise ValueError(f"`phrases` must be one or more texts, none of them empty; got {phrases}")
        super().__init__(**kwargs)
        self.phrases = phrases
        self.veto = veto
        joined = "|".join(map(_pattern, phrases))
        self._pattern = regex.compile(joined, regex.IGNORECASE | regex.VERSION1)

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        found = [self._pattern.findall(_composed(text_of(completion))) for completion in completions]
        log_to(log_metric, {"phrase_review/share": sum(map(bool, found)) / len(found)})
        step, rank = getattr(trainer_state, "global_step", None), PartialState().process_index
        self.write(
            "review",
            [
                {"step": step, "rank": rank, "prompt": text_of(p), "completion": text_of(c), "phrases": sorted(set(f))}
                for p, c, f in zip(prompts, completions, found, strict=True)
                if f
            ],
        )
        self.write_completions(prompts, completions, [{"phrases": len(f)} for f in found], trainer_state)
        if self.veto is None:
            return [self.score] * len(completions)
        return [self.veto if f else 0.0 for f in found]


def _composed(text: str, hidden: str | None = None) -> str:
    """
    Return a text in which each character, such as a letter with an accent, is written in one way only (NFKC).

    Invisible characters are replaced by `hidden`, or kept if `hidden` is None.
    """
    text = unicodedata.normalize("NFKC", _MARKS.sub(r"\1", text))
    return text if hidden is None else regex.sub(_HIDDEN, hidden, text)


def _pattern(phrase: str) -> str:
    """Return a regular expression for a phrase; where the script has spaces, it finds only whole words."""
    words = _composed(phrase, "").split()
    within = [f"{_HIDDEN}*".join(map(regex.escape, word)) for word in words]
    begins, ends = (regex.match(_WORD, end, regex.VERSION1) for end in (words[0][0], words[-1][-1]))
    start, end = rf"(?<!{_WORD})" if begins else "", rf"(?!{_WORD})" if ends else ""
    return start + rf"(?:\s|{_HIDDEN})+".join(within) + end
