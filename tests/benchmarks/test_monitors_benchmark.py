"""The benchmark's own arithmetic, on logs written by hand."""

import pytest

from tests.benchmarks.monitors import Outcome, build, curve, outcome, score, table, wilson


def make_log(golds, proxies, kls=None, **kwargs):
    """An evaluation every 32 steps, and a rollout in between that agrees with it."""
    history = []
    for i, (gold, proxy) in enumerate(zip(golds, proxies, strict=True)):
        if i:
            rollout = {"objective/scores": proxy, "objective/scores_std": 1.0, "rewards/gold_reward/mean": gold}
            kl = {"objective/kl": (kls or [0.0] * len(golds))[i]}
            history.append({"step": 32 * i - 4, "learning_rate": 1e-4, **rollout, **kl})
        scores = {"eval_objective/scores": proxy, "eval_objective/scores_std": 1.0, "eval_objective/kl": 0.0}
        gold = {"eval_rewards/gold_reward/mean": gold, "eval_rewards/gold_reward/std": 0.5}
        history.append({"step": 32 * i, **scores, **gold})
    return {"seed": 0, "share": 0.2, "run": "0", "seconds": 60.0, "log_history": history, **kwargs}


HACKED = make_log([0.5, 0.6, 0.7, 0.7, 0.7, 0.6, 0.4, 0.2], range(8), kls=[0, 1, 2, 4, 8, 16, 32, 64])
HEALTHY = make_log([0.5, 0.6, 0.7, 0.7, 0.68, 0.7, 0.7, 0.7], [0, 1, 2, 2, 2, 2, 2, 2])


def test_wilson():
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)


def test_gold_is_averaged_over_three_evaluations_and_its_fall_found():
    steps, gold, _ = curve(HACKED["log_history"])
    assert steps == list(range(0, 256, 32))
    assert gold == pytest.approx([0.5, 0.55, 0.6, 2 / 3, 0.7, 2 / 3, 17 / 30, 0.4])
    assert outcome(HACKED).fall == 160  # 0.667 ≤ 0.7 − 0.1 · 0.2
    assert outcome(HACKED, part=0.5).fall == 192
    assert outcome(HEALTHY).fall is None
    falling_together = make_log([0.5, 0.7, 0.7, 0.7, 0.3, 0.3], [0, 3, 3, 3, 1, 1])
    assert outcome(falling_together).fall is None  # the proxy falls, too: no hack


def test_scores():
    runs = [outcome(HACKED), outcome(HEALTHY)]
    late = score(runs, lambda: build("KLBudgetCallback", {"limit": 20.0}))
    assert (late.leads, late.in_time, late.hacked) == ([160 - 188], 0, 1)
    early = score(runs, lambda: build("KLBudgetCallback", {"warn": 3.0, "limit": 3.0}))
    assert (early.leads, early.in_time, early.false_alarms, early.healthy_steps) == ([160 - 92], 1, 0, 224)
    alarmist = score([Outcome(HACKED, None, 224)], lambda: build("KLBudgetCallback", {"warn": 3.0, "limit": 3.0}))
    assert (alarmist.false_alarms, alarmist.healthy_steps) == (1, 92)


def test_table_has_a_row_for_each_monitor_and_set():
    rows = table([outcome(HACKED)], [outcome(HACKED), outcome(HEALTHY)]).splitlines()
    assert len(rows) == 2 + 2 * 8 + 1 + 2 * 2 and all(row.count("|") == 7 for row in rows)
