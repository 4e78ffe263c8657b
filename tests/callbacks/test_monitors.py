"""Each monitor on logs written by hand: when it must alert, and when it must not."""

import json
import math
from types import SimpleNamespace

import pytest
from transformers import TrainerState
from trl import GRPOConfig, KTOConfig, RLOOConfig, SFTConfig

from tests.callbacks.replay import Replay
from tests.tiny import tiny_config
from trl_ext.callbacks import (
    CanaryCallback,
    ClipFractionCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    HackWatch,
    KLBudgetCallback,
    LengthDriftCallback,
    NotFiniteCallback,
    RepetitionCallback,
    RewardDisagreementCallback,
    RewardDriftCallback,
    ValueHealthCallback,
    request_kl_scale,
)
from trl_ext.runs.control import kl_scale_is_pending, take_kl_scale

KL, SCORE, STD = "objective/kl", "objective/scores", "objective/scores_std"


@pytest.fixture
def ppo(tmp_path):
    return tiny_config(tmp_path)  # rollouts of 8 episodes, 4 steps each, a log a step


@pytest.fixture
def large(tmp_path):
    """Rollouts of so many episodes that chance adds next to nothing: with 8 no single log is beyond doubt."""
    return tiny_config(tmp_path, per_device_train_batch_size=50_000)


def config(cls, tmp_path, **kwargs):
    kwargs = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "logging_steps": 1} | kwargs
    return cls(**kwargs)


# ---- KL ----


def test_kl_budget_warns_then_acts(ppo):
    run = Replay(ppo, KLBudgetCallback(warn=5, limit=10, action="stop"))
    for step, kl in enumerate((0.0, 4.9, 5.1), 1):
        run.log(step, logs={KL: kl})
    assert run.said == ["the KL nears its budget"] and not run.control.should_training_stop
    run.log(4, logs={KL: 10.5})
    alert = run.alerts[-1]
    assert (alert["what"], alert["step"], alert["value"], alert["bound"]) == ("the KL is over its budget", 4, 10.5, 10)
    assert alert["action"] == "stop" and alert["runbook"] == "docs/runbook.md#kl" and alert["advice"]
    assert run.control.should_training_stop and run.control.should_save


def test_first_rollout_of_another_model_than_the_reference(subtests, ppo):
    """From the second rollout on (step 5) the policy is trained, so its KL need not be 0."""
    for step, expected in [(1, ["the first rollout's KL is not 0"]), (5, [])]:
        with subtests.test(step=step):
            run = Replay(ppo, KLBudgetCallback())
            run.log(step, logs={KL: 2.0})
            run.log(step + 1, logs={KL: 2.0})
            assert run.said == expected


def test_negative_kl_is_not_a_kl(ppo):
    run = Replay(ppo, KLBudgetCallback())
    for step, kl in enumerate((0.0, -0.4, -0.6), 1):
        run.log(step, logs={KL: kl})
    assert run.said == ["the KL is negative"]


def test_per_token_kl_is_multiplied_by_the_mean_length(subtests, tmp_path):
    """0.05 nats a token × 250 tokens = 12.5 nats. Only the rollout's log has the length."""
    for cls in [RLOOConfig, GRPOConfig]:
        with subtests.test(cls=cls):
            run = Replay(config(cls, tmp_path), KLBudgetCallback())
            run.log(1, logs={"kl": 0.0, "completions/mean_length": 250.0})
            run.log(2, logs={"kl": 0.05})
            (alert,) = run.alerts
            assert alert["value"] == pytest.approx(12.5)
            assert "approximate: mean per token × mean length" in alert["what"]
            assert "nats per response: 12.5, bound 10; per token: 0.05, bound 0.04." in alert["advice"]


def test_kto_kl_is_not_used(tmp_path):
    run = Replay(config(KTOConfig, tmp_path), KLBudgetCallback())
    for step in range(1, 9):
        run.log(step, logs={"kl": 1000.0})
    assert run.notices == ["nothing to watch: this trainer logs no such key"] and run.said == []


def test_another_key(tmp_path):
    run = Replay(config(SFTConfig, tmp_path), KLBudgetCallback(keys={"kl": "my/kl"}))
    run.log(1, logs={"my/kl": 11.0})
    assert "the KL is over its budget" in run.said


def test_the_warning_follows_the_limit():
    assert [KLBudgetCallback(**given).warn for given in ({}, {"limit": 3}, {"limit": 3, "warn": 1})] == [5, 1.5, 1]


# ---- What counts as a value ----


def test_missing_for_a_whole_rollout_is_said_once(ppo):
    run = Replay(ppo, KLBudgetCallback())
    run.log(1, logs={KL: 0.0})
    for step in range(2, 7):  # 4 steps a rollout and one of a log: absent until step 6
        run.log(step, loss=1.0)
        assert run.notices == []
    for step in range(7, 20):
        run.log(step, logs={KL: None})
    assert run.notices == ["nothing to watch: the key 'objective/kl' was in no log since step 1"] and run.said == []


def test_what_is_the_policys_is_not_missed_while_the_critic_warms_up(tmp_path):
    run = Replay(tiny_config(tmp_path, critic_warmup_rollouts=6), ClipFractionCallback())
    for step in range(1, 30):  # 4 steps a rollout, 24 of warm-up, one more rollout and a log
        run.log(step, loss=1.0)
        assert run.notices == []
    run.log(30, loss=1.0)
    assert run.notices == ["nothing to watch: the key 'policy/clipfrac_avg' was in no log since step 24"]


def test_logs_of_evaluations_and_of_the_end_feed_no_window(ppo):
    run = Replay(ppo, KLBudgetCallback())
    run.evaluate(1, {f"eval_{KL}": 100.0, KL: 100.0})
    run.fire("on_log", logs={"train_runtime": 1.0, KL: 100.0})
    assert run.alerts == [] and "seen" not in run.callbacks[0].memory


def test_a_number_that_is_not_finite_is_an_alert_and_no_value(subtests, tmp_path):
    for value in [math.nan, math.inf, -math.inf]:
        with subtests.test(value=value):
            run = Replay(tiny_config(tmp_path / str(value)), KLBudgetCallback(action="stop"))
            run.log(1, logs={KL: value})
            over = ["the KL is over its budget"] if value == math.inf else []  # as every number above the limit
            assert run.said == [*over, "`objective/kl` is not finite"]
            assert run.control.should_training_stop == bool(over)
            json.dumps(run.state.stateful_callbacks, allow_nan=False)


def test_infinite_is_above_every_bound(subtests, tmp_path):
    for monitor, key in [
        (ValueHealthCallback(action="stop"), "loss/value_avg"),
        (RewardDisagreementCallback(action="stop"), "rewards/two/disagreement"),
    ]:
        with subtests.test(monitor=monitor):
            run = Replay(tiny_config(tmp_path / type(monitor).__name__), monitor)
            run.log(1, logs={key: math.inf})
            assert run.said[0].endswith("grew") and run.control.should_training_stop


def test_canary_compares_with_its_first_answers():
    canary = CanaryCallback(prompts=["the cat"])
    long, phrase = "the canary's answers changed in length", "one phrase spreads over the canary's answers"
    for length, share, said in [
        (10.0, 0.1, []),
        (15.0, 0.5, []),
        (21.0, 0.5, [long]),  # more than 2 · 10, not 2 · 15
        (6.0, 0.1, []),
        (4.0, 0.7, [long, phrase]),
    ]:
        assert [found.what for found in canary._compare({"length": length, "phrase": share})] == said


def test_not_finite_acts(subtests, tmp_path):
    for key, number in [("grad_norm", math.nan), ("loss", math.nan), ("grad_norm", math.inf), ("loss", -math.inf)]:
        with subtests.test(key=key, number=number):
            run = Replay(tiny_config(tmp_path / f"{key} {number}"), NotFiniteCallback())
            run.log(1, logs={"grad_norm": 1.0, "loss": 2.0})
            assert run.alerts == []
            run.log(2, logs={"grad_norm": 1.0, "loss": 2.0, key: number})
            assert run.said == [f"`{key}` is not finite"] and run.control.should_training_stop
            assert not run.control.should_save  # nothing keeps broken weights


def test_an_alert_is_repeated_only_after_repeat_steps(ppo):
    run = Replay(ppo, KLBudgetCallback(repeat_steps=10))
    for step in range(1, 23):
        run.log(step, logs={KL: 11.0})
    over = [alert["step"] for alert in run.alerts if alert["what"] == "the KL is over its budget"]
    assert over == [1, 11, 21]


# ---- The others ----


def test_clip_fraction_over_some_steps(large):
    run = Replay(large, ClipFractionCallback(limit=0.2, steps=4))
    for step, value in enumerate((0.9, 0.0, 0.0, 0.0, 0.1, 0.3, 0.3, 0.0), 1):  # means of a rollout: 0.225, 0.175
        run.log(step, logs={"policy/clipfrac_avg": value})
    assert [(a["step"], a["value"]) for a in run.alerts] == [(4, pytest.approx(0.225))]


def test_window_in_steps_counts_logs(tmp_path):
    args = tiny_config(tmp_path, logging_steps=2, per_device_train_batch_size=500)
    run = Replay(args, ClipFractionCallback(steps=4))
    run.log(2, logs={"policy/clipfrac_avg": 0.5})
    assert run.alerts == []
    run.log(4, logs={"policy/clipfrac_avg": 0.5})
    assert len(run.alerts) == 1


def test_entropy_floor_absolute_and_relative(large):
    run = Replay(large, EntropyFloorCallback(floor=0.1, relative=0.5, steps=4))
    for step, value in enumerate([2.0] * 4 + [1.2] * 4 + [0.9] * 4 + [0.05] * 4, 1):
        run.log(step, logs={"policy/entropy_avg": value, "policy/entropy_std": 0.1})
    assert [(a["step"], a["what"].split()[2]) for a in run.alerts] == [(12, "fell"), (16, "is")]


def test_length_drift(large):
    run = Replay(large, LengthDriftCallback(factor=1.5, clipped=0.3, rollouts=2))
    for step, (length, cut) in enumerate([(11.95, 0.1), (12.05, 0.1), (17, 0.3), (19, 0.45), (7, 0.1)], 1):
        logs = {"completions/mean_length": length, "completions/clipped_ratio": cut, "completions/std_length": 7.0}
        run.log(step, logs=logs)
    assert [(a["step"], a["what"]) for a in run.alerts] == [
        (4, "completions grew longer"),  # 19 > 1.5 · 12
        (4, "more completions are cut off"),  # 0.45 > 0.1 + 0.3
        (5, "completions grew shorter"),  # 7 < 12 / 1.5
    ]


def test_value_health(large):
    run = Replay(large, ValueHealthCallback(rollouts=2, steps=2, loss_factor=3))
    # The first two warm up; then −0.4 rises to −0.2, which a fresh critic may; −0.2 falls to −0.4
    for step, explained in enumerate((-9.0, -9.0, -0.5, -0.3, -0.2, -0.2, -0.3, -0.5), 1):
        run.log(step, logs={"val/explained_variance": explained, "loss/value_avg": 1.0, "loss/value_std": 2.0})
    assert [(a["step"], a["what"]) for a in run.alerts] == [(7, "the critic explains nothing")]
    for step in range(9, 13):
        run.log(step, logs={"loss/value_avg": 3.1, "loss/value_std": 2.0})
    assert run.said[-1] == "the value loss grew"


def test_disagreement(ppo):
    """Its spread is not logged, and learnt from its scatter, here 0.01."""
    run = Replay(ppo, RewardDisagreementCallback(rollouts=4))
    for step, value in enumerate((0.1, 0.11, 0.09, 0.1, 0.11, 0.1, 0.09, 0.1, 0.11, 0.1, *[0.4] * 8), 1):
        run.log(step, logs={"rewards/ensemble/disagreement": value})
    assert run.said == ["`rewards/ensemble/disagreement` grew"] and run.alerts[0]["step"] == 13


def test_repetition(large):
    run = Replay(large, RepetitionCallback(rollouts=2, phrase=0.3, distinct=0.5, repeated=0.2))
    calm = {"distinct_3": 0.8, "top_phrase_share": 0.2, "repeated": 0.0, "copied_share": 0.0}
    for step, changed in enumerate(
        ({}, {}, {"top_phrase_share": 0.49}, {"top_phrase_share": 0.52}, {"distinct_3": 0.38}, {"repeated": 0.22}), 1
    ):
        run.log(step, logs={f"repetition/{name}": value for name, value in (calm | changed).items()})
    run.log(7, logs={"repetition/top_phrase_share": 0.2, "repetition/copied_share": 0.12})
    assert [(a["step"], a["what"]) for a in run.alerts] == [
        (4, "one phrase spreads"),
        (5, "completions grew alike"),
        (6, "completions repeat themselves"),
        (7, "completions copy the corpus"),
    ]


# ---- Reward ----


LENGTH = {"completions/mean_length": 10.0, "completions/std_length": 3.0}
ENTROPY = {"policy/entropy_avg": 2.0, "policy/entropy_std": 0.5}


@pytest.fixture
def calm(tmp_path):
    """Two rollouts of 100,000 scores each, of mean 1 and standard deviation 2, each in one step."""
    args = tiny_config(tmp_path, per_device_train_batch_size=100_000, num_mini_batches=1, num_ppo_epochs=1)
    run = Replay(args, RewardDriftCallback(rollouts=2, action="stop"))
    for step in (1, 2):
        run.log(step, logs={SCORE: 1.0, STD: 2.0, **ENTROPY, **LENGTH})
    return run


def test_baseline_is_of_single_scores(ppo):
    """Two rollouts of mean 0 and 2 and no spread: σ² = (8·1 + 8·1)/15."""
    run = Replay(ppo, RewardDriftCallback(minimum=16, window=16))
    for step, mean in ((1, 0.0), (5, 2.0)):
        run.log(step, logs={SCORE: mean, STD: 0.0})
    count, mean, squares = run.callbacks[0].memory["scores"]
    assert (count, mean) == (16, 1.0) and squares / 15 == pytest.approx(16 / 15)


def test_a_rise_alone_warns_and_acts_only_with_a_witness(calm):
    calm.log(3, logs={SCORE: 6.9, STD: 2.0, **ENTROPY, "policy/entropy_avg": 1.9})  # 1 + 3 · 2 = 7
    assert calm.alerts == []
    calm.log(4, logs={SCORE: 7.2, STD: 2.0, **ENTROPY, "policy/entropy_avg": 1.9})
    assert calm.said == ["the reward is beyond 3 σ"] and not calm.control.should_training_stop
    calm.log(5, logs={SCORE: 7.2, STD: 2.0, **ENTROPY, "policy/entropy_avg": 1.4, **LENGTH})
    assert calm.said[-1] == "the reward is beyond 3 σ, and more moved with it" and calm.control.should_training_stop
    assert calm.alerts[-1]["advice"].startswith("entropy moved, too. Compare")


@pytest.mark.parametrize(
    "witness", [{"completions/mean_length": 14.0}, {"repetition/top_phrase_share": 0.9}, {"rewards/a/disagreement": 2}]
)
def test_witnesses(witness, calm):
    for step in (3, 4, 5):
        calm.log(step, logs={**LENGTH} if "completions/mean_length" in witness else dict.fromkeys(witness, 0.5))
    for step in (6, 7):
        calm.log(step, logs={SCORE: 9.0, STD: 2.0, **LENGTH, **witness})
    name = "length" if "completions/mean_length" in witness else next(iter(witness))
    assert calm.control.should_training_stop and calm.alerts[-1]["advice"].startswith(f"{name} moved, too. ")


def test_gold_is_a_witness(calm):
    for step, gold in ((2, 0.5), (3, 0.4)):
        calm.evaluate(step, {"eval_rewards/gold_judge/mean": gold, "eval_rewards/gold_judge/std": 0.5}, rows=10_000)
    calm.log(4, logs={SCORE: 9.0, STD: 2.0})
    assert calm.alerts[-1]["advice"].startswith("gold moved, too. ")


def test_drop_collapse_and_crowd_warn(calm):
    calm.log(3, logs={SCORE: -2.9, STD: 2.0})  # 1 − 2 · 2 = −3
    assert calm.alerts == []
    calm.log(4, logs={SCORE: -3.1, STD: 0.15, "score_watch/helpful/share_above": 0.11})
    assert calm.said == [
        "`score_watch/helpful/share_above` is high",
        "the reward fell by 2 σ",
        "the rewards' spread collapsed",  # 0.15 < 0.1 · 2
    ]
    assert not calm.control.should_training_stop


def test_baseline_by_hand(large):
    run = Replay(large, RewardDriftCallback(baseline=(0.0, 1.0)))
    run.log(1, logs={SCORE: 3.1, STD: 1.0})
    assert run.said == ["the reward is beyond 3 σ"]


# ---- Gold ----


def gold_metrics(gold, proxy, rate=None):
    metrics = {"eval_rewards/gold_judge/mean": gold, "eval_rewards/gold_judge/std": 0.5}
    metrics |= {"eval_objective/scores": proxy, "eval_objective/scores_std": 2.0}
    return metrics | ({} if rate is None else {"eval_gold/win_rate": rate})


def test_a_gap_is_one_to_the_first_evaluation_also_of_a_version_that_kept_no_series(ppo):
    monitor = GoldGapCallback(action="stop")
    monitor.memory = {"first": {"gold": [0.0, 1.0], "proxy": [0.0, 1.0]}}
    run = Replay(ppo, monitor)
    scores = {"eval_objective/scores": 3.0, "eval_objective/scores_std": 1.0}
    run.evaluate(8, scores | {"eval_rewards/gold_judge/mean": -0.2, "eval_rewards/gold_judge/std": 1.0}, rows=256)
    assert run.said == ["the proxy left gold behind"]


def test_a_gold_score_that_is_not_finite_is_no_witness(ppo):
    monitor = RewardDriftCallback()
    run = Replay(ppo, monitor)
    for step, score in enumerate([0.5, math.nan, 0.49, 0.51, 0.5, 0.48]):
        run.evaluate(step, {"eval_rewards/gold_judge/mean": score})
    assert not monitor.memory.get("gold_fell") and math.isfinite(monitor.memory["series"]["gold"]["squared_steps"])


def test_gold_gap_counts_from_the_first_evaluation_in_its_sigmas(ppo):
    run = Replay(ppo, GoldGapCallback(limit=1.0, action="stop"))
    run.evaluate(0, gold_metrics(0.5, 7.0), rows=10_000)
    run.evaluate(8, gold_metrics(0.6, 9.0, 0.6), rows=10_000)  # 2/2 − 0.1/0.5 = 0.8
    assert run.alerts == []
    run.evaluate(16, gold_metrics(0.4, 9.0, 0.5), rows=10_000)  # 2/2 + 0.1/0.5 = 1.2
    assert run.said == ["the proxy left gold behind"] and run.alerts[0]["value"] == pytest.approx(1.2)
    assert run.control.should_training_stop


def test_losing_against_the_start_policy(ppo):
    """0.49 of 64 pairs is no sign of anything, 0.2 is one; of 100,000 pairs 0.49 is."""
    for rows, rate, said in ((64, 0.49, False), (64, 0.2, True), (100_000, 0.49, True)):
        run = Replay(ppo, GoldGapCallback())
        run.evaluate(0, gold_metrics(0.5, 1.0), rows=rows)
        for step in (8, 16, 24, 32):
            run.evaluate(step, gold_metrics(0.5, 1.0, rate), rows=rows)
        assert run.said == ["answers lose against the start policy's"] * said


def test_gold_that_is_not_there_is_said(ppo):
    run = Replay(ppo, GoldGapCallback(gold="eval_rewards/judge/mean"))
    run.evaluate(0, {"eval_objective/scores": 1.0})  # it may be in the evaluation of another data set
    assert run.notices == []
    run.evaluate(8, {"eval_objective/scores": 1.0})
    assert run.notices == ["nothing to watch: `eval_rewards/judge/mean` is not in the evaluation"]


def test_gold_without_an_evaluation_says_so_once(tmp_path, subtests):
    for strategy, expected in [
        ("no", ["nothing to watch: `eval_strategy` is 'no', so nothing is evaluated"]),
        ("steps", []),
    ]:
        with subtests.test(strategy=strategy):
            run = Replay(config(SFTConfig, tmp_path, eval_strategy=strategy), GoldGapCallback())
            run.log(1, loss=1.0)
            run.log(200, loss=1.0)
            assert run.notices == expected and run.said == []


def test_a_request_to_scale_the_kl_coefficient_is_answered_once():
    state = TrainerState(global_step=3)
    request_kl_scale(state, 2.0)
    state.global_step = 5
    request_kl_scale(state, 3.0)
    request_kl_scale(state, 1.5)
    assert kl_scale_is_pending(state, 2) and not kl_scale_is_pending(state, 3)  # since step 3
    state = TrainerState(stateful_callbacks=json.loads(json.dumps(state.stateful_callbacks)))  # as in a checkpoint
    assert (take_kl_scale(state), take_kl_scale(state)) == (3.0, 1.0)
    assert not kl_scale_is_pending(state, 0)


# ---- Hack ----

PHRASE = "repetition/top_phrase_share"


@pytest.mark.parametrize(
    ("change", "is_hack"),
    [
        ({SCORE: 3.0}, False),
        ({KL: 20.0}, False),
        ({SCORE: 3.0, KL: 20.0}, False),
        ({SCORE: 3.0, "completions/mean_length": 40.0}, False),
        ({PHRASE: 0.9, KL: 20.0}, False),
        ({SCORE: 3.0, PHRASE: 0.9}, True),
        ({SCORE: 3.0, KL: 20.0, "completions/mean_length": 40.0}, True),
    ],
)
def test_a_hack_is_a_reward_that_rises_with_a_witness(large, change, is_hack):
    """A higher reward, a KL or a length alone is honest training, and a phrase without reward is no hack."""
    calm = {SCORE: 0.0, STD: 1.0, KL: 1.0, "completions/mean_length": 20.0, PHRASE: 0.1}
    run = Replay(large, HackWatch(action="stop", limit=0.5))
    for step in range(1, 30):
        run.log(step, logs=calm if step < 10 else calm | change)
    assert bool(run.said) == run.control.should_training_stop == is_hack
    if PHRASE in change and is_hack:
        assert run.alerts[0]["advice"].startswith("90% of answers contain one phrase, 10% at the start; score +3.0 σ.")


@pytest.mark.parametrize("cls", [GRPOConfig, RLOOConfig, None])
def test_a_hack_of_scores_that_were_all_equal_is_seen(cls, large, tmp_path):
    args = large if cls is None else config(cls, tmp_path, per_device_train_batch_size=50_000)
    reward, std = (SCORE, STD) if cls is None else ("reward", "reward_std")
    run, shares = Replay(args, HackWatch(limit=0.5)), [0.0] * 20 + [share / 20 for share in range(21)]
    for step, share in enumerate(shares, 1):
        run.log(step, logs={reward: share, std: math.sqrt(share * (1 - share)), PHRASE: 0.1 + 0.8 * share})
        assert share or not run.said
    assert run.said


def test_a_hack_within_the_baselines_logs_is_seen(large):
    """Two of the four logs are hacked already: the score rises by 0.7 σ above their mean, the phrase by 0.34."""
    run = Replay(large, HackWatch(limit=0.5))
    for step, share in enumerate([0.0, 0.1] + [0.9] * 20, 1):
        spread = 1 + 2.4 * math.sqrt(share * (1 - share))
        run.log(step, logs={SCORE: 0.5 + 2.4 * share, STD: spread, PHRASE: 0.19 + 0.8 * share})
    assert run.said


def test_a_fall_of_gold_with_a_rising_reward_is_a_hack(large):
    run, gold = Replay(large, HackWatch()), "eval_rewards/gold_judge"
    for step, change in enumerate((0.0, -1.0), 1):
        run.evaluate(step, {f"{gold}/mean": change, f"{gold}/std": 0.1}, rows=1000)
    for step in range(3, 20):
        run.log(step, logs={SCORE: 0.0 if step < 10 else 3.0, STD: 1.0})
    assert run.said == ["the reward rises as in a hack"] and "gold -1, 0 at best" in run.alerts[0]["advice"]


@pytest.mark.parametrize("golds", [(0.0, 1.0, 1.0), (0.0, 1.0, 2.0, 1.0)])
def test_gold_that_rose_clears_what_else_moved_until_it_falls_from_its_best(large, golds):
    run, gold = Replay(large, HackWatch()), "eval_rewards/gold_judge"
    for step in range(1, 10):
        run.log(step, logs={SCORE: 0.0, STD: 1.0, PHRASE: 0.1})
    for step, value in enumerate(golds, 10):
        run.evaluate(step, {f"{gold}/mean": value, f"{gold}/std": 0.1}, rows=1000)
    for step in range(20, 40):
        run.log(step, logs={SCORE: 3.0, STD: 1.0, PHRASE: 0.9})
    assert bool(run.said) == (golds[-1] < max(golds))
    assert all("gold 1, 2 at best" in alert["advice"] for alert in run.alerts)


def test_answers_are_read_from_the_trainers_table(large):
    trainer = SimpleNamespace(_logs={"completion": ["the cat sat"] * 3})
    run = Replay(large, HackWatch(trainer=trainer, action="stop"))
    for step in range(1, 60):
        if step == 20:
            trainer._logs["completion"] = [f"i love you {word}" for word in "abc"]
        elif step < 20:
            trainer._logs["completion"] = ["a b c", "d e f", "g h i"]
        run.state.global_step = step
        run.fire("on_step_end")
        run.log(step, logs={SCORE: 0.0 if step < 20 else 3.0, STD: 1.0})
    assert "of answers contain one phrase, 33% at the start (now 'i love you')" in run.alerts[0]["advice"]


def test_a_trainer_without_a_table_of_answers_is_refused(large):
    with pytest.raises(ValueError, match="SimpleNamespace keeps no table"):
        Replay(large, HackWatch(trainer=SimpleNamespace()))
