"""Compare answers to the same few prompts over the run."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..rewards.member import awaited
from ..rewards.texts import text_of, words_of
from ..rewards.watches.repetition import RepetitionWatch
from ..rewards.watches.watch import numbers_of
from ..runs.jsonl import JSONLWriter
from ..runs.processes import from_first
from .generation import generate_answers
from .monitor import ABOVE_ONE, NOT_NEGATIVE, SHARE, Finding, MonitorCallback, on_main_process


@dataclass(eq=False, kw_only=True)
class CanaryCallback(MonitorCallback):
    """
    Alert when the greedy answers to a fixed set of prompts change in length, grow alike or score lower.

    The model answers the prompts before training, and then every few minutes. The answers' length, their most frequent
    phrase and, with a judge, their score are compared with the first answers'. All answers are kept in `canary.jsonl`
    in the output directory.

    An unchanged policy gives the same greedy answers each time, so their length and phrase have no noise. A judge's
    scores may have noise, which is estimated from the earlier scores.

    >>> trainer.add_callback(CanaryCallback(trainer=trainer, prompts=["Who are you?"], minutes=15))

    Args:
        trainer: trainer whose model answers.
        prompts: texts or messages.
        minutes: minutes from one set of answers to the next, by the main process' clock.
        judge: a reward function, async or not, that scores the answers; None for no scores.
        length_factor: alert when the mean length is above the first one times this factor, or below the first one
            divided by it.
        phrase: alert when the share of answers with the most frequent phrase rises by more than this.
        score_drop: alert when the mean score falls by more than this. The default is half the σ of the first scores.
        max_new_tokens: maximum length of an answer, in tokens.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    prompts: list[Any] | None = None
    minutes: float = 15.0
    judge: Any = None
    length_factor: float = 2.0
    phrase: float = 0.5
    score_drop: float | None = None
    max_new_tokens: int = 64
    runbook = "canary"
    ranges = {"minutes": NOT_NEGATIVE, "length_factor": ABOVE_ONE, "phrase": SHARE}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts or isinstance(self.prompts, str):
            raise ValueError(f"`CanaryCallback` needs `prompts=`, a list of one or more prompts, got {self.prompts!r}")
        self._last = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if self.trainer is None:
            raise ValueError("`CanaryCallback` needs `trainer=` to generate with")
        super().on_train_begin(args, state, control, **kwargs)
        self._handle(self._sing(), state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if from_first(time.monotonic() - self._last >= 60 * self.minutes):  # each process has a clock of its own
            self._begin(args, state, {})
            self._handle(self._sing(), state, control)
        super().on_step_end(args, state, control, **kwargs)

    def _sing(self):
        self._last = time.monotonic()
        answers = generate_answers(self.trainer, self.prompts or [], self.max_new_tokens)
        now, error = on_main_process(lambda: self._measure(answers))
        if error is not None:
            yield Finding("the canary's judge failed", None, None, f"{error}.", acts=False, level="notice")
            return
        yield from self._compare(now)

    def _compare(self, now: dict[str, float]) -> Iterator[Finding]:
        """Yield a finding for each number in `now` that is too far from the first answers' number."""
        first = self.memory.setdefault("first", now)
        advice = "Compare the last answers in `canary.jsonl` with the first ones there."
        length, start = now["length"], max(first["length"], 1.0)
        if not start / self.length_factor <= length <= start * self.length_factor:
            bound = start * self.length_factor if length > start else start / self.length_factor
            yield Finding("the canary's answers changed in length", length, bound, advice, start)
        phrase, start = now["phrase"], first["phrase"]
        if phrase > start + self.phrase:
            yield Finding("one phrase spreads over the canary's answers", phrase, start + self.phrase, advice, start)
        if "score" in now:
            drop = first["sigma"] / 2 if self.score_drop is None else self.score_drop
            scores = self.follow("score", now["score"], first=1)
            if (mean := scores.below(1, -drop)) is not None:
                yield Finding("the canary's score fell", mean, first["score"] - drop, advice, first["score"])

    def _measure(self, answers: dict[str, list]) -> dict[str, float]:
        texts = list(map(text_of, answers["completions"]))
        measured: dict[str, float] = {"length": fmean(len(words_of(text)) for text in texts)}
        found: dict[str, float] = {}
        RepetitionWatch()(self.prompts or [], texts, log_metric=found.__setitem__)
        measured["phrase"] = found["repetition/top_phrase_share"]
        if self.judge is not None:
            scored = numbers_of(awaited(self.judge(**answers)))
            scores = [score for score in scored if score is not None]
            mean = fmean(scores)
            measured |= {"score": mean, "sigma": fmean((s - mean) ** 2 for s in scores) ** 0.5}
        rows = [{"step": self.step, "prompt": p, "answer": a} for p, a in zip(self.prompts or [], texts, strict=True)]
        JSONLWriter(f"{self._args.output_dir}/canary.jsonl").write(*rows)
        return measured
