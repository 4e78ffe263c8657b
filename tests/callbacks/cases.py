"""Test cases of monitors that read logs. A new monitor gets an entry in `NULL`, `CHANGES` and `BAD_NUMBERS`."""

import math
from types import SimpleNamespace

import numpy as np

from trl_ext.callbacks import (
    CanaryCallback,
    ClipFractionCallback,
    CutOffCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    KLBudgetCallback,
    LengthDriftCallback,
    NotFiniteCallback,
    RepetitionCallback,
    RewardDisagreementCallback,
    RewardDriftCallback,
    ScoreFallCallback,
    ToolAbuseCallback,
    ValueHealthCallback,
)

LOGS = 200
STEPS = 4  # of a rollout, where a monitor reads the logs of each step
GOLD = "eval_rewards/gold_judge"


class PPOConfig(SimpleNamespace):
    """The fields of the config that monitors read. The class name counts."""


class GRPOConfig(SimpleNamespace):
    """As above. GRPO samples several completions per prompt, and logs only the spread of their scores."""


def config(cls, answers, steps=1):
    """Log each step; a rollout has `answers` completions and `steps` steps."""
    facts = {"output_dir": "nowhere", "logging_steps": 1, "gradient_accumulation_steps": 1, "eval_strategy": "steps"}
    groups = {"generation_batch_size": answers, "num_generations": 8 if cls is GRPOConfig else 1}
    return cls(steps_per_generation=steps, report_to=[], **facts, **groups)


# ---- Logs of a policy that does not change ----
#
# Each function samples a quantity of single completions, (runs, logs, answers), and returns its logs, (runs, logs).
# The spread is PPO's in the demo's task with a learning rate of 1e-12, 200 rollouts of 8 completions and 100 of 32.
# Rollouts were not correlated (|r| < 0.15); the logs of a rollout's steps are about the same completions.


def mean_and_std(answers, mean, std):
    return {mean: answers.mean(-1), std: answers.std(-1, ddof=1)}


def lengths(rng, runs, n, moved=1.0, logs=LOGS):
    """24 ± 7 tokens; few completions are short, some reach the limit of 48 and are cut off."""
    tokens = np.minimum(moved * (18 + rng.gamma(0.75, 8, (runs, logs, n))), 48 * max(moved, 1))
    log = mean_and_std(tokens, "completions/mean_length", "completions/std_length")
    return log | {"completions/clipped_ratio": (tokens >= 48 * max(moved, 1)).mean(-1)}


def grpo_lengths(rng, runs, n, moved=1.0, logs=LOGS):
    """Half of the variance is between prompts; eight completions share a prompt."""
    prompts = np.repeat(rng.gamma(0.75, 8, (runs, logs, n // 8)), 8, axis=-1)
    tokens = moved * (
        18 + np.where(rng.random((runs, logs, n)) < 0.5**0.5, prompts, rng.gamma(0.75, 8, (runs, logs, n)))
    )
    return {"completions/mean_length": tokens.mean(-1), "completions/clipped_ratio": (tokens >= 48).mean(-1)}


def cut_off(rng, runs, n, moved=0.6, logs=LOGS):
    """60 % of the completions reach the limit, from the start on."""
    return {"completions/clipped_ratio": (rng.random((runs, logs, n)) < moved).mean(-1)}


def kls(rng, runs, n, moved=0.95, logs=LOGS):
    """A frozen policy, just within the KL budget of 10 nats."""
    return mean_and_std(rng.normal(10 * moved, 4, (runs, logs, n)), "objective/kl", "objective/kl_std")


def steps_of(answers):
    """A step's minibatch is a random half of the rollout's completions, (runs, rollouts, n): (runs, logs, n / 2)."""
    n = answers.shape[-1]
    return np.concatenate([answers[:, :, : n // 2], answers[:, :, n // 2 :]] * (STEPS // 2), axis=-1).reshape(
        len(answers), -1, n // 2
    )


def entropies(rng, runs, n, moved=1.0, logs=LOGS):
    answers = steps_of(np.abs(rng.normal(0.31 * moved, 0.06 * moved, (runs, logs // STEPS, n))))
    return mean_and_std(answers, "policy/entropy_avg", "policy/entropy_std")


def clips(rng, runs, n, moved=1.0, logs=LOGS):
    """2 % of a completion's tokens, as in healthy runs."""
    return {
        "policy/clipfrac_avg": steps_of(np.minimum(rng.gamma(0.5, 0.04 * moved, (runs, logs // STEPS, n)), 1)).mean(-1)
    }


def critics(rng, runs, n, moved=0.0, logs=LOGS):
    """A new critic explains −0.9 of the variance, then 0.5; its loss falls and has a heavy tail."""
    explained = 0.5 - moved - 1.4 * np.exp(-np.arange(logs) / 6)
    left = (1 - explained) * rng.chisquare(n - 1, (runs, logs)) / rng.chisquare(n - 1, (runs, logs))
    squares = (0.5 * rng.normal(0, 0.5, (runs, logs, n)) ** 2) * (1 - explained)[:, None]
    return {"val/explained_variance": 1 - left} | mean_and_std(squares, "loss/value_avg", "loss/value_std")


def disagreements(rng, runs, n, moved=1.0, logs=LOGS):
    return {"rewards/two/disagreement": moved * rng.gamma(2, 0.15, (runs, logs, n)).mean(-1)}


def repetitions(rng, runs, n, moved=0.0, logs=LOGS):
    """0.45 ± 0.1 of 8 completions have the top phrase, 0.32 ± 0.05 of 32; 0.66 and 0.31 of 3-grams are distinct."""
    top, distinct = (0.45, 0.66) if n == 8 else (0.32, 0.31) if n == 32 else (0.28, 0.15)
    shape = (runs, logs, n)
    return {
        "repetition/top_phrase_share": (rng.random(shape) < top + moved).mean(-1),
        "repetition/distinct_3": np.clip(rng.normal(distinct, 0.17 / math.sqrt(n), (runs, logs)), 0.01, 1),
        "repetition/repeated": np.where(rng.random(shape) < 0.1, rng.gamma(2, 0.09, shape), 0).mean(-1),
        "repetition/copied_share": (rng.random(shape) < 0.02 + moved).mean(-1),
    }


def tools(rng, runs, n, moved=0.0, logs=LOGS):
    """60 % of the episodes call tools, a geometric number of times. All calls of an episode succeed or all fail."""
    shape = (runs, logs, n)
    made = np.where(rng.random(shape) < 0.6, rng.geometric(0.3, shape), 0)
    of_all = np.maximum(made.sum(-1), 1)
    shares = {"failure": 0.15, "repeated": 0.3}
    log = {
        f"tools/{name}_frequency": (made * (rng.random(shape) < share + moved)).sum(-1) / of_all
        for name, share in shares.items()
    }
    return log | {"tools/call_frequency": made.mean(-1)}


def scores(rng, runs, n, moved=0.0, logs=LOGS):
    answers = rng.normal(moved, 0.97, (runs, logs, n))
    return mean_and_std(answers, "objective/scores", "objective/scores_std")


def wins(rng, runs, n, moved=0.0, logs=LOGS):
    """Wins and losses of episodes with tool calls."""
    answers = (rng.random((runs, logs, n)) < 0.47 - moved).astype(float)
    return mean_and_std(answers, "objective/scores", "objective/scores_std") | tools(rng, runs, n, logs=logs)


def golds(rng, runs, n, moved=0.0, logs=LOGS):
    """Evaluations of the same prompts. Gold and proxy each see a part of a completion; nothing rises."""
    prompts, shape = rng.normal(0, 0.7, (runs, 1, n)), (runs, logs, n)
    proxy, gold = (prompts + rng.normal(mean, 0.7, shape) for mean in (moved, -moved))
    log = mean_and_std(proxy, "eval_objective/scores", "eval_objective/scores_std")
    wins = (gold > gold[:, :1]).mean(-1)
    wins[:, 0] = np.nan  # the first evaluation has none
    return log | mean_and_std(gold, f"{GOLD}/mean", f"{GOLD}/std") | {"eval_gold/win_rate": wins}


def judged(rng, runs, n, moved=0.0, logs=LOGS):
    """Noisy scores of a judge for the same greedy completions."""
    said = rng.normal(0, 1, (runs, 1, n)) + rng.normal(-moved, 0.3, (runs, logs, n))
    same = np.full((runs, logs), 0.2)
    return {"score": said.mean(-1), "sigma": said.std(-1), "length": 20 + same, "phrase": same}


def losses(rng, runs, n, moved=0.0, logs=LOGS):
    return {"loss": np.full((runs, logs), moved)}


# Monitor, its arguments, the config's class, steps per rollout, logs of a policy that does not change
NULL = {
    "kl": (KLBudgetCallback, {}, PPOConfig, 1, kls),
    "clip": (ClipFractionCallback, {}, PPOConfig, STEPS, clips),
    "entropy": (EntropyFloorCallback, {}, PPOConfig, STEPS, entropies),
    "length": (LengthDriftCallback, {}, PPOConfig, 1, lengths),
    "length in GRPO": (LengthDriftCallback, {}, GRPOConfig, 1, grpo_lengths),
    "cut off": (CutOffCallback, {}, PPOConfig, 1, cut_off),
    "critic": (ValueHealthCallback, {}, PPOConfig, 1, critics),
    "disagreement": (RewardDisagreementCallback, {}, PPOConfig, 1, disagreements),
    "repetition": (RepetitionCallback, {}, PPOConfig, 1, repetitions),
    "tools": (ToolAbuseCallback, {}, PPOConfig, 1, tools),
    "reward": (RewardDriftCallback, {"window": 300}, PPOConfig, 1, scores),
    "fall": (ScoreFallCallback, {}, PPOConfig, 1, scores),
    "fewer wins": (ScoreFallCallback, {}, PPOConfig, 1, wins),
    "gold": (GoldGapCallback, {}, PPOConfig, 1, golds),
    "canary": (CanaryCallback, {"prompts": ["?"]}, PPOConfig, 1, judged),
    "not finite": (NotFiniteCallback, {}, PPOConfig, 1, losses),
}

# What changes, by how much, and within how many logs of 8, 32 and 128 completions a monitor fires in 9 runs of 10
CHANGES = {
    "kl": ({"moved": 1.5}, (16, 4, 1)),
    "clip": ({"moved": 200}, (32, 16, 8)),
    "entropy": ({"moved": 0.05}, (32, 16, 16)),
    "length": ({"moved": 3.0}, (4, 1, 1)),
    "length in GRPO": ({"moved": 3.0}, (16, 4, 2)),
    "cut off": ({"moved": 0.99}, (16, 8, 4)),
    "critic": ({"moved": 3.0}, (20, 10, 10)),
    "disagreement": ({"moved": 4.0}, (8, 4, 4)),
    "repetition": ({"moved": 0.7}, (8, 2, 1)),
    "tools": ({"moved": 0.85}, (32, 8, 2)),
    "reward": ({"moved": -6.0}, (16, 4, 2)),
    "fall": ({"moved": -2.0}, (8, 2, 1)),
    "fewer wins": ({"moved": 0.47}, (64, 16, 4)),
    "gold": ({"moved": 2.0}, (16, 4, 2)),
    "canary": ({"moved": 2.0}, (4, 4, 4)),
    "not finite": ({"moved": math.inf}, (1, 1, 1)),
}

# ---- Actions ----

# Quantity → the key under which the table below logs it
KEYS = {"kl": "kl", "clip_fraction": "clip", "explained_variance": "ev", "value_loss": "vl", "length": "length"}
KEYS |= {"length_clipped": "cut", "reward": "reward", "reward_std": "std", "entropy": "entropy"}
GOLD_METRICS = {"eval_rewards/gold_judge/mean": (1.0, 0.0), "eval_rewards/gold_judge/std": (0.5, 0.5)}
GOLD_METRICS |= {"eval_proxy/mean": (0.0, 9.0), "eval_proxy/std": (1.0, 1.0)}
# Monitor → its arguments, and the logs: calm, then bad
BAD_NUMBERS = {
    KLBudgetCallback: ({}, {"kl": (0.0, 99.0)}),
    ClipFractionCallback: ({"steps": 1}, {"clip": (0.0, 0.9)}),
    EntropyFloorCallback: ({"steps": 1}, {"entropy": (2.0, 0.01)}),
    LengthDriftCallback: ({"rollouts": 2}, {"length": (10.0, 99.0)}),
    CutOffCallback: ({"rollouts": 1}, {"cut": (0.1, 1.0)}),
    ValueHealthCallback: ({"rollouts": 1, "steps": 1}, {"ev": (0.5, -9.0), "vl": (1.0, 1.0)}),
    RewardDisagreementCallback: ({"rollouts": 2}, {"rewards/two/disagreement": (0.1, 9.0)}),
    RepetitionCallback: ({"rollouts": 2}, {"repetition/top_phrase_share": (0.1, 1.0)}),
    ToolAbuseCallback: (
        {"rollouts": 2},
        {"tools/call_frequency": (1.0, 1.0), "tools/failure_frequency": (0.0, 1.0)},
    ),
    RewardDriftCallback: (
        {"minimum": 4},
        {"reward": (0.0, -9.0), "std": (1.0, 1.0)},
    ),
    ScoreFallCallback: ({}, {"reward": (0.0, -9.0), "std": (1.0, 1.0)}),
    NotFiniteCallback: ({}, {"grad_norm": (1.0, math.nan)}),
    GoldGapCallback: ({"proxy": "eval_proxy/mean"}, GOLD_METRICS),
    CanaryCallback: ({"minutes": 0.0, "prompts": ["the cat"], "max_new_tokens": 2}, {}),
}
