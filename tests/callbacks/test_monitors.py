"""Each monitor on logs written by hand: when it must alert and when not, and that the runbook has each alert."""

import json
import math

import pytest
from trl import GRPOConfig, KTOConfig, RLOOConfig, SFTConfig

from tests.callbacks.replay import Replay
from tests.tiny import tiny_config
from trl_ext.callbacks import (
    CanaryCallback,
    ClipFractionCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    KLBudgetCallback,
    LengthDriftCallback,
    NotFiniteCallback,
    RepetitionCallback,
    RewardDisagreementCallback,
    RewardDriftCallback,
    ToolAbuseCallback,
    ValueHealthCallback,
)

KL, SCORE, STD = "objective/kl", "objective/scores", "objective/scores_std"
LENGTH, CUT, CLIPPED = "completions/mean_length", "completions/clipped_ratio", "policy/clipfrac_avg"
ENTROPY, PHRASE = "policy/entropy_avg", "repetition/top_phrase_share"
GOLD, PROXY = "eval_rewards/gold_judge", "eval_objective/scores"


@pytest.fixture
def ppo(tmp_path):
    return tiny_config(tmp_path)  # rollouts of 8 episodes and 4 steps, a log each step


@pytest.fixture
def large(tmp_path):
    """Rollouts with so many episodes that noise is negligible: with 8, no single log is significant."""
    return tiny_config(tmp_path, per_device_train_batch_size=50_000)


def config(cls, tmp_path, **kwargs):
    kwargs = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "logging_steps": 1} | kwargs
    return cls(**kwargs)


def replayed(args, monitor, logs):
    """Run these logs, one per step."""
    run = Replay(args, monitor)
    for step, log in enumerate(logs, 1):
        run.log(step, logs=log)
    return run


# ---- One quantity ----

# Monitor, its logs, and what it reports at which steps
CASES = {
    "KL": (
        KLBudgetCallback(warn=5, limit=10),
        [{KL: kl} for kl in (0.0, 4.9, 5.1, 10.5)],
        [(3, "the KL nears its budget"), (4, "the KL is over its budget")],
    ),
    "KL that is none": (KLBudgetCallback(), [{KL: kl} for kl in (0.0, -0.4, -0.6)], [(3, "the KL is negative")]),
    "another model than the reference": (
        KLBudgetCallback(),
        [{KL: 2.0}] * 2,
        [(1, "the first rollout's KL is not 0")],
    ),
    "clip fraction": (  # means of a rollout: 0.225, 0.175
        ClipFractionCallback(limit=0.2, steps=4),
        [{CLIPPED: share} for share in (0.9, 0.0, 0.0, 0.0, 0.1, 0.3, 0.3, 0.0)],
        [(4, "the clip fraction is high over 4 or more steps")],
    ),
    "entropy": (
        EntropyFloorCallback(floor=0.1, relative=0.5, steps=4),
        [{ENTROPY: nats, "policy/entropy_std": 0.1} for nats in [2.0] * 4 + [1.2] * 4 + [0.9] * 4 + [0.05] * 4],
        [(12, "the entropy fell far from where it began"), (16, "the entropy is below its floor")],
    ),
    "length": (  # 19 > 1.5 · 12, 7 < 12 / 1.5
        LengthDriftCallback(factor=1.5, rollouts=2),
        [{LENGTH: tokens, "completions/std_length": 7.0} for tokens in (11.95, 12.05, 17, 19, 7)],
        [(4, "completions grew longer"), (5, "completions grew shorter")],
    ),
    "critic": (  # the first two are the warm-up; then −0.4 rises to −0.2, as a new critic's may; −0.2 falls to −0.4
        ValueHealthCallback(rollouts=2, steps=2, loss_factor=3),
        [
            {"val/explained_variance": explained, "loss/value_avg": loss, "loss/value_std": 2.0}
            for explained, loss in zip(
                [-9, -9, -0.5, -0.3, -0.2, -0.2, -0.3, -0.5] + [0.9] * 4, [1.0] * 8 + [3.1] * 4, strict=True
            )
        ],
        [(7, "the critic explains too little"), (12, "the value loss grew")],
    ),
    "disagreement": (  # its spread is not logged but estimated from its scatter, here 0.01
        RewardDisagreementCallback(rollouts=4),
        [{"rewards/a/disagreement": 0.1 + 0.01 * (step % 3 - 1)} for step in range(10)]
        + [{"rewards/a/disagreement": 0.4}] * 8,
        [(13, "`rewards/a/disagreement` grew")],
    ),
    "repetition": (
        RepetitionCallback(rollouts=2, phrase=0.3, distinct=0.5, repeated=0.2),
        [
            {"repetition/distinct_3": 0.8, PHRASE: 0.2, "repetition/repeated": 0.0, "repetition/copied_share": 0.0}
            | {f"repetition/{name}": share for name, share in changed.items()}
            for changed in (
                *({}, {}, {"top_phrase_share": 0.49}, {"top_phrase_share": 0.52}),
                *({"distinct_3": 0.38}, {"repeated": 0.22}, {"copied_share": 0.12}),
            )
        ],
        [
            (4, "one phrase spreads"),
            (5, "completions grew alike"),
            (6, "completions repeat themselves"),
            (7, "completions copy the corpus"),
        ],
    ),
    "a tool that is down from the start": (
        ToolAbuseCallback(),
        [{"tools/call_frequency": 1.0, "tools/failure_frequency": 1.0}] * 9,
        [(3, "tool calls fail")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_monitor_on_logs_by_hand(case, large):
    monitor, logs, said = CASES[case]
    run = replayed(large, monitor, logs)
    assert [(alert["step"], alert["what"]) for alert in run.alerts] == said and run.said


def test_a_budget_warns_and_then_acts(ppo):
    run = replayed(ppo, KLBudgetCallback(repeat_steps=10), [{KL: 11.0}] * 22)
    assert [alert["step"] for alert in run.alerts if "over" in alert["what"]] == [1, 11, 21]
    run = replayed(ppo, KLBudgetCallback(limit=10, action="stop"), [{KL: 0.0}, {KL: 5.1}])
    assert run.said and not run.control.should_training_stop
    run.log(3, logs={KL: 10.5})
    alert = run.alerts[-1]
    assert (alert["step"], alert["value"], alert["bound"], alert["action"]) == (3, 10.5, 10, "stop")
    assert alert["runbook"] == "docs/runbook.md#kl" and run.control.should_training_stop and run.control.should_save


@pytest.mark.parametrize("cls", [RLOOConfig, GRPOConfig])
def test_per_token_kl_is_multiplied_by_the_mean_length(cls, tmp_path):
    """0.05 nats a token × 250 tokens = 12.5 nats. Only the rollout's log has the length."""
    run = replayed(config(cls, tmp_path), KLBudgetCallback(), [{"kl": 0.0, LENGTH: 250.0}, {"kl": 0.05}])
    (alert,) = run.alerts
    assert alert["value"] == pytest.approx(12.5) and "approximate: mean per token × mean length" in run.said[0]


# ---- What counts as a value ----


def test_a_metric_missing_for_a_rollout_is_reported_once(ppo, tmp_path):
    run = Replay(ppo, KLBudgetCallback())
    for step in range(1, 20):  # 4 steps a rollout and one for a log: absent until step 6
        run.log(step, logs={KL: 0.0 if step == 1 else None})
        said = ["nothing to watch: no log has had `objective/kl` since step 1"]
        assert run.notices == said * (step > 6) and run.said == []
    json.dumps(run.state.stateful_callbacks, allow_nan=False)
    assert replayed(ppo, GoldGapCallback(), [{}]).notices == ["nothing to watch: the run has no evaluations"]
    run = replayed(config(KTOConfig, tmp_path), KLBudgetCallback(), [{"kl": 1000.0}] * 8)  # no KL to a reference
    assert run.notices == ["nothing to watch: no log has had `kl` since step 0"] and run.said == []
    run = replayed(config(SFTConfig, tmp_path), KLBudgetCallback(keys={"kl": "my/kl"}), [{"my/kl": 11.0}])
    assert "the KL is over its budget" in run.said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("monitor", "key"),
    [
        (KLBudgetCallback, KL),
        (ValueHealthCallback, "loss/value_avg"),
        (RewardDisagreementCallback, "rewards/a/disagreement"),
    ],
)
def test_a_number_that_is_not_finite_alerts_and_is_no_value(monitor, key, value, ppo):
    """+∞ is above every limit, so the monitor acts."""
    run = replayed(ppo, monitor(action="stop"), [{key: value}])
    assert run.said == [f"`{key}` is not finite"] and run.control.should_training_stop == (value == math.inf)
    json.dumps(run.state.stateful_callbacks, allow_nan=False)


@pytest.mark.parametrize(("key", "value"), [("grad_norm", math.nan), ("loss", math.inf)])
def test_not_finite_stops_and_no_broken_weights_are_saved(key, value, ppo):
    run = replayed(ppo, NotFiniteCallback(), [{"grad_norm": 1.0, "loss": 2.0}])
    assert run.alerts == []
    run.log(2, logs={"grad_norm": 1.0, "loss": 2.0, key: value})
    assert run.said == [f"`{key}` is not finite"] and run.control.should_training_stop and not run.control.should_save


# ---- Reward ----

CALM = {SCORE: 1.0, STD: 2.0}


@pytest.fixture
def calm(tmp_path):
    """Two rollouts of one step, each of 100,000 scores with mean 1 and standard deviation 2."""
    args = tiny_config(tmp_path, per_device_train_batch_size=100_000, num_mini_batches=1, num_ppo_epochs=1)
    return replayed(args, RewardDriftCallback(action="stop"), [CALM] * 2)


def test_a_rise_and_a_narrow_spread_warn(calm):
    calm.log(3, logs={SCORE: 6.9, STD: 2.0})  # 1 + 3 · 2 = 7
    assert calm.alerts == []
    calm.log(4, logs={SCORE: 7.2, STD: 2.0, "score_watch/helpful/share_above": 0.11})
    assert calm.said == ["`score_watch/helpful/share_above` is high", "the reward rose by 3 σ"]
    assert not calm.control.should_training_stop


def test_a_fall_and_a_collapse_act(calm):
    calm.log(3, logs={SCORE: -2.9, STD: 2.0})  # 1 − 2 · 2 = −3
    assert calm.alerts == []
    calm.log(4, logs={SCORE: -3.1, STD: 0.15})  # 0.15 < 0.1 · 2
    assert calm.said == ["the reward fell by 2 σ", "the rewards' spread collapsed"]
    assert calm.control.should_training_stop


# ---- Gold and canary ----


def gold_metrics(gold, proxy, rate=None):
    metrics = {f"{GOLD}/mean": gold, f"{GOLD}/std": 0.5, PROXY: proxy, f"{PROXY}_std": 2.0}
    return metrics | ({} if rate is None else {"eval_gold/win_rate": rate})


def test_gold_gap_is_in_standard_deviations_of_the_first_evaluation(ppo):
    run = Replay(ppo, GoldGapCallback(limit=1.0, action="stop"))
    run.evaluate(0, gold_metrics(0.5, 7.0), rows=10_000)
    run.evaluate(8, gold_metrics(0.6, 9.0, 0.6), rows=10_000)  # 2/2 − 0.1/0.5 = 0.8
    assert run.alerts == []
    run.evaluate(16, gold_metrics(0.4, 9.0, 0.5), rows=10_000)  # 2/2 + 0.1/0.5 = 1.2
    assert run.said == ["the proxy rose more than the gold score"] and run.alerts[0]["value"] == pytest.approx(1.2)
    assert run.control.should_training_stop


@pytest.mark.parametrize(("ties", "said"), [(0.0, []), (0.6, ["completions lose against those of the start policy"])])
def test_ties_are_not_noise(ppo, ties, said):
    """The same win rate: of 19 wins and 45 losses, or of no win and 26 losses in 64."""
    run = Replay(ppo, GoldGapCallback())
    run.evaluate(0, gold_metrics(0.5, 7.0), rows=64)
    for step in (8, 16, 24):
        run.evaluate(step, gold_metrics(0.5, 7.0, 0.3) | {"eval_gold/tie_rate": ties}, rows=64)
    assert run.said == said


def test_canary_compares_with_its_first_answers():
    canary = CanaryCallback(prompts=["the cat"])
    long, phrase = "the canary's completions changed in length", "one phrase spreads over the canary's completions"
    for length, share, said in [
        (10.0, 0.1, []),
        (15.0, 0.5, []),
        (21.0, 0.5, [long]),  # more than 2 · 10, not 2 · 15
        (6.0, 0.1, []),
        (4.0, 0.7, [long, phrase]),
    ]:
        assert [found.what for found in canary._compare({"length": length, "phrase": share})] == said
