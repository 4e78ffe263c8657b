"""Compare gold, a judge's score that training never sees, with the reward that is trained on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ..rewards.member import awaited
from ..rewards.watches.gold_judge import GoldJudgeReward
from ..rewards.watches.watch import numbers_of
from ..runs.needs import rewards_of
from .generation import generate_answers
from .metrics import is_training_log, metrics_of
from .monitor import POSITIVE, Finding, MonitorCallback, number_of_rows, on_main_process, spread_key

ROWS = "rows"  # key of the number of answers that the judge scored; it is not a metric


@dataclass(eq=False, kw_only=True)
class GoldGapCallback(MonitorCallback):
    """
    Alert when the reward that is trained on (the proxy) rises more than the score of a judge (gold).

    Also alert when answers lose against the first evaluation's answers, by the judge's scores.

    The gap is (proxy − proxy₀)/σ(proxy₀) − (gold − gold₀)/σ(gold₀). Here proxy and gold are means over an evaluation,
    index 0 is the first evaluation, and σ is the standard deviation of its single scores. Set `eval_on_start=True` so
    that the first evaluation measures the start policy.

    To end training at the highest gold and keep that model, use what transformers has: `EarlyStoppingCallback`,
    `metric_for_best_model="eval_rewards/gold_judge/mean"` and `load_best_model_at_end=True`.

    >>> def judge(completions, **columns):
    ...     return [float(len(set(text.split()))) for text in completions]
    >>> trainer.add_callback(GoldGapCallback(trainer=trainer, judge=judge, num_prompts=8, action="stop"))

    Args:
        gold: key of the gold score in the evaluation's metrics. The default is the key that
            [`~trl_ext.rewards.GoldJudgeReward`] logs.
        proxy: key of the proxy in the evaluation's metrics. The default is the key of the trainer's own reward.
        limit: the monitor acts if the gap, in σ, is above this by more than noise.
        win_rate: the monitor acts if the share of answers that beat the start policy's answers is below this by more
            than noise.
        trainer, judge: for trainers without reward functions (SFT, DPO, KTO); give both. At each evaluation the
            trainer's model greedily answers the first prompts of its evaluation set, from the column `prompt`.
            `judge`, a reward function, async or not, scores the answers; it also gets the other columns. Then
            `eval_gold/mean`, `eval_gold/std` and `eval_gold/win_rate` are logged. `eval_gold/mean` is the default of
            `gold`, and can be the `metric_for_best_model`.
        num_prompts: number of prompts that `trainer` answers.
        max_new_tokens: maximum length of these answers, in tokens.
        others: see [`MonitorCallback`].
    """

    gold: str | None = None
    proxy: str | None = None
    limit: float = 0.3
    win_rate: float = 0.5
    trainer: Any = None
    judge: Any = None
    num_prompts: int = 64
    max_new_tokens: int = 128
    runbook = "gold"
    ranges = {"limit": POSITIVE, "win_rate": ("in [0, 1)", lambda x: 0 <= x < 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.trainer is None) != (self.judge is None):
            raise ValueError(
                "give both `trainer`, which generates answers, and `judge`, which scores them; got one of the two"
            )
        if self.trainer is not None:
            columns = getattr(self.trainer.eval_dataset, "column_names", [])
            if "prompt" not in columns:
                raise ValueError(
                    f"`trainer` needs an `eval_dataset` with the column `prompt` to generate answers, got {columns}"
                )

    def lacks(self, trainer):
        """Yield a sentence if the trainer never evaluates, and one if no reward function logs gold."""
        if trainer.args.eval_strategy == "no":
            yield (
                "GoldGapCallback reads evaluations, but `eval_strategy` is 'no': set `eval_strategy`, or remove the "
                "monitor."
            )
        has_judge = any(isinstance(each, GoldJudgeReward) for each in rewards_of(trainer))
        if self.trainer is None and self.gold is None and not has_judge:
            yield (
                "GoldGapCallback has no gold score to read: add `GoldJudgeReward` to the reward functions with "
                "weight 0, give the monitor `trainer` and `judge`, name another key by `gold`, or remove the "
                "monitor."
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if args.eval_strategy == "no" and is_training_log(logs or {}) and not {"first", "told"} & self.memory.keys():
            self.memory["told"] = True
            advice = "GoldGapCallback reads evaluations: set `eval_strategy`, or remove the monitor."
            self._note("nothing to watch: `eval_strategy` is 'no', so nothing is evaluated", advice)
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._begin(args, state, {})
        if metrics is None:
            return
        if self.trainer is not None:
            metrics.update(self._judge())
        rows = number_of_rows(kwargs.get("eval_dataloader")) if self.trainer is None else metrics.pop(ROWS, None)
        found = list(self._compare(metrics, rows))
        self._handle(iter(found), state, control)

    def _compare(self, metrics: dict[str, Any], rows: int | None) -> Iterator[Finding]:
        """
        Compare an evaluation with the first one, and yield findings. `rows` is the evaluation's number of prompts;
        None if it is unknown.
        """
        reward = metrics_of(self._args).get("reward")
        gold_key = self.gold or ("eval_gold/mean" if self.trainer is not None else "eval_rewards/gold_judge/mean")
        proxy_key = self.proxy or (f"eval_{reward.key}" if reward else None)
        gold, proxy = self._judged(metrics, gold_key), self._judged(metrics, proxy_key)
        rate = self._number("eval_gold/win_rate", metrics.get("eval_gold/win_rate"))
        first = self.memory.setdefault("first", {})
        is_first = not {"gold", "proxy"} <= first.keys()
        if gold is None and "gold" not in first and self.step > self.memory.setdefault("first_step", self.step):
            advice = "Add the gold judge to `reward_funcs`, and to `eval_dataset` the column that marks its rows."
            self._note(f"nothing to watch: `{gold_key}` is not in the evaluation", advice)
        if gold is not None and proxy is not None:
            (mean, sigma), (proxy_mean, proxy_sigma) = (
                first.setdefault(name, value) for name, value in (("gold", gold), ("proxy", proxy))
            )
            if sigma > 0 and proxy_sigma > 0:
                rises = (proxy[0] - proxy_mean) / proxy_sigma, (gold[0] - mean) / sigma
                gap = self.memory["gap"] = rises[0] - rises[1]
                noise: dict[str, Any] = {}
                of_sigmas = 0.0
                if rows is not None:  # the gap's error in σ of the first evaluation, and what the error of that σ adds
                    now = math.hypot(proxy[1] / proxy_sigma, gold[1] / sigma) / math.sqrt(rows)
                    noise = {"error": now, "dof": max(rows - 1, 1)}
                    of_sigmas = math.hypot(*rises) / math.sqrt(2 * rows)
                if not is_first and "gap" not in self.memory.get("series", {}):
                    self.follow("gap", 0.0, first=1, **noise)  # resumed from a version that kept no series
                gaps = self.follow("gap", gap, first=1, **noise)
                if (mean := gaps.above(1, self.limit, of_sigmas)) is not None:
                    advice = (
                        "The policy games the reward: stop the run, and keep the checkpoint with the best gold score."
                    )
                    yield Finding("the proxy left gold behind", mean, self.limit, advice, 0.0)
        if rate is not None:
            # Of a win's variance, 1/4 or less, 1/6 is of the answers now. The prompts and the start policy's answers,
            # which all evaluations share, may make up all of it, so that no number of evaluations lessens their part.
            error, shared = (None, 0.0) if rows is None else (math.sqrt(1 / (6 * rows)), 0.5 / math.sqrt(rows))
            rates = self.follow("win_rate", rate, error=error)
            if (mean := rates.below(plus=self.win_rate, error=shared)) is not None:
                advice = "Go back to the checkpoint with the best gold score."
                yield Finding("answers lose against the start policy's", mean, self.win_rate, advice, 0.5)

    def _judged(self, metrics: dict[str, Any], key: str | None) -> list[float] | None:
        """Return a list of the mean under a key and the σ of single scores (0 if not logged); None without a mean."""
        mean = None if key is None else self._number(key, metrics.get(key))
        if key is None or mean is None:
            return None
        spread = spread_key(key)
        return [mean, self._number(spread, metrics.get(spread)) or 0.0]

    def _judge(self) -> dict[str, float]:
        """Generate answers on all processes, score them on the main one, and return the metrics; {} if that failed."""
        rows = self.trainer.eval_dataset[: self.num_prompts]
        answers = rows | generate_answers(self.trainer, list(rows.pop("prompt")), self.max_new_tokens)
        judged, error = on_main_process(lambda: self._scores(answers))
        if error is not None:
            self._note("the judge failed", f"{error}.")
            return {}
        metrics, scores = judged
        self.memory.setdefault("start_scores", scores)
        self.trainer.log(dict(metrics))
        return metrics | {ROWS: sum(score is not None for score in scores)}

    def _scores(self, answers: dict[str, list]) -> tuple[dict[str, float], list[float | None]]:
        scores = numbers_of(awaited(self.judge(**answers)))
        numbers = [score for score in scores if score is not None]
        metrics = {"eval_gold/mean": fmean(numbers), "eval_gold/std": stdev(numbers) if len(numbers) > 1 else 0.0}
        starts = self.memory.get("start_scores")
        if starts is not None:
            pairs = [(a, b) for a, b in zip(scores, starts, strict=True) if a is not None and b is not None]
            metrics["eval_gold/win_rate"] = fmean(0.5 * ((a > b) + (a >= b)) for a, b in pairs)
        return metrics, scores
