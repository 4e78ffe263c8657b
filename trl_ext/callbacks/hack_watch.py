"""Say what the reward pays for, and warn of a hack: a feature without content explains the reward's rise."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
_POINTS = 200  # of a feature's curve
_LETTERS = 1000  # of a completion on the page


@dataclass(eq=False, kw_only=True)
class HackWatch(MonitorCallback):
    """
    Say what the reward pays for, and alert when it pays for a feature without content, as in a hack.

    After each rollout, [`~trl_ext.evaluation.reward_attribution`] finds which cheap features of completions explain
    the rise of the mean reward: phrases, beginnings and endings, length, empty answers, copies of the prompt,
    repetition, characters, marks, tool calls. Each is logged as the part of the rise that it explains,
    `attribution/<kind>`; the run's page has words, a picture and completions, from `attribution.json` in the output
    directory. A notice says when a feature first explains a quarter of the rise.

    The monitor acts when features without content, which are not `expected`, explain more than `limit` of a rise that
    is more than noise: of that since the first rollouts, or of that since some ten rollouts ago. A phrase counts once
    `spread` of the completions have it, so that it is no answer to some prompts alone; tool calls count when they
    repeat an earlier one. The part's lower confidence bound, corrected for the number of looks, is logged as
    `watch/risk`, so that callbacks that run after this one find it. PPOTrainer's setting `watch` attaches a HackWatch.

    If an evaluation measures gold, a score that training never sees, the risk is 0 once gold has risen, until it falls
    from its best; a fall while the reward rises is a hack by itself.

    >>> trainer.add_callback(HackWatch(trainer=trainer, action="stop", expected=["length", "phrase:the answer is"]))

    Args:
        trainer: trainer with a table of completions: GRPOTrainer, RLOOTrainer or PPOTrainer.
        limit: part of the rise beyond which the monitor acts.
        spread: a phrase counts once at least this share of completions has it.
        kl: KL, in nats per response, beyond which half of `limit` is enough.
        gold: key of the gold score in the evaluation's metrics.
        expected: features that an honest reward may pay for: names such as `length`, or `phrase:…` with a phrase.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    limit: float = 0.2
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
            scores = [
                _total(row, [weights.get(name, 1.0) for name in table["rewards"]])
                for row in zip(*rewards, strict=True)
            ]
            self.step = state.global_step
            self.observe(prompts, completions, scores)
        super().on_step_end(args, state, control, **kwargs)

    def observe(self, prompts: Sequence, completions: Sequence, scores: Sequence[float | None]) -> None:
        """
        Take a rollout into account.

        Args:
            prompts, completions: (N) texts or messages.
            scores: (N); completions whose score is None or not finite are left out.
        """
        given = {place: score for place, score in enumerate(scores) if _is_number(score)}
        if not given:
            return
        texts = [text_of(completions[place]) for place in given]
        calls = [_calls(completions[place]) for place in given]
        asked = [text_of(prompts[place]) for place in given]
        rows = features_of(asked, texts, calls)
        sums = Sums.load(self.memory["sums"]) if "sums" in self.memory else Sums()
        sums.add(rows, [*given.values()], asked)
        self.memory["sums"] = sums.dump()
        whole, recent = (reward_attribution(sums, self.expected, is_recent) for is_recent in (False, True))
        parts = [None if sums.begins else self._part(each, sums.rollouts) for each in (whole, recent)]
        if parts[0] is None:
            parts[1] = None  # it may have risen from a fall
        shown = whole if (parts[1] or 0) <= (parts[0] or 0) else recent
        risk = min(max(0.0, *(part or 0.0 for part in parts)), 1.0)
        self.memory["reasons"] = [each.in_words(shown.sigma) for each in shown.paid if self._counts(each)]
        self.memory |= {"risk": risk, "rise": 0.0 if parts[0] is None else whole.rise / (whole.sigma or 1.0)}
        if parts[0] is not None:
            self._keep(whole, rows, [*zip(texts, given.values(), strict=True)])

    def _counts(self, paid: Paid) -> bool:
        """Return whether a feature speaks of a hack."""
        if paid.paid <= 0 or paid.has_content or is_expected(paid.name, self.expected):
            return False
        return paid.kind != "phrase" or paid.share >= self.spread

    def _part(self, found: Attribution, look: int) -> float | None:
        """Return the lower bound of the part of the rise that speaks of a hack; None if the rise may be noise."""
        if found.rise <= found.error * student_quantile(spent_level(look, ALPHA), math.inf):
            return None
        paid = [each for each in found.paid if self._counts(each)]
        quantile = student_quantile(spent_level(look, 10 * ALPHA), math.inf)
        error = math.hypot(*(each.error for each in paid))
        return ratio_bound(sum(each.paid for each in paid), error, found.rise, found.error, quantile)

    def _keep(self, found: Attribution, rows: list[dict[str, float]], answers: list[tuple[str, float]]) -> None:
        """Keep what logs and the page show: parts by kind, and of the top features words, curves and completions."""
        parts = dict.fromkeys(self.memory.get("parts", ()), 0.0)
        curves, told = self.memory.setdefault("curves", {}), self.memory.setdefault("told", [])
        sigma, shown = found.sigma or 1.0, []
        for each in found.paid:
            parts[each.kind] = parts.get(each.kind, 0.0) + each.part
            is_new = each.name not in told and not is_expected(each.name, self.expected)
            if is_new and each.part >= _TOLD and each.paid > 3 * each.error:
                told.append(each.name)
                self._note(f"the reward pays for {each.what}", f"{_sentence(each.in_words(sigma))}.")
        for each in found.paid[:3]:
            was, now = (each.first_share, each.share) if each.is_share else (each.first, each.now)
            points = curves.pop(each.name, [[0, was], [0, None]])  # a gap
            curves[each.name] = [*(points[::2] if len(points) > _POINTS else points), [self.step, now]]
            sign = math.copysign(1, each.effect)
            order = sorted(range(len(rows)), key=lambda at: (-sign * rows[at].get(each.name, 0), -answers[at][1]))
            examples = [{"completion": answers[at][0][:_LETTERS], "score": answers[at][1]} for at in order[:2]]
            expected = is_expected(each.name, self.expected)
            words = _sentence(each.in_words(sigma))
            more = {"what": each.what, "is_share": each.is_share, "words": words, "is_expected": expected}
            shown.append(asdict(each) | more | {"examples": examples, "curve": curves[each.name]})
        for name in [*curves][:-8]:
            del curves[name]
        self.memory["parts"] = parts
        self._shown = {"rise": found.rise / sigma, "paid": shown}

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
        value = self._number(self.gold, metrics)
        noise = error_of_mean(metrics.get(spread_key(self.gold)), number_of_rows(kwargs.get("eval_dataloader")))
        gold = self.follow("gold", value, first=1, **noise)
        if gold.first is None:
            return
        fallen = gold.below(1)
        self.memory["gold"] = fallen and f"gold {fallen.value:.2g}, {fallen.baseline:.2g} at best"
        if gold.above(1):  # a fall counts from where gold was highest
            self.memory["gold_rose"] = True
            del self.memory["series"]["gold"]
            self.follow("gold", value, first=1, **noise)

    def watch(self, logs):
        fallen, rise = self.memory.get("gold"), self.memory.get("rise", 0.0)
        if fallen and rise > 0:
            self.memory["risk"] = 1.0
        elif self.memory.get("gold_rose"):
            self.memory["risk"] = 0.0  # whatever it pays for, answers are better than they were
        risk, (kl, length) = (
            self.memory.get("risk", 0.0),
            (self.read(name, optional=True) for name in ("kl", "length")),
        )
        if kl is not None and self.kl_is_per_token:
            kl = None if length is None else kl * length
        limit = self.limit / 2 if kl is not None and kl > self.kl else self.limit
        if risk > limit:
            said = "; ".join(filter(None, [fallen, *self.memory["reasons"], f"score +{rise:.1f} σ"]))
            advice = f"{_sentence(said)}. Compare completions of the first rollouts with those of the last."
            yield Finding("the reward rises as in a hack", advice, risk, limit)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _total(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of a completion's scores, without those that failed; None if none is left."""
    given = [weight * score for score, weight in zip(scores, weights, strict=True) if weight and _is_number(score)]
    return sum(given) if given else None


def _is_number(score: float | None) -> TypeGuard[float]:
    return score is not None and math.isfinite(score)


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
        action: action of the watch on its alert, or `"off"` to attach none. With `"warn"` the alert is sent only once.
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
    Watch several rounds of training. In each round a policy is trained on its own answers, as in online DPO.

    Args:
        rounds: of each round `prompts`, `completions` and `scores`, the policy's answers to prompts that are the same
            for all rounds. The first round is the policy before training.
        settings: arguments of [`HackWatch`].

    Returns:
        The risk of a hack after the last round; an alert if it is above the limit, else None; and what the reward paid
        for most, as `attribution.json` has it.
    """
    watch, alert = HackWatch(sinks=[], **settings), None
    for watch.step, given in enumerate(rounds):
        watch.observe(**given)
        found = next(watch.watch({}), None)
        alert = None if found is None else vars(watch._alert(found, "warn"))
    return watch.memory.get("risk", 0.0), alert, watch._shown.get("paid", [])
