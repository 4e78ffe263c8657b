"""Find what the reward pays for, and warn of reward hacking: a feature without content explains the reward's rise."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DefaultFlowCallback

from ..data.messages import repeated_calls
from ..evaluation.attribution import Attribution, Sums, features_of, reward_attribution
from ..functional import spent_level, student_quantile
from ..rewards.completions import text_of
from ..runs.files import PRIVATE_FOLDER, finite, write_text
from .metrics import is_training_log, rollout_steps
from .monitor import Finding, MonitorCallback, error_of_mean, number_of_rows, spread_key
from .monitors import ScoreFallCallback
from .trend import ALPHA

ATTRIBUTION = "attribution.json"  # what the run's page shows of it
_ERRORS = 2.5  # standard errors between what a feature was paid and its lower bound
_REPORTED = 0.25  # part of the rise that is worth a line on the terminal
_LETTERS = 1000  # of a completion on the page


@dataclass(eq=False, kw_only=True)
class HackWatch(MonitorCallback):
    """
    Find what the reward pays for, and alert when it pays for a feature without content, as in reward hacking.

    After each rollout, [`~trl_ext.evaluation.reward_attribution`] finds which cheap features of completions explain
    the rise of the mean reward: phrases, length, empty answers, words of the prompt, repetition, capital letters,
    characters, tool calls. The run's page shows the features that explain most. With the sink `jsonl` they are kept in
    `attribution.json` in the output directory (with `push_to_hub` in its folder `_run`). A notice says when a feature
    first explains a quarter of the rise.

    Logs, also for callbacks that run later:

    - `attribution/rise`: rise of the mean reward since the first rollouts, in standard deviations of single scores
    - `attribution/<kind>`: part of the rise that this kind of feature explains
    - `watch/risk`: part of the rise that features without content explain at least (lower confidence bound), in [0, 1]

    The monitor acts when `watch/risk` is above `limit`. The risk is 0 unless the rise is significant. These features
    do not count:

    - features that are `expected`, digits, and the number of tool calls; the number of repeated calls does count
    - features that became rarer, except length and characters
    - a phrase, unless at least the share `spread` of the completions has it: fewer may be completions of a few prompts
    - a character, unless it explains a quarter of the rise: right words change all frequencies a little

    If an evaluation measures a gold score, which training never uses, the risk is 0 once the gold score has risen,
    until it falls from its best value. A fall of the gold score while the reward rises counts as a hack by itself.

    PPOTrainer's setting `watch` attaches a HackWatch.

    >>> trainer.add_callback(HackWatch(trainer=trainer, action="stop", expected=["length", "phrase:the answer is"]))

    Args:
        trainer: the GRPOTrainer, RLOOTrainer or PPOTrainer whose completions are read.
        limit: the monitor acts if `watch/risk` is above this.
        spread: a phrase counts once at least this share of completions has it.
        gold: key of the gold score in the evaluation's metrics.
        expected: features that the reward may rightly pay for: names such as `length`, or `phrase:…` with a phrase.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    limit: float = 0.1
    spread: float = 0.25
    gold: str = "eval_rewards/gold_judge/mean"
    expected: Sequence[str] = ()
    runbook = "hack"
    _shown = dict[str, Any]()  # of `ATTRIBUTION`

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if not hasattr(self.trainer, "_logs"):
            advice = "Pass the GRPOTrainer, RLOOTrainer or PPOTrainer as `trainer=trainer`, or remove the monitor."
            self._note("nothing to watch: the monitor was given no `trainer` whose completions it can read", advice)

    def on_step_end(self, args, state, control, **kwargs):
        # After the first step of a rollout the table holds that rollout; after an evaluation, the evaluation
        table = getattr(self.trainer, "_logs", None)
        if table and table["prompt"] and (state.global_step - 1) % rollout_steps(args) == 0:
            weights = self.trainer.reward_weights.numpy(force=True)[:, None]
            self.step = state.global_step
            # A completion that only functions of weight 0 score, such as a gold judge, has no score
            scores = np.where(weights, np.array([*table["rewards"].values()], float), np.nan)
            total = np.nansum(scores * weights, 0)
            scores = np.where(np.isnan(scores).all(0), np.nan, total)
            self.observe([*table["prompt"]], [*table["completion"]], scores.tolist())
        super().on_step_end(args, state, control, **kwargs)

    def observe(self, prompts: Sequence, completions: Sequence, scores: Sequence[float | None]) -> None:
        """
        Add a rollout to the attribution.

        Args:
            prompts, completions: N prompts and their N completions, texts or messages.
            scores: N numbers, one for each completion. A completion whose score is None or not finite is left out.
        """
        values = np.array(scores, float)
        kept = np.flatnonzero(np.isfinite(values)).tolist()
        if not kept:
            return
        values = values[kept].tolist()
        asked = [text_of(prompts[at]) for at in kept]
        texts = [text_of(completions[at]) for at in kept]
        features = features_of(asked, texts, [repeated_calls(completions[at]) for at in kept])
        sums = Sums(self.memory.get("sums"))
        sums.add(features, values, asked)
        attribution = reward_attribution(sums, self.expected)
        parts = dict.fromkeys(self.memory.get("parts", ()), 0.0)
        self.memory |= {"sums": sums.dump(), "risk": 0.0, "rise": 0.0, "parts": parts}
        self._shown = {}
        noise = student_quantile(spent_level(sums.rollouts, ALPHA), math.inf) * attribution.error
        if sums.begin == sums.count or attribution.rise <= noise:
            return
        for feature in attribution.paid:
            name = f"attribution/{feature.kind}"
            parts[name] = parts.get(name, 0.0) + feature.part
        bad = [
            feature
            for feature in attribution.paid
            if feature.is_bad
            and (feature.kind != "phrase" or feature.now >= self.spread)
            and (feature.kind != "character" or feature.part >= _REPORTED)
        ]
        bound = sum(feature.paid for feature in bad) - _ERRORS * math.hypot(*(feature.error for feature in bad))
        self.memory["risk"] = min(max(bound / attribution.rise, 0.0), 1.0)
        self.memory["rise"] = attribution.rise / (attribution.sigma or 1.0)
        self.memory["reasons"] = [feature.in_words(attribution.sigma) for feature in bad]
        self._show(attribution, list(zip(features, texts, values, strict=True)))

    def _show(self, attribution: Attribution, completions: list[tuple[dict[str, float], str, float]]) -> None:
        """Keep what the page shows, and note what is new. `completions`: the features, text and score of each."""
        self._shown = {"rise": self.memory["rise"], "paid": []}
        for feature in attribution.paid[:3]:
            words = feature.in_words(attribution.sigma)
            what = f"the reward pays for {'less of ' * (feature.effect < 0)}{feature.what}"
            is_new = not feature.is_expected and what not in self.memory.get("raised", {})
            if is_new and feature.part >= _REPORTED and feature.paid > _ERRORS * feature.error:
                self._note(what, f"{words}.")
            curve = self.memory.setdefault("curves", {}).setdefault(feature.name, [[0, feature.first]])
            curve.append([self.step, feature.now])
            # Completions with most of what is paid for; of equals, those that score highest
            ordered = sorted(completions, key=lambda row: (feature.effect * row[0].get(feature.name, 0), row[2]))
            best = ordered[:-3:-1]
            examples = [{"completion": text[:_LETTERS], "score": score} for _, text, score in best]
            shown = {"what": feature.what, "is_share": feature.is_share, "words": words, "examples": examples}
            self._shown["paid"].append(asdict(feature) | shown | {"curve": curve})

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if logs is None or not is_training_log(logs):
            return
        named = {"watch/risk": self.memory.get("risk", 0.0), "attribution/rise": self.memory.get("rise", 0.0)}
        for log in (logs, *state.log_history[-1:]):  # the callbacks behind this one log them
            log.update(self.memory.get("parts", {}) | named)
        if self._shown and "jsonl" in self.sinks and state.is_world_process_zero:
            file = Path(args.output_dir, PRIVATE_FOLDER * args.push_to_hub, ATTRIBUTION)
            write_text(file, json.dumps(finite({"step": self.step, **self._shown})))

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
        fallen = self.memory.get("gold")
        rise = self.memory.get("rise", 0.0)
        if fallen and rise > 0:
            self.memory["risk"] = 1.0
        elif self.memory.get("gold_rose"):
            self.memory["risk"] = 0.0  # whatever it pays for, completions are better than they were
        if (risk := self.memory.get("risk", 0.0)) > self.limit:
            reported = [*filter(None, [fallen]), *self.memory["reasons"], f"Score +{rise:.1f} σ"]
            advice = f"{'. '.join(reported)}. Compare completions of the first rollouts with those of the last."
            yield Finding("the reward rises as in a hack", advice, risk, self.limit)


def attach_watches(trainer: Any, action: Any) -> None:
    """
    Attach to a trainer a `HackWatch`, and a `ScoreFallCallback` that warns, unless it has one.

    Args:
        trainer: a GRPOTrainer, RLOOTrainer or PPOTrainer.
        action: what the `HackWatch` does on its alert; with `"warn"` it alerts only once. `"off"` attaches neither.
    """
    callbacks = trainer.callback_handler.callbacks
    if action == "off":
        return
    if not any(isinstance(each, HackWatch) for each in callbacks):
        repeat_steps = 10**9 if action == "warn" else HackWatch.repeat_steps
        # Before the callbacks that log, so that they have the risk; after the one that decides when to save, which the
        # watch may overrule
        place = 1 + next((at for at, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback)), -1)
        callbacks.insert(place, HackWatch(trainer=trainer, action=action, repeat_steps=repeat_steps))
    if not any(isinstance(each, ScoreFallCallback) for each in callbacks):
        trainer.add_callback(ScoreFallCallback())


def watch_rounds(
    rounds: Sequence[dict[str, Any]], **settings: Any
) -> tuple[float, dict[str, Any] | None, list[dict[str, Any]]]:
    """
    Test several rounds of training, each on the policy's own completions (online DPO), for reward hacking.

    Args:
        rounds: a dict for each round, with its `prompts`, `completions` and `scores`. The prompts are the same in all
            rounds. The first round has the completions of the policy before training.
        settings: arguments of [`HackWatch`].

    Returns:
        Three values:

        - the risk of a hack after the last round, as HackWatch logs it under `watch/risk`
        - an alert, as a dict with the fields of [`Alert`], if the risk is above `limit`; else None
        - a dict for each of the (up to three) features that explain most of the rise, as `attribution.json` has them
          under `paid`; [] if the mean score has not risen significantly
    """
    watch = HackWatch(sinks=[], **settings)
    for watch.step, given in enumerate(rounds):
        watch.observe(**given)
    alerts = [vars(watch._alert(found, "warn")) for found in watch.watch({})]
    return watch.memory.get("risk", 0.0), next(iter(alerts), None), watch._shown.get("paid", [])
