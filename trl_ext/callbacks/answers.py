"""Generate completions in trainers that generate none (SFT, DPO), and monitor them by a judge or on fixed prompts."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from ..evaluation.words import words_of
from ..models import answer_rows, context_of, eos_token_ids, prompt_token_ids, sample
from ..rewards.background import awaited
from ..rewards.completions import record_completions, recording_folder, text_of
from ..rewards.watches import RepetitionWatch, numbers_of
from ..runs.files import append_jsonl, from_first, on_first
from ..upstream.names import unwrap_model_for_generation
from .metrics import metrics_of
from .monitor import Finding, MonitorCallback, error_of_mean, number_of_rows, spread_key


def generate_completions(trainer: Any, prompts: list, max_new_tokens: int) -> dict[str, list]:
    """
    Have a trainer's model answer each prompt greedily. All processes must call this; each returns all completions.

    A prompt that is longer than the tokenizer's maximum, or fills the model's context, loses its beginning.

    Args:
        trainer: any Trainer of a causal language model.
        prompts: texts or messages.
        max_new_tokens: maximum length of a completion, in tokens. It is lowered if the model's context has less room
            after the longest prompt.

    Returns:
        A dict with the arguments of a reward function:

        - `prompts`: as they were given.
        - `completions`: the completions; text for a prompt of text, a list with one message for a prompt of messages.
        - `completion_ids`, `prompt_ids`: for each completion or prompt, a list of its token ids.
        - `finished`: for each completion, whether it ends with EOS.
    """
    accelerator = trainer.accelerator
    args = trainer.args
    was_training = trainer.model.training
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # a processor has one
    context = context_of(accelerator.unwrap_model(trainer.model))
    limit = min(tokenizer.model_max_length, max(context - max_new_tokens, context // 2))  # leave room to generate
    prompt_ids = [list(ids[-limit:]) for ids in prompt_token_ids(tokenizer, prompts)]
    trainer.model.eval()  # without dropout
    try:
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped, accelerator, gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            ) as model,
            # Padded: under ZeRO-3 and FSDP a process without prompts would leave the others waiting
            accelerator.split_between_processes([*range(len(prompts))], apply_padding=True) as mine,
        ):
            model = getattr(model, "policy", model)  # PPOTrainer's model keeps a record of what its rollouts sample
            eos = eos_token_ids(model, tokenizer)
            completion_ids = sample(
                model,
                [prompt_ids[i] for i in mine],
                eos,
                max_new_tokens=min(max_new_tokens, context - max(map(len, prompt_ids))),
                temperature=0.0,
                batch_size=args.per_device_eval_batch_size,
            )
    finally:
        trainer.model.train(was_training)
    # By number, for the padding is in the middle
    by_prompt = dict(gather_object([*zip(mine, completion_ids, strict=True)]))
    rows = answer_rows(tokenizer, prompts, prompt_ids, [by_prompt[i] for i in range(len(prompts))], eos)
    return {
        "prompts": prompts,
        "completions": [row["completion"] for row in rows],
        **{name: [row[name] for row in rows] for name in ("completion_ids", "prompt_ids", "finished")},
    }


@dataclass(eq=False, kw_only=True)
class AnswersCallback(TrainerCallback):
    """
    Have the model answer a few prompts before training, at each evaluation and at the end.

    Use it for SFT and DPO, which generate no completions by themselves. The completions are greedy, have at most 128
    tokens, and are appended to `completions.rank0.jsonl` in the folder of [`JSONLCallback`]; without that callback
    they are not written. All processes generate.

    >>> trainer.add_callback(AnswersCallback(trainer=trainer, prompts=["The sky is", "Two and two are"]))

    Args:
        trainer: any Trainer of a causal language model.
        prompts: texts or messages.
    """

    trainer: Any
    prompts: list[Any]

    def __post_init__(self) -> None:
        self._step = -1

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:  # else the run resumes from a checkpoint
            self.on_evaluate(args, state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        if self._step == state.global_step:  # the end of training, just after an evaluation
            return
        self._step = state.global_step
        answered = generate_completions(self.trainer, self.prompts, max_new_tokens=128)
        if state.is_world_process_zero:
            no_scores: list[dict[str, Any]] = [{} for _ in self.prompts]
            folder = recording_folder(state)
            record_completions(folder, self.prompts, answered["completions"], no_scores, state.global_step)

    on_train_end = on_evaluate


@dataclass(eq=False, kw_only=True)
class GoldGapCallback(MonitorCallback):
    """
    Alert when the reward that is trained on (the proxy) rises more than the score of a judge (gold).

    Also alert when too few completions score higher than the first evaluation's completions of the same prompts.

    The gap is (proxy − proxy₀)/σ(proxy₀) − (gold − gold₀)/σ(gold₀). Here proxy and gold are means over an evaluation,
    index 0 is the first evaluation, and σ is the standard deviation of its single scores. Set `eval_on_start=True` so
    that the first evaluation measures the start policy.

    To end training at the highest gold score and keep that model, use transformers: `EarlyStoppingCallback`,
    `metric_for_best_model="eval_rewards/gold_judge/mean"` and `load_best_model_at_end=True`.

    >>> def judge(completions, **columns):
    ...     return [float(len(set(text.split()))) for text in completions]
    >>> trainer.add_callback(GoldGapCallback(trainer=trainer, judge=judge, num_prompts=64, action="stop"))

    Args:
        gold: key of the gold score in the evaluation's metrics. The default is `eval_gold/mean` with `judge`, else the
            key that [`~trl_ext.rewards.GoldJudgeReward`] logs.
        proxy: key of the proxy in the evaluation's metrics. The default is the key of the trainer's own reward. A
            trainer without one (SFT, DPO, KTO) has no gap: only the completions' win rate is tested.
        limit: the monitor acts if the gap, in σ, is significantly above this.
        win_rate: the monitor acts if the share of completions that beat the start policy's completions is
            significantly below this.
        trainer, judge: for trainers without reward functions (SFT, DPO, KTO); give both. At each evaluation the
            trainer's model greedily answers the first prompts of its evaluation set, from the column `prompt`.
            `judge`, a reward function, async or not, scores the completions; it also gets the other columns. Then
            `eval_gold/mean` and `eval_gold/std` are logged, and from the second evaluation on `eval_gold/win_rate` and
            `eval_gold/tie_rate`. `eval_gold/mean` can be the `metric_for_best_model`.
        num_prompts: number of prompts that `trainer` answers. With fewer than about 16 no win rate is significant.
        max_new_tokens: maximum length of these completions, in tokens.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge is not None:  # read now: a column that is missing shows before training
            self._rows = self.trainer.eval_dataset[: self.num_prompts]
            self._prompts = list(self._rows.pop("prompt"))

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if args.eval_strategy == "no":
            self._note("nothing to watch: the run has no evaluations", "Set `eval_strategy`, or remove the monitor.")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._begin(args, state, {})
        rows = number_of_rows(kwargs.get("eval_dataloader"))
        if self.judge is not None:
            judged, rows = self._judge()
            metrics.update(judged)
        self._handle(self._compare(metrics, rows), state, control)

    def _compare(self, metrics: dict[str, Any], rows: int | None) -> Iterator[Finding]:
        """Yield findings from an evaluation's `metrics`; `rows` is the number of its prompts, None if unknown."""
        reward = metrics_of(self._args).get("reward")
        gold_key = self.gold or ("eval_rewards/gold_judge/mean" if self.judge is None else "eval_gold/mean")
        proxy_key = self.proxy or (f"eval_{reward.key}" if reward else "")
        first = self.memory.setdefault("first", {})
        # Mean, and σ of single scores, of gold and of the proxy
        now = {
            name: [mean, self._number(spread_key(key), metrics) or 0.0]
            for name, key in (("gold", gold_key), ("proxy", proxy_key))
            if (mean := self._number(key, metrics)) is not None
        }
        if "gold" not in now | first and self.step > self.memory.setdefault("first_step", self.step):
            advice = (
                "Add `GoldJudgeReward` to `reward_funcs`, and its column (`held_out`) to `eval_dataset`; or check the "
                "monitor's `gold` and `judge`."
            )
            self._note(f"nothing to watch: `{gold_key}` is not in the evaluation", advice)
        if now.keys() == {"gold", "proxy"}:
            self.memory["first"] = first = now | first
            if first["gold"][1] > 0 and first["proxy"][1] > 0:
                # In σ of the first evaluation
                gold = (now["gold"][0] - first["gold"][0]) / first["gold"][1]
                proxy = (now["proxy"][0] - first["proxy"][0]) / first["proxy"][1]
                sigma = math.hypot(*(now[name][1] / first[name][1] for name in now))
                noise = error_of_mean(sigma, rows)
                of_sigmas = 0.0 if rows is None else math.hypot(gold, proxy) / math.sqrt(2 * rows)
                gap = self.follow("gap", proxy - gold, first=1, **noise)
                if found := gap.above(1, self.limit, of_sigmas):
                    advice = "The policy games the reward: stop, and keep the checkpoint with the best gold score."
                    yield Finding("the proxy rose more than the gold score", advice, *found)
        # Of a win's variance, 1/4 or less, 1/6 is of the completions now. The prompts and the start policy's
        # completions, which all evaluations share, may make up all of it, so that no number of evaluations lessens
        # their part. At a win rate of one half a tie adds no variance, as in a sign test
        error = None
        shared = 0.0
        if rows is not None:
            ties = self._number("eval_gold/tie_rate", metrics) or 0.0
            decided = max(1 - ties, abs(2 * self.win_rate - 1))
            error = math.sqrt(decided / (6 * rows))
            shared = 0.5 * math.sqrt(decided / rows)
        rates = self.follow("win_rate", self._number("eval_gold/win_rate", metrics), error=error)
        if found := rates.below(plus=self.win_rate, error=shared):
            advice = "Go back to the checkpoint with the best gold score."
            yield Finding("completions lose against those of the start policy", advice, *found[:2], 0.5)

    def _judge(self) -> tuple[dict[str, float], int | None]:
        """Generate and score completions; return metrics by name and the number of scores, ({}, None) on failure."""
        columns = self._rows | generate_completions(self.trainer, self._prompts, self.max_new_tokens)
        try:
            metrics, scores = on_first(self._scores, columns)
        except Exception as error:  # training continues without gold
            self._note("the judge failed", f"{error!r}. Training continues; the next evaluation asks the judge again.")
            return {}, None
        self.memory.setdefault("start_scores", scores)
        self.trainer.log(dict(metrics))  # a copy, since `log` adds the epoch
        return metrics, sum(score is not None for score in scores)

    def _scores(self, columns: dict[str, list]) -> tuple[dict[str, float], list[float | None]]:
        scores = numbers_of(awaited(self.judge(**columns)))
        numbers = [score for score in scores if score is not None]
        metrics = {"eval_gold/mean": fmean(numbers), "eval_gold/std": pstdev(numbers)}
        if starts := self.memory.get("start_scores"):
            pairs = [pair for pair in zip(scores, starts, strict=True) if None not in pair]
            metrics["eval_gold/win_rate"] = fmean(0.5 * ((a > b) + (a >= b)) for a, b in pairs)
            metrics["eval_gold/tie_rate"] = fmean(a == b for a, b in pairs)
        return metrics, scores


@dataclass(eq=False, kw_only=True)
class CanaryCallback(MonitorCallback):
    """
    Alert when the greedy completions of a fixed set of prompts change in length, become alike or score lower.

    The model answers the prompts before training, and then every few minutes. Each set of completions is compared with
    the first one, by the mean length, by the share of completions with the most frequent phrase of three words, and,
    with a judge, by the mean score. The completions are kept in `canary.jsonl` in the output directory, unless the
    judge fails.

    An unchanged policy gives the same greedy completions each time, so their length and phrase have no noise. A
    judge's scores may have noise, which is estimated from the earlier scores.

    >>> trainer.add_callback(CanaryCallback(trainer=trainer, prompts=["Who are you?"], minutes=15))

    Args:
        trainer: any Trainer of a causal language model; its model answers.
        prompts: texts or messages.
        minutes: minutes from one set of completions to the next, by the main process's clock.
        judge: a reward function, async or not, that scores the completions; None for no scores.
        length_factor: alert when the mean length, in words, is above the first completions' mean length times this
            factor, or below it divided by this factor.
        phrase: alert when the share of completions with the most frequent phrase rises by more than this.
        score_drop: alert when the mean score falls by more than this. The default is half the standard deviation of
            the first completions' scores.
        max_new_tokens: maximum length of a completion, in tokens.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    prompts: list[Any]
    minutes: float = 15.0
    judge: Any = None
    length_factor: float = 2.0
    phrase: float = 0.5
    score_drop: float | None = None
    max_new_tokens: int = 64
    runbook = "canary"

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._answer_prompts(state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if from_first(time.monotonic() - self._last >= 60 * self.minutes):  # each process has a clock of its own
            self._begin(args, state, {})
            self._answer_prompts(state, control)
        super().on_step_end(args, state, control, **kwargs)

    def _answer_prompts(self, state: Any, control: Any) -> None:
        self._last = time.monotonic()
        columns = generate_completions(self.trainer, self.prompts, self.max_new_tokens)
        try:
            findings = [*self._compare(on_first(self._measure, columns))]
        except Exception as error:  # of the judge, such as one that gives no score: training continues
            findings = self._note(
                "the canary's completions were not compared",
                f"{error!r}. Training continues; the next completions will be compared.",
            )
        self._handle(findings, state, control)

    def _compare(self, now: dict[str, float]) -> Iterator[Finding]:
        """Yield a finding for each number in `now`, from `_measure`, that differs too much from the first ones."""
        first = self.memory.setdefault("first", now)
        advice = "Compare the last completions in `canary.jsonl` with the first ones there."
        length = now["length"]
        start = max(first["length"], 1.0)  # not 0, which no factor raises
        bound = start * self.length_factor if length > start else start / self.length_factor
        if length > max(start, bound) or length < min(start, bound):
            yield Finding("the canary's completions changed in length", advice, length, bound, start)
        bound = first["phrase"] + self.phrase
        if now["phrase"] > bound:
            what = "one phrase spreads over the canary's completions"
            yield Finding(what, advice, now["phrase"], bound, first["phrase"])
        if "score" in now:
            drop = first["sigma"] / 2 if self.score_drop is None else self.score_drop
            if found := self.follow("score", now["score"], first=1).below(1, -drop):
                yield Finding("the canary's score fell", advice, *found)

    def _measure(self, columns: dict[str, list]) -> dict[str, float]:
        texts = list(map(text_of, columns["completions"]))
        repetition, _ = RepetitionWatch().measure(texts)
        measured: dict[str, Any] = {
            "length": fmean(len(words_of(text)) for text in texts),
            "phrase": repetition["repetition/top_phrase_share"],
        }
        if self.judge is not None:
            scores = [score for score in numbers_of(awaited(self.judge(**columns))) if score is not None]
            measured |= {"score": fmean(scores), "sigma": pstdev(scores)}
        rows = [{"step": self.step, "prompt": p, "answer": a} for p, a in zip(self.prompts, texts, strict=True)]
        append_jsonl(f"{self._args.output_dir}/canary.jsonl", *rows)
        return measured
