"""Phrases that are never acceptable, queued for people to review."""

import re
from collections.abc import Iterable
from typing import Any

from accelerate import PartialState

from .watch import Watch, log_to, text_of


class PhraseReviewReward(Watch):
    """
    Queue completions with unacceptable phrases for review, and log their share as `phrase_review/share`.

    The queue is `review.rank{r}.jsonl` in the folder, with one completion a line: step, rank, prompt, completion,
    phrases.

    Args:
        phrases: matched as whole words, in any case and with any space between words.
        veto: score of a completion with such a phrase; others get 0.0. Give the function a weight then. None scores
            nothing.
        folder, score: see [`Watch`].
    """

    __name__ = "phrase_review"

    def __init__(self, phrases: Iterable[str], veto: float | None = None, **kwargs: Any):
        phrases = [phrases] if isinstance(phrases, str) else list(phrases)
        if not phrases or not all(isinstance(phrase, str) and phrase.strip() for phrase in phrases):
            raise ValueError(f"`phrases` must be one or more texts, none of them empty; got {phrases}")
        super().__init__(**kwargs)
        self.phrases = phrases
        self.veto = veto
        joined = "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases)
        self._pattern = re.compile(rf"(?<!\w)(?:{joined})(?!\w)", re.IGNORECASE)

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        found = [self._pattern.findall(text_of(completion)) for completion in completions]
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
