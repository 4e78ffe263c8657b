"""Find what the reward pays for, and warn of reward hacking: a feature without content explains the reward's rise."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DefaultFlowCallback

from ..data.texts import tool_calls
from ..evaluation.attribution import Attribution, Paid, Sums, features_of, is_expected, reward_attribution
from ..functional import ratio_bound, spent_level, student_quantile
from ..rewards.member import text_of
from ..runs.files import PRIVATE_FOLDER, finite, write_text
from .metrics import is_training_log, rollout_steps
from .monitor import Finding, MonitorCallback, error_of_mean, number_of_rows, spread_key
from .trend import ALPHA

ATTRIBUTION = "attribution.json"  # what the run's page shows of it
_TOLD = 0.25  # part of the rise that is worth a line on the terminal
_LETTERS = 1000  # of a completion on the page


@dataclass(eq=False, kw_only=True)
class HackWatch(MonitorCallback):
    """
    Find what the reward pays for, and alert when it pays for a feature without content, as in reward hacking.

    After each rollout, [`~trl_ext.evaluation.reward_attribution`] finds which cheap features of completions explain
    the rise of the mean reward: phrases, beginnings and endings, length, empty answers, copies of the prompt,
    repetition, capitals, characters, tool calls. The part of the rise that a kind of feature explains is logged as
    `attribution/<kind>`. The run's page shows the features in words, curves and completions, from `attribution.json`
    in the output directory. A notice says when a feature first explains a quarter of the rise.

    The monitor acts when features without content that are not `expected` explain more than `limit` of a significant
    rise. A phrase counts once at least the share `spread` of the completions has it, so that answers to a few prompts
    do not count; a tool call counts if it repeats an earlier call. The lower confidence bound of the explained part,
    corrected for the number of tests, is logged as `watch/risk`, where callbacks that run later can read it.
    PPOTrainer's setting `watch` attaches a HackWatch.

    If an evaluation measures a gold score, which training never uses, the risk is 0 once the gold score has risen,
    until it falls from its best value. A fall of the gold score while the reward rises counts as a hack by itself.

    >>> trainer.add_callback(HackWatch(trainer=trainer, action="stop", expected=["length", "phrase:the answer is"]))

    Args:
        trainer: trainer with a table of completions: GRPOTrainer, RLOOTrainer or PPOTrainer.
        limit: part of the rise beyond which the monitor acts.
        spread: a phrase counts once at least this share of completions has it.
        kl: KL, in nats per completion, beyond which half of `limit` is enough.
        gold: key of the gold score in the evaluation's metrics.
        expected: features that the reward may rightly pay for: names such as `length`, or `phrase:…` with a phrase.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    limit: float = 0.15
    spread: float = 0.25
    kl: float = 5.0
    gold: str = "eval_rewards/gold_judge/mean"
    expected: Sequence[str] = ()
    runbook = "hack"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shown: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if not hasattr(self.trainer, "_logs"):
            advice = "Give `trainer=trainer`, of GRPO, RLOO or PPO, or remove the monitor."
            self._note("nothing to watch: no table of completions", advice)

    def on_step_end(self, args, state, control, **kwargs):
        # After the first step of a rollout the table holds that rollout; after an evaluation it holds its answers
        table = getattr(self.trainer, "_logs", None)
        if table and table["prompt"] and (state.global_step - 1) % rollout_steps(args) == 0:
            weights = dict(zip(self.trainer.reward_func_names, self.trainer.reward_weights.tolist(), strict=False))
            prompts, completions, *rewards = (
                [*column][-args.generation_batch_size :]
                for column in (table["prompt"], table["completion"], *table["rewards"].values())
            )
            used = np.array(rewards, float) * [[weights.get(name, 1.0) or math.nan] for name in table["rewards"]]
            scores = np.where(np.isnan(used).all(0), math.nan, np.nansum(used, 0))
            self.step = state.global_step
            self.observe(prompts, completions, scores.tolist())
        super().on_step_end(args, state, control, **kwargs)

    def observe(self, prompts: Sequence, completions: Sequence, scores: Sequence[float | None]) -> None:
        """
        Add a rollout to the attribution.

        Args:
            prompts, completions: (N) texts or messages.
            scores: (N); completions whose score is None or not finite are left out.
        """
        given = [
            (text_of(prompt), text_of(completion), _calls(completion), score)
            for prompt, completion, score in zip(prompts, completions, scores, strict=True)
            if score is not None and math.isfinite(score)
        ]
        if not given:
            return
        asked, texts, calls, values = zip(*given, strict=True)
        rows = features_of(asked, texts, calls)
        sums = Sums(self.memory.get("sums"))
        sums.add(rows, values, asked)
        found = reward_attribution(sums, self.expected)
        self.memory |= {"sums": sums.dump(), "risk": 0.0, "rise": 0.0}
        noise, quantile = (
            student_quantile(spent_level(sums.rollouts, each), math.inf) for each in (ALPHA, 10 * ALPHA)
        )
        if sums.begins or found.rise <= noise * found.error:
            return
        bad = [each for each in found.paid if self._counts(each)]
        amount, error = sum(each.paid for each in bad), math.hypot(*(each.error for each in bad))
        risk = ratio_bound(amount, error, found.rise, found.error, quantile)
        self.memory |= {"risk": min(max(risk, 0.0), 1.0), "rise": found.rise / (found.sigma or 1.0)}
        self.memory["reasons"] = [each.in_words(found.sigma) for each in bad]
        self._show(found, rows, [{"completion": text[:_LETTERS], "score": score} for _, text, _, score in given])

    def _counts(self, paid: Paid) -> bool:
        """Return whether a feature that the reward pays for counts as a sign of reward hacking."""
        if paid.paid <= 0 or paid.has_content or is_expected(paid.name, self.expected):
            return False
        return paid.kind != "phrase" or paid.share >= self.spread

    def _show(self, found: Attribution, rows: list[dict[str, float]], answers: list[dict[str, Any]]) -> None:
        """
        Keep what this rollout's attribution found, for the logs and for the page.

        For the logs: the part of the rise that each kind of feature explains. For the page: words, curve and two
        completions of the three features that explain most.

        Args:
            found: the attribution.
            rows: each completion's features, as `features_of` returns them.
            answers: each completion with its `score`, as the page shows it.
        """
        parts, shown = dict.fromkeys(self.memory.get("parts", ()), 0.0), []
        for place, each in enumerate(found.paid):
            parts[each.kind] = parts.get(each.kind, 0.0) + each.part
            less = "less of " if each.effect < 0 else ""
            what, words = f"the reward pays for {less}{each.what}", each.in_words(found.sigma)
            expected, is_new = is_expected(each.name, self.expected), what not in self.memory.get("raised", {})
            if is_new and not expected and each.part >= _TOLD and each.paid > 3 * each.error:
                self._note(what, f"{words}.")
            if place < 3:
                was, now = (each.first_share, each.share) if each.is_share else (each.first, each.now)
                curve = self.memory.setdefault("curves", {}).setdefault(each.name, [[0, was]])
                curve.append([self.step, now])
                sign = math.copysign(1, each.effect)
                best = sorted(
                    range(len(rows)), key=lambda at: (-sign * rows[at].get(each.name, 0), -answers[at]["score"])
                )
                more = {"what": each.what, "is_share": each.is_share, "words": words, "is_expected": expected}
                shown.append(asdict(each) | more | {"examples": [answers[at] for at in best[:2]], "curve": curve})
        self.memory["parts"] = parts
        self._shown = {"rise": self.memory["rise"], "paid": shown}

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if logs is None or not is_training_log(logs):
            return
        parts = {f"attribution/{kind}": part for kind, part in self.memory.get("parts", {}).items()}
        parts |= {"watch/risk": self.memory.get("risk", 0.0), "attribution/rise": self.memory.get("rise", 0.0)}
        for log in (logs, *state.log_history[-1:]):  # the callbacks behind this one log them
            log.update(parts)
        if self._shown and "jsonl" in self.sinks and state.is_world_process_zero:
            folder = Path(args.output_dir, PRIVATE_FOLDER) if args.push_to_hub else Path(args.output_dir)
            write_text(folder / ATTRIBUTION, json.dumps(finite({"step": self.step, **self._shown})))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._begin(args, state, {})
        metrics = metrics or {}
        if (value := self._number(self.gold, metrics)) is None:
            return
        noise = error_of_mean(metrics.get(spread_key(self.gold)), number_of_rows(kwargs.get("eval_dataloader")))
        gold, rises = self.follow_best("gold", value, first=1, **noise)
        fallen = gold.below(1)
        self.memory["gold"] = fallen and f"Gold {fallen.value:.2g}, {fallen.baseline:.2g} at best"
        self.memory["gold_rose"] = rises or self.memory.get("gold_rose", False)

    def watch(self, logs):
        fallen, rise = self.memory.get("gold"), self.memory.get("rise", 0.0)
        if fallen and rise > 0:
            self.memory["risk"] = 1.0
        elif self.memory.get("gold_rose"):
            self.memory["risk"] = 0.0  # whatever it pays for, answers are better than they were
        risk, limit = self.memory.get("risk", 0.0), self.limit
        if (self.read_kl(optional=True) or 0.0) > self.kl:
            limit /= 2
        if risk > limit:
            said = [*filter(None, [fallen]), *self.memory["reasons"], f"Score +{rise:.1f} σ"]
            advice = f"{'. '.join(said)}. Compare completions of the first rollouts with those of the last."
            yield Finding("the reward rises as in a hack", advice, risk, limit)


def _calls(completion: Any) -> list[tuple[str, str]]:
    """Return the name and the arguments of each tool call in a completion."""
    turns = [] if isinstance(completion, str) else completion
    calls = [call for turn in turns for call in tool_calls(turn)]
    return [(name, json.dumps(arguments, sort_keys=True, default=str)) for name, arguments in calls]


def attach_watch(trainer: Any, action: Any) -> None:
    """
    Attach a `HackWatch` to a trainer, unless it has one.

    Args:
        trainer: a trainer that keeps a table of completions.
        action: what the `HackWatch` does on its alert, or `"off"` to attach none. With `"warn"` it alerts only once.
    """
    callbacks = trainer.callback_handler.callbacks
    if action != "off" and not any(isinstance(each, HackWatch) for each in callbacks):
        repeat_steps = 10**9 if action == "warn" else HackWatch.repeat_steps
        # Before the callbacks that log, so that they have the risk; after the one that decides when to save, which the
        # watch may overrule
        place = 1 + next((at for at, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback)), -1)
        callbacks.insert(place, HackWatch(trainer=trainer, action=action, repeat_steps=repeat_steps))


def watch_rounds(
    rounds: Sequence[dict[str, Any]], **settings: Any
) -> tuple[float, dict[str, Any] | None, list[dict[str, Any]]]:
    """
    Test several rounds of training for reward hacking; in each, a policy is trained on its own answers (online DPO).

    Args:
        rounds: for each round its `prompts`, `completions` and `scores`. The prompts are the same in all rounds. The
            first round has the answers of the policy before training.
        settings: arguments of [`HackWatch`].

    Returns:
        The risk of a hack after the last round, in the sense of `watch/risk`; an alert if it is above the limit, else
        None; and what the reward paid for most, in the form of `attribution.json`.
    """
    watch, alert = HackWatch(sinks=[], **settings), None
    for watch.step, given in enumerate(rounds):
        watch.observe(**given)
        found = next(watch.watch({}), None)
        alert = None if found is None else vars(watch._alert(found, "warn"))
    return watch.memory.get("risk", 0.0), alert, watch._shown.get("paid", [])
