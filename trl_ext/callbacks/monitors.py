"""Define the monitors of quantities in the logs, and make monitors from their names in configuration files."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from ..functional import unexplained_error
from .metrics import rollout_steps
from .monitor import Action, Finding, MonitorCallback, error_of_mean
from .trend import Series

DISAGREEMENT = re.compile(r"rewards/.+/disagreement")


@dataclass(eq=False, kw_only=True)
class KLBudgetCallback(MonitorCallback):
    """
    Alert when KL(policy ‖ reference), summed over a completion, exceeds its budget.

    A KL that is logged per token (GRPO, RLOO) is multiplied by the mean length. The product is approximate, and the
    alert says so.

    >>> trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))

    Args:
        warn: nats per completion above which the monitor warns. The default is half of `limit`.
        limit: nats per completion above which the monitor acts.
        tolerance: largest rounding error of the KL, in nats per completion. In the first rollout the policy equals the
            reference. If the KL then differs from 0 by more than this, the monitor warns that the reference is wrong.
            It also warns if a later KL is below −`tolerance`: then the log-probs are not those of the policy that
            sampled the completions.
        others: see [`MonitorCallback`].
    """

    warn: float | None = None
    limit: float = 10.0
    tolerance: float = 0.5
    runbook = "kl"

    def watch(self, logs):
        kl = self.read_kl()
        unit = " (approximate: mean per token × mean length)" if self.kl_is_per_token else ""
        if kl is None:
            return
        # A budget, unlike a baseline, has no error of its own. Where the spread is unknown, each log is taken as exact
        kls = self.follow("kl", kl, **(self.noise("kl") or {"error": 0.0}))
        is_first = "started" not in self.memory and self.step <= rollout_steps(self._args)
        self.memory["started"] = True
        if is_first and abs(kl) > self.tolerance:
            advice = (
                "The policy is not trained yet, so its KL should be 0: check that the reference is the model that the "
                "policy started from."
            )
            yield Finding(f"the first rollout's KL is not 0{unit}", advice, kl, self.tolerance, acts=False)
        elif found := kls.below(plus=-self.tolerance):
            advice = "A KL is never negative: the log-probs are not those of the policy that sampled the completions."
            yield Finding(f"the KL is negative{unit}", advice, *found, acts=False)
        if found := kls.above(plus=self.limit):
            advice = "Read completions; raise the KL coefficient, or stop and keep an earlier checkpoint."
            yield Finding(f"the KL is over its budget{unit}", advice, *found)
        elif found := kls.above(plus=self.limit / 2 if self.warn is None else self.warn):
            advice = "Read completions: far from the reference, a reward model is less reliable."
            yield Finding(f"the KL nears its budget{unit}", advice, *found, acts=False)


@dataclass(eq=False, kw_only=True)
class ClipFractionCallback(MonitorCallback):
    """
    Alert when too large a share of tokens (in RLOO, of completions) has a clipped probability ratio.

    >>> trainer.add_callback(ClipFractionCallback(limit=0.3, steps=32))

    Args:
        limit: alert when the share is above this.
        steps: smallest number of optimizer steps over which the share is averaged.
        others: see [`MonitorCallback`].
    """

    limit: float = 0.2
    steps: int = 16
    runbook = "clip-fraction"

    def watch(self, logs):
        value = self.read("clip_fraction")
        shares = self.follow("clip_fraction", value, **self.windows(self.steps), count=self.completions_per_log)
        if found := shares.above(plus=self.limit):
            advice = (
                "Steps are too large: make fewer passes over a rollout, or lower `step_kl_target` (if it is 0, "
                "and outside of PPO, the learning rate)."
            )
            yield Finding(f"the clip fraction is high over {self.steps} or more steps", advice, *found)


@dataclass(eq=False, kw_only=True)
class EntropyFloorCallback(MonitorCallback):
    """
    Alert when the policy's entropy falls too low: a collapsed policy explores nothing.

    >>> trainer.add_callback(EntropyFloorCallback(floor=0.05, action="save"))

    Args:
        floor: alert when the entropy is below this, in nats per token.
        relative: alert when the entropy is below this share of its mean over the first `steps` steps.
        steps: smallest number of optimizer steps over which the entropy is averaged.
        others: see [`MonitorCallback`].
    """

    floor: float = 0.1
    relative: float = 0.3
    steps: int = 16
    runbook = "entropy"

    def watch(self, logs):
        windows = self.windows(self.steps)
        entropies = self.follow("entropy", self.read("entropy"), **windows, first=windows["size"])
        advice = "Raise `entropy_coef` or the KL coefficient. Check whether all prompts get the same completion."
        if found := entropies.below(plus=self.floor):
            yield Finding("the entropy is below its floor", advice, *found)
        if found := entropies.below(self.relative):
            yield Finding("the entropy fell far from where it began", advice, *found)


@dataclass(eq=False, kw_only=True)
class LengthDriftCallback(MonitorCallback):
    """
    Alert when completions are much longer or shorter than in the first rollouts.

    >>> trainer.add_callback(LengthDriftCallback(factor=2, rollouts=8))

    Args:
        factor: alert when the mean length is above the baseline times `factor`, or below the baseline divided by it.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 1.5
    rollouts: int = 4
    runbook = "length"

    def watch(self, logs):
        lengths = self.follow("length", self.read("length"), first=self.rollouts)
        advice = "Read completions: a reward that grows with length, or with brevity, is the commonest hack."
        if found := lengths.above(self.factor):
            yield Finding("completions grew longer", advice, *found)
        if found := lengths.below(1 / self.factor):
            yield Finding("completions grew shorter", advice, *found)


@dataclass(eq=False, kw_only=True)
class CutOffCallback(MonitorCallback):
    """
    Alert when too large a share of completions is cut off at the maximum length.

    This also finds completions that are cut off from the first rollout on. `LengthDriftCallback`, which compares with
    the first rollouts, does not.

    >>> trainer.add_callback(CutOffCallback(limit=0.5, action="stop"))

    Args:
        limit: alert when the share is above this.
        rollouts: smallest number of rollouts over which the share is averaged.
        others: see [`MonitorCallback`].
    """

    limit: float = 0.8
    rollouts: int = 4
    runbook = "cut-off"

    def watch(self, logs):
        value = self.read("length_clipped")
        cuts = self.follow("length_clipped", value, size=self.rollouts, count=self.completions_per_log)
        if found := cuts.above(plus=self.limit):
            advice = (
                "Look at how completions end: where the model writes another token than EOS, set `stop_token_id` to "
                "it. Else raise `max_completion_length`, or teach the policy to end its completions (SFT with EOS)."
            )
            yield Finding("too many completions are cut off", advice, *found)


@dataclass(eq=False, kw_only=True)
class ValueHealthCallback(MonitorCallback):
    """
    Alert when the critic explains too little of the returns' variance, or its loss grows.

    >>> trainer.add_callback(ValueHealthCallback(explained_variance=0.1))

    Args:
        explained_variance: alert when the explained variance is below this. A critic that predicts a constant has 0,
            and a new critic may have less. While the explained variance rises, no alert is raised.
        loss_factor: alert when the value loss exceeds this factor times its mean over the first `steps` steps.
        rollouts: smallest number of rollouts over which the explained variance is averaged. The same number of
            rollouts at the start is skipped as a warm-up.
        steps: smallest number of optimizer steps over which the value loss is averaged.
        others: see [`MonitorCallback`].
    """

    explained_variance: float = 0.0
    loss_factor: float = 5.0
    rollouts: int = 5
    steps: int = 16
    runbook = "critic"

    def watch(self, logs):
        explained = self.read("explained_variance")
        loss = self.read("value_loss")
        if explained is not None:
            self.memory["warm_up"] = self.memory.get("warm_up", 0) + 1
        if explained is not None and self.memory["warm_up"] > self.rollouts:
            # The unexplained part is a ratio of variances, and the standard error of its logarithm is known
            left = math.log(max(1 - explained, 1e-9))
            completions = self.completions_per_log or 0
            noise: dict[str, Any] = {"error": unexplained_error(completions)} if completions > 1 else {}
            rest = self.follow("explained_variance", left, size=self.rollouts, **noise)
            found = rest.above(plus=math.log(1 - self.explained_variance))
            if found and not rest.falls:
                advice = (
                    "Advantages are mostly noise: raise the critic's learning rate, or train the critic before PPO."
                )
                mean = -math.expm1(found.value)
                yield Finding("the critic explains too little", advice, mean, self.explained_variance)
        windows = self.windows(self.steps)
        losses = self.follow("value_loss", loss, **windows, first=windows["size"])
        if found := losses.above(self.loss_factor):
            advice = "The scale of the rewards changed, or the critic diverges: see `reward_normalization`."
            yield Finding("the value loss grew", advice, *found)


@dataclass(eq=False, kw_only=True)
class NotFiniteCallback(MonitorCallback):
    """
    Alert when `grad_norm` or `loss` is not finite, and by default end training.

    The run then ends without a new checkpoint, since the weights may hold NaN: resume from the newest checkpoint.

    Set `logging_nan_inf_filter=False`: by default a Trainer replaces a loss that is not finite by a finite number
    before it logs the loss. The gradient's norm is always logged unchanged.

    >>> trainer.args.logging_nan_inf_filter = False
    >>> trainer.add_callback(NotFiniteCallback())

    Args:
        others: see [`MonitorCallback`].
    """

    action: Action = "stop"
    runbook = "nan"
    saves = False  # the newest complete checkpoint is the good one

    def watch(self, logs):
        for key in ("grad_norm", "loss"):
            if not math.isfinite(value := logs.get(key, 0.0)):
                advice = f"Its value is {value}: lower the learning rate, use bf16, not fp16, and look for empty rows."
                yield Finding(f"`{key}` is not finite", advice)


@dataclass(eq=False, kw_only=True)
class RewardDisagreementCallback(MonitorCallback):
    """
    Alert when the reward models of an ensemble disagree more than in the first rollouts.

    Reward models disagree more on completions that are unlike their training data. This monitor reads
    `rewards/<name>/disagreement`, the spread of the members' scores of the same completions, which
    [`~trl_ext.rewards.EnsembleReward`] logs.

    >>> trainer.add_callback(RewardDisagreementCallback(factor=3, action="raise_kl"))

    Args:
        factor: alert when the disagreement is above the baseline times this factor.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 2.0
    rollouts: int = 4
    runbook = "disagreement"

    def watch(self, logs):
        for key in [*filter(DISAGREEMENT.fullmatch, logs)] or ["disagreement"]:
            spread = self.follow(key, self.read("disagreement", key), first=self.rollouts)
            if found := spread.above(self.factor):
                advice = (
                    "The reward models may not know such completions from their training: compare what each of them "
                    "scores highest."
                )
                yield Finding(f"`{key}` grew", advice, *found)


@dataclass(eq=False, kw_only=True)
class RepetitionCallback(MonitorCallback):
    """
    Alert when completions repeat themselves or each other more than in the first rollouts, or copy the corpus.

    [`~trl_ext.rewards.RepetitionWatch`] measures repetition and copying: put it among the reward functions.

    >>> trainer.add_callback(RepetitionCallback(phrase=0.4, action="stop"))

    Args:
        phrase: alert when the share of completions with the most frequent phrase rises above the baseline by more than
            this.
        distinct: alert when the share of different n-grams falls below this part of the baseline.
        repeated: alert when the share of n-grams that a completion repeats rises above the baseline by more than this.
        copied: alert when more than this share of completions copies the corpus, the texts that the watch was given.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    phrase: float = 0.5
    distinct: float = 0.3
    repeated: float = 0.1
    copied: float = 0.1
    rollouts: int = 4
    runbook = "repetition"

    def watch(self, logs):
        def share(name: str, key: str | None, first: int = self.rollouts) -> Series:
            value = self.read(name, key, optional=name != "phrase")
            return self.follow(name, value, first=first, count=self.completions_per_log)

        advice = (
            "Read the completions and the phrase in `completions.rank*.jsonl`, and change a reward that favours them."
        )
        of_n_grams = next(filter(re.compile(r"repetition/distinct_\d+").fullmatch, logs), None)
        for what, found in {
            "one phrase spreads": share("phrase", "repetition/top_phrase_share").above(1, self.phrase),
            "completions repeat themselves": share("repeated", "repetition/repeated").above(1, self.repeated),
            "completions grew alike": share("distinct", of_n_grams).below(self.distinct),
            "completions copy the corpus": share("copied", "repetition/copied_share", 0).above(plus=self.copied),
        }.items():
            if found:
                yield Finding(what, advice, *found)


@dataclass(eq=False, kw_only=True)
class ToolAbuseCallback(MonitorCallback):
    """
    Alert when more tool calls fail, or repeat an earlier call of their episode, than in the first rollouts.

    PPOTrainer logs failed and repeated calls, GRPOTrainer only failed calls.

    The calls of an episode depend on each other, and some episodes make many calls. So the error of a share is
    computed in two ways: as if each episode had made one call, and from the scatter of earlier logs. The larger error
    is used. The monitor therefore needs about ten logs before it can act, and far more completions than if calls were
    independent.

    >>> trainer.add_callback(ToolAbuseCallback(repeated=0.5, action="stop"))

    Args:
        failed: alert when the share of calls that fail rises above the baseline by more than this.
        most_failed: alert when the share of calls that fail is above this, also if it was so from the start.
        repeated: alert when the share of repeated calls rises above the baseline by more than this. A call is repeated
            if the same call was made before in its episode, and got the same answer.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    failed: float = 0.2
    most_failed: float = 0.8
    repeated: float = 0.3
    rollouts: int = 8
    runbook = "tools"

    def watch(self, logs):
        calls = self.read("tools", "tools/call_frequency")
        if not calls:  # without calls there is no share, though a trainer may log 0
            return
        episodes = None if self.completions_per_log is None else self.completions_per_log * min(calls, 1.0)
        share = partial(self.follow, first=self.rollouts, count=episodes, is_clustered=True)
        failed = share("failed", self.read("failed", "tools/failure_frequency", optional=True))
        repeated = share("repeated", self.read("repeated", "tools/repeated_frequency", optional=True))
        advice = "Read the episodes in `completions.rank*.jsonl`:"
        if found := failed.above(1, self.failed) or failed.above(plus=self.most_failed):
            why = "is a tool down, or does the reward ignore what tools answer?"
            yield Finding("tool calls fail", f"{advice} {why}", *found)
        if found := repeated.above(1, self.repeated):
            why = "which reward pays for a call that tells nothing new?"
            yield Finding("episodes repeat their tool calls", f"{advice} {why}", *found)


@dataclass(eq=False, kw_only=True)
class ScoreFallCallback(MonitorCallback):
    """
    Alert when the policy gets worse: the score is lower than at the start or at its best, completions become very
    short, or an agent stops calling tools.

    Every PPOTrainer has one that warns, unless `watch` is off. The best score is the mean of the rollouts after a
    significant rise, not the highest of many scores, which is partly chance.

    >>> trainer.add_callback(ScoreFallCallback(action="lower_rate"))

    Args:
        sigmas: alert when the mean score falls by more than this, in standard deviations of single scores.
        left: alert when the mean length, or the number of tool calls, is below this share of its baseline.
        baseline: number of completions in the baseline, the first ones of the run. The number is rounded up to whole
            rollouts, from 2 to 16 of them.
        others: see [`MonitorCallback`].
    """

    sigmas: float = 0.1
    left: float = 0.2
    baseline: int = 512
    runbook = "score-fall"

    def watch(self, logs):
        advice = (
            "Look at `policy/step_kl` and the clip fraction (steps too large), at `val/explained_variance` (a critic "
            "that knows nothing) and at completions. Lower `step_kl_target`, or the learning rate if it is 0."
        )
        score = self.read("reward")
        spread = self.read("reward_std", optional=True)
        sigma = self.memory["sigma"] = self.memory.get("sigma") or spread or 0.0
        # A few equal scores are not known exactly
        noise = error_of_mean(spread or sigma or None, self.completions_per_log)
        first = min(16, max(2, math.ceil(self.baseline / (self.completions_per_log or 64))))
        start = self.follow("the start", score, first=first, **noise)
        best, _ = self.follow_best("its best", score, first=first, **noise)
        for since, scores in (("the start", start), ("its best", best)):
            if found := scores.below(1, -self.sigmas * sigma):
                yield Finding(f"the score fell below {since}", advice, *found)
                break
        length = self.read("length", optional=True)
        calls = self._number("tools/call_frequency", logs)
        # The number of calls varies as that of rare events
        of_calls = error_of_mean(math.sqrt(calls or 0.0), self.completions_per_log)
        for what, value, noise in (
            ("completions end at once", length, self.noise("length")),
            ("the agent calls tools no more", calls, of_calls),
        ):
            if found := self.follow(what, value, first=first, **noise).below(self.left):
                yield Finding(what, advice, *found)


@dataclass(eq=False, kw_only=True)
class RewardDriftCallback(MonitorCallback):
    """
    Alert when the mean or the spread of the reward moves far from the baseline, which is measured on the first scores.

    The monitor acts if the mean falls or the spread collapses. It only warns if the mean rises, which is the aim of
    training, or if too many scores are above a bound. [`HackWatch`] tests whether a rise is a hack. The spread is
    the standard deviation of single scores, σ.

    >>> trainer.add_callback(RewardDriftCallback(sigmas=2, action="stop"))

    Args:
        sigmas: alert when the mean rises by more than this, in σ of the baseline.
        drop_sigmas: alert when the mean falls by more than this, in σ of the baseline.
        std: alert when the spread is below this part of the baseline's σ.
        share_above: alert when the share of scores above the `bound` of a [`~trl_ext.rewards.ScoreWatch`] is larger
            than this; without a ScoreWatch it has no effect.
        window: number of scores after which the baseline no longer changes.
        minimum: number of scores in the baseline before the reward is compared with it.
        others: see [`MonitorCallback`].
    """

    sigmas: float = 3.0
    drop_sigmas: float = 2.0
    std: float = 0.1
    share_above: float = 0.1
    window: int = 1000
    minimum: int = 100
    runbook = "reward"

    def watch(self, logs):
        mean = self.read("reward")
        std = self.read("reward_std", optional=True)
        for key in filter(re.compile("score_watch/.+/share_above").fullmatch, logs):
            share = self.follow(key, self._number(key, logs), count=self.completions_per_log)
            if found := share.above(plus=self.share_above):
                advice = "Many scores are near the highest one: look at what these completions have in common."
                yield Finding(f"`{key}` is high", advice, *found, acts=False)
        if mean is None:
            return
        # Of the baseline's scores: number, mean, sum of squared deviations
        count, start, squares = self.memory.setdefault("scores", [0, 0.0, 0.0])
        means = self.follow("reward", mean)
        if count < self.window and std is not None:  # merged as in `trl_ext.functional.merge_moments`
            n = getattr(self._args, "generation_batch_size", None) or self._args.train_batch_size
            total = count + n
            delta = mean - start
            more = std**2 * (n - 1) + delta**2 * count * n / total
            self.memory["scores"] = [total, start + delta * n / total, squares + more]
        if count < min(self.minimum, self.window) or not squares:
            return
        sigma = math.sqrt(squares / (count - 1))
        independent = count / (getattr(self._args, "num_generations", None) or 1)  # those of a prompt may be alike

        def bound(sigmas: float) -> dict[str, float]:
            """Return arguments of `Series.above`: `plus`, start + sigmas · σ, and its standard error, `error`."""
            # Of start + k σ: σ²/n for the mean, and k² σ²/2n for the standard deviation
            return {"plus": start + sigmas * sigma, "error": sigma * math.sqrt((1 + sigmas**2 / 2) / independent)}

        if risen := means.above(**bound(self.sigmas)):
            advice = "Compare completions of the first rollouts with those of the last."
            yield Finding(f"the reward rose by {self.sigmas:g} σ", advice, *risen[:2], start, acts=False)
        if fallen := means.below(**bound(-self.drop_sigmas)):
            advice = (
                "Lower `step_kl_target` (if it is 0, and outside of PPO, the learning rate), or look for a "
                "reward function that fails."
            )
            yield Finding(f"the reward fell by {self.drop_sigmas:g} σ", advice, *fallen[:2], start)
        if std is None:
            return
        completions = self.completions_per_log
        least = self.std * sigma
        noise: dict[str, Any] = {}
        if completions is not None:
            noise = {"error": std / math.sqrt(2 * completions), "dof": completions}  # if scores are normal
        spread = self.follow("reward_std", std, **noise)
        if low := spread.below(plus=least, error=least / math.sqrt(2 * independent)):
            advice = (
                "All completions get about the same score, so the policy has nothing to learn from: check whether the "
                "completions are the same."
            )
            yield Finding("the rewards' spread collapsed", advice, low.value, least, sigma)


def load_monitors(entries: Sequence[str | dict[str, Any]] | None) -> list[TrainerCallback]:
    """
    Make callbacks from the entries of a configuration file: `Name` or `{Name: {argument: value, …}}`.

    >>> load_monitors(["LengthDriftCallback", {"KLBudgetCallback": {"limit": 5, "action": "stop"}}])[1].limit
    5

    Raises:
        ValueError: an entry has another form, an unknown class or argument, or a value that the class refuses.
    """
    import trl_ext.callbacks as package

    from ..rewards.from_yaml import load_rewards, name_and_arguments  # imports TRL

    known = {name: getattr(package, name) for name in package.__all__ if name.endswith(("Callback", "Watch"))}
    known["EarlyStoppingCallback"] = EarlyStoppingCallback
    monitors = []
    if isinstance(entries, dict):  # a loop over it would pass its arguments over
        raise ValueError("`monitors` must be a list: write `- ` before each name")
    for place, entry in enumerate(entries or [], 1):
        try:
            entry = {entry: None} if isinstance(entry, str) else entry
            name, arguments = name_and_arguments(entry, known, "monitor", "a `Name`")
            judge = {"judge": load_rewards([arguments["judge"]])[0][0]} if arguments.get("judge") else {}
            monitors.append(known[name](**arguments | judge))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`monitors` entry {place}: {error}") from error
    return monitors


def attach_monitors(trainer: Any, monitors: Sequence[TrainerCallback]) -> None:
    """
    Add monitors to a trainer.

    A monitor that generates or reads completions, and has no `trainer` yet, gets this trainer.
    """
    for monitor in monitors:
        if getattr(monitor, "trainer", trainer) is None:
            monitor.trainer = trainer
        trainer.add_callback(monitor)
