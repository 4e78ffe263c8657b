"""Measure completions by reward functions, most of weight 0, since callbacks do not get completions."""

import json
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import regex
import torch
from accelerate import PartialState

from ..evaluation.words import UNSPACED, copied_shares, corpus_ngrams, words_of
from ..runs.files import append_jsonl, read_jsonl
from ..upstream.names import get_callable_name
from ..upstream.packages import hide_none_logged
from .background import awaited
from .completions import record_completions, recording_folder, text_of
from .member import MarksFailures, checked_name, returns_nan, scorer
from .scores import log_to, of_rows, scores_in, total_of, without_failures


class Watch:
    """
    Base class of reward functions that measure completions, most of them with weight 0.

    Args:
        folder: folder of the file `completions.rank{r}.jsonl`, to which each completion is appended as one line. The
            line has `timestamp`, `step`, `rank`, `prompt`, `completion`, and `scores` of all watches. A completion
            with tool calls or several messages is written as messages, any other one as text. None: the folder of
            [`~trl_ext.callbacks.JSONLCallback`]; without that callback nothing is written.
        score: score that each completion gets. None: the watch does not count in the reward. Give 0.0 if no other
            reward function gives a score, since TRL needs one.
    """

    __name__ = "watch"

    def __init__(self, folder: str | os.PathLike[str] | None = None, score: float | None = None):
        self.folder = folder
        self.score = score
        hide_none_logged()

    def folder_of(self, trainer_state: Any) -> Any:
        """Return the watch's own folder, else that of the `JSONLCallback` of the run with this state, else None."""
        return self.folder if self.folder is not None else recording_folder(trainer_state)

    def write(self, file: str, rows: list[dict[str, Any]], trainer_state: Any) -> None:
        """Append rows to `{file}.rank{r}.jsonl` in the run's folder; do nothing if there is no folder."""
        if (folder := self.folder_of(trainer_state)) is not None:
            append_jsonl(Path(folder, f"{file}.rank{PartialState().process_index}.jsonl"), *rows)

    def write_completions(self, prompts: list, completions: list, scores: list[Any], trainer_state: Any) -> None:
        """
        Append completions to `completions.rank{r}.jsonl`, each with its prompt and what this watch found, an entry of
        `scores`: a number or a dict. `trainer_state`, TRL's, has the step; None for no step.
        """
        step = getattr(trainer_state, "global_step", None)
        named = [{self.__name__: score} for score in scores]
        record_completions(self.folder_of(trainer_state), prompts, completions, named, step)


def numbers_of(scores: Any) -> list[float | None]:
    """Convert scores, such as NumPy's or torch's, to Python's floats, and NaN, the score of a failed row, to None."""
    return without_failures([None if score is None else float(score) for score in scores])


# ---- Scores ----


class GoldJudgeReward(Watch):
    """
    Score evaluation rows, and no others, by a judge that training must not use (the gold judge).

    TRL generates the completions, and the trainer logs:

    - `eval_rewards/gold_judge/mean` and `eval_rewards/gold_judge/std`
    - `eval_gold/win_rate`, from the second evaluation on: the share of completions that score higher than the first
      evaluation's completion of the same prompt; a tie counts one half
    - `eval_gold/tie_rate`, the share of ties

    Set `eval_on_start=True` so that the first evaluation measures the policy before training, the start policy.

    Args:
        judge: a reward function, async or not. It gets only the rows to score, with their columns.
        column: a true value in this column marks a row to score. Only the evaluation set should have the column:
            `eval_dataset.add_column("held_out", [True] * len(eval_dataset))`
        folder: see [`Watch`]. The start policy's completions and scores are also written there, so that a
            resumed run compares with them, too.
        score: score of the rows that are not marked, see [`Watch`].

    Examples:
        >>> from trl_ext.rewards import GoldJudgeReward
        >>> def gold(completions, **kwargs):
        ...     return [float("thank" in text) for text in completions]
        >>> reward = GoldJudgeReward(gold)
        >>> reward(prompts=["Tea?"] * 2, completions=["No, thank you.", "No."], held_out=[True, None])
        [1.0, None]
    """

    __name__ = "gold_judge"

    def __init__(self, judge: Any, column: str = "held_out", **kwargs: Any):
        super().__init__(**kwargs)
        self.judge = judge
        self.column = column
        self._run = time.time()
        self._start_step: int | None = None
        self._start: dict[str, list[float]] = {}  # prompt → scores of the start policy's completions

    def held(self) -> list:
        """Return the rewards that this reward calls."""
        return [self.judge]

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        marks = kwargs.get(self.column) or [False] * len(prompts)
        rows = [i for i, mark in enumerate(marks) if mark]
        scores: list[float | None] = [self.score] * len(prompts)
        if not rows:
            return scores
        marked = {"prompts": prompts, "completions": completions, **kwargs, "log_extra": lambda *_, **__: None}
        marked = of_rows(marked, rows, len(prompts))
        returned = awaited(self.judge(**marked, trainer_state=trainer_state, log_metric=log_metric))
        judged = numbers_of(scores_in(returned, len(rows)))
        step = getattr(trainer_state, "global_step", 0)
        if self._start_step is None:
            self._start_step = step if step == 0 else self._read_start(trainer_state, step)
        wins: list[float] = []
        for prompt, completion, score in zip(marked["prompts"], marked["completions"], judged, strict=True):
            key = json.dumps(prompt, ensure_ascii=False, default=str)
            if score is None:
                continue
            if step == self._start_step:
                self._start.setdefault(key, []).append(score)
                row = {"run": self._run, "processes": PartialState().num_processes, "step": step, "prompt": key}
                rows_of_start = [{**row, "completion": text_of(completion), "score": score}]
                self.write("gold_start", rows_of_start, trainer_state)
            else:
                for old in self._start.get(key, []):
                    wins.append(0.5 * ((score > old) + (score >= old)))
        if wins:
            log_to(log_metric, {"gold/win_rate": sum(wins) / len(wins), "gold/tie_rate": wins.count(0.5) / len(wins)})
        for i, score in zip(rows, judged, strict=True):
            scores[i] = score
        self.write_completions(marked["prompts"], marked["completions"], judged, trainer_state)
        return scores

    def _read_start(self, trainer_state: Any, step: int) -> int:
        """Read the scores of the start policy that an interrupted run wrote; return their step, or `step` if none."""
        folder = self.folder_of(trainer_state)
        paths = [] if folder is None else sorted(Path(folder).glob("gold_start.rank*.jsonl"))
        files = [rows for path in paths if (rows := list(read_jsonl(path)))]
        newest = max((rows[-1] for rows in files), key=lambda row: row["run"], default={})
        for rows in files:  # earlier runs wrote to the same files and, with more processes, to more of them
            for row in rows if rows[-1].get("processes") == newest.get("processes") else []:
                if row["run"] == rows[-1]["run"]:
                    self._start.setdefault(row["prompt"], []).append(float(row["score"]))
                    step = min(step, row["step"])
        return step


class ScoreWatch(MarksFailures, Watch):
    """
    Log quantiles of a reward function's scores of single completions, as `score_watch/<name>/q05` and so on.

    With `bound`, the share of scores above it is also logged, as `score_watch/<name>/share_above`. Each process
    computes the quantiles of each batch, and their means are logged.

    Args:
        reward: a reward function, async or not. In `reward_funcs`, replace the function by the watch, with the
            function's weight; the watch returns the function's scores.
        bound: log the share of scores above this number; 0.8 suits scores from 0 to 1. None: no such share is logged.
        quantiles: which quantiles to log, each in [0, 1].
        name: name in the metrics. The default is the reward's own name.
        folder: see [`Watch`]. Give one within a `CachedReward`, which hides the run from its reward. `score`
            has no effect.

    Examples:
        >>> from trl_ext.rewards import ScoreWatch
        >>> def length(completions, **kwargs):
        ...     return [float(len(text.split())) for text in completions]
        >>> watch = ScoreWatch(length, bound=2.5, quantiles=(0.5,))
        >>> watch(prompts=["Tea?"] * 3, completions=["No.", "Yes, please.", "A cup, please."], log_metric=print)
        score_watch/length/q50 2.0
        score_watch/length/share_above 0.3333333333333333
        [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        reward: Any,
        bound: float | None = None,
        quantiles: tuple[float, ...] = (0.05, 0.5, 0.95),
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.reward = reward
        self.bound = bound
        self.quantiles = quantiles
        self.__name__ = checked_name(name, get_callable_name(reward))

    def held(self) -> list:
        """Return the rewards that this reward calls."""
        return [self.reward]

    def scores_or_nan(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[Any]:
        """
        Return what the reward's `scores_or_nan` returns, or what it returns itself if it does not mark failures.

        The arguments are those of a reward function; `trainer_state`, TRL's, may be None.
        """
        arguments = {"log_metric": log_metric, "trainer_state": trainer_state, **kwargs}
        returned = awaited(scorer(self.reward)(prompts=prompts, completions=completions, **arguments))
        scores = list(map(total_of, returned))
        values = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
        values = values[values.isfinite()]
        if len(values):
            metrics: dict[str, float | None] = {f"q{100 * q:02.0f}": values.quantile(q).item() for q in self.quantiles}
            if self.bound is not None:
                metrics["share_above"] = (values > self.bound).double().mean().item()
            log_to(log_metric, {f"score_watch/{self.__name__}/{key}": value for key, value in metrics.items()})
        self.write_completions(prompts, completions, scores, trainer_state)
        return returned

    @property
    def marks_failures(self) -> bool:
        return returns_nan(self.reward)


def score_watch(reward: Any, **kwargs: Any) -> ScoreWatch:
    """Wrap a reward function in a [`ScoreWatch`]; `kwargs` are the other arguments of the class."""
    return ScoreWatch(reward, **kwargs)


# ---- Words ----


class RepetitionWatch(Watch):
    """
    Log how much completions repeat themselves, each other or a corpus, measured by n-grams of words.

    In scripts without spaces, such as Chinese, Japanese and Thai, each character counts as a word.

    - `repetition/distinct_{n}`: different n-grams of the batch ÷ all n-grams of the batch (Li et al. 2016, 1510.03055)
    - `repetition/repeated`: a completion's n-grams that it already had at an earlier place ÷ all its n-grams, mean
      over completions
    - `repetition/top_phrase_share`: completions with the top phrase ÷ all completions. The top phrase is the n-gram
      that the most completions have; the attribute `top_phrase` and `completions.rank{r}.jsonl` say which it is
    - `repetition/copied_share`: completions with `copied_words` words in a row from the corpus ÷ all completions; only
      with a `corpus`

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
        super().__init__(**kwargs)
        self.n = n
        self.copied_words = copied_words
        self.corpus = corpus_ngrams(corpus, copied_words)
        self.top_phrase = ""

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        if not completions:
            return []
        metrics, scores = self.measure(completions)
        log_to(log_metric, metrics)
        self.write_completions(prompts, completions, scores, trainer_state)
        return [self.score] * len(completions)

    def measure(self, completions: list) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """
        Measure completions, and set the attribute `top_phrase`.

        Returns:
            Two values: the metrics by their names in the logs, None for a metric without a value; and for each
            completion a dict with `repeated`, the share of its n-grams that it already had; `top_phrase`; and whether
            it has that phrase (`has_top_phrase`) and copies the corpus (`copied`).
        """
        texts = [text_of(completion) for completion in completions]
        words = [words_of(text) for text in texts]
        grams = [list(zip(*(row[i:] for i in range(self.n)), strict=False)) for row in words]
        total = sum(map(len, grams))
        different = len({gram for row in grams for gram in row})
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


repetition_watch = RepetitionWatch()


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
        veto: score of a completion with one of the phrases; all other completions score 0.0. It affects training only
            if the function gets a weight other than 0. None: all completions get `score`.
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
        super().__init__(**kwargs)
        self.phrases = [phrases] if isinstance(phrases, str) else list(phrases)
        if not self.phrases or not all(map(str.strip, self.phrases)):
            raise ValueError(f"`phrases` is {self.phrases}: give at least one phrase, and no empty one")
        self.veto = veto
        self._pattern = regex.compile("|".join(map(_pattern, self.phrases)), regex.IGNORECASE | regex.VERSION1)

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        if not completions:
            return []
        matches = [self._pattern.findall(_composed(text_of(completion))) for completion in completions]
        log_to(log_metric, {"phrase_review/share": sum(map(bool, matches)) / len(matches)})
        head = {"step": getattr(trainer_state, "global_step", None), "rank": PartialState().process_index}
        rows = [
            {**head, "prompt": text_of(prompt), "completion": text_of(completion), "phrases": sorted(set(phrases))}
            for prompt, completion, phrases in zip(prompts, completions, matches, strict=True)
            if phrases
        ]
        self.write("review", rows, trainer_state)
        self.write_completions(prompts, completions, [{"phrases": len(phrases)} for phrases in matches], trainer_state)
        if self.veto is None:
            return [self.score] * len(completions)
        return [self.veto if phrases else 0.0 for phrases in matches]


def _composed(text: str) -> str:
    """Normalise a text so that each character, such as a letter with an accent, has only one encoding (NFKC)."""
    return unicodedata.normalize("NFKC", _MARKS.sub(r"\1", text))


def _pattern(phrase: str) -> str:
    """Return a regular expression for a phrase, which finds only whole words in scripts that have spaces."""
    words = regex.sub(_HIDDEN, "", _composed(phrase)).split()
    within = [f"{_HIDDEN}*".join(map(regex.escape, word)) for word in words]
    begins = regex.match(_WORD, words[0][0], regex.VERSION1)
    ends = regex.match(_WORD, words[-1][-1], regex.VERSION1)
    start = rf"(?<!{_WORD})" if begins else ""
    end = rf"(?!{_WORD})" if ends else ""
    return start + rf"(?:\s|{_HIDDEN})+".join(within) + end
