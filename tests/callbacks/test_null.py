"""No monitor acts on a policy that does not change; each detects a change soon, with a restart at the same log."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import TrainerControl, TrainerState

from benchmarks.outcomes import wilson
from tests.callbacks.cases import CHANGES, LOGS, NULL, config
from tests.callbacks.replay import Replay
from trl_ext.callbacks import CanaryCallback, GoldGapCallback
from trl_ext.callbacks.monitor import REGISTRY


def first_act(name, rows, callback=None, state=None):
    """The number, from 1, of the first log at which the monitor acts; None if it never does."""
    cls, settings, config_class, steps, _ = NULL[name]
    answers = rows["answers"]
    monitor = callback or cls(action="save", sinks=[], **settings)
    run = Replay.__new__(Replay)
    run.args, run.state, run.control = config(config_class, answers, steps), state or TrainerState(), TrainerControl()
    if cls is not CanaryCallback:
        monitor.on_train_begin(run.args, run.state, run.control)
    evaluation = SimpleNamespace(dataset=range(answers))
    for number, log in enumerate(rows["logs"], run.state.global_step + 1):
        run.state.global_step = number
        if cls is GoldGapCallback:
            monitor.on_evaluate(run.args, run.state, run.control, metrics=log, eval_dataloader=evaluation)
        elif cls is CanaryCallback:
            monitor._begin(run.args, run.state, {})
            monitor._is_training = True
            monitor._handle(monitor._compare(log), run.state, run.control)
        else:
            monitor.on_log(run.args, run.state, run.control, logs=log)
        if run.control.should_save:
            return number
    return None


def sampled(name, runs, answers, **kwargs):
    """Sample the logs of some runs."""
    for part in range(0, runs, 25):  # 25 runs at a time fit into memory
        rng = np.random.default_rng([0, answers, part])
        columns = NULL[name][4](rng, min(25, runs - part), answers, **kwargs)
        keys, values = list(columns), np.stack(list(columns.values()), axis=-1).tolist()
        for run in values:
            logs = [{k: v for k, v in zip(keys, row, strict=True) if v == v} | {"learning_rate": 1e-12} for row in run]
            yield {"answers": answers, "logs": logs}


def calm(name, runs, answers):
    """Logs of a policy that does not change. The k-th look has the share 6 / (π k)² of α: 0.6 % is left after 100."""
    return sampled(name, runs, answers, logs=LOGS if NULL[name][3] > 1 else LOGS // 2)


@pytest.mark.parametrize("answers", [8, 32, 128])
@pytest.mark.parametrize("name", NULL)
def test_no_action_in_one_run_of_an_unchanged_policy(name, answers):
    assert all(first_act(name, rows) is None for rows in calm(name, 1, answers))


@pytest.mark.slow
@pytest.mark.parametrize("answers", [8, *(pytest.param(answers, marks=pytest.mark.extra) for answers in (32, 128))])
@pytest.mark.parametrize("name", NULL)
def test_false_alarms_of_an_unchanged_policy(name, answers):
    """The share of runs in which the monitor acts: the 95 % interval ends at 1 % or below."""
    acts = sum(first_act(name, rows) is not None for rows in calm(name, 400, answers))
    assert wilson(acts, 400)[1] <= 0.01, acts


# ---- A change ----

CALM = 40  # logs before the change


def changed(name, runs, answers):
    """Runs that are calm, then change."""
    kwargs, _ = CHANGES[name]
    calm, bad = (sampled(name, runs, answers, **given) for given in ({}, kwargs))
    for before, after in zip(calm, bad, strict=True):
        yield before | {"logs": before["logs"][:CALM] + after["logs"][CALM : CALM + 80]}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_detected_soon(name):
    for answers, within in zip((8, 32, 128), CHANGES[name][1], strict=True):
        seen = [first_act(name, rows) for rows in changed(name, 5, answers)]
        delays = sorted(math.inf if log is None else log - CALM for log in seen)
        assert delays[0] > 0 and delays[3] <= within, (answers, delays)


def test_a_hack_that_widens_the_spread_is_detected():
    """After five calm logs of 8 completions, these get twice as long on average and vary twice as much."""
    calm, bad = (sampled("length", 11, 8, **given) for given in ({}, {"moved": 2.0}))
    runs = [a | {"logs": a["logs"][:5] + b["logs"][5:]} for a, b in zip(calm, bad, strict=True)]
    assert sorted(first_act("length", rows) or math.inf for rows in runs)[5] <= 5 + 40


@pytest.mark.parametrize("name", CHANGES)
def test_a_restart_changes_nothing(name):
    """Killed within a baseline, within a rollout's logs and within a change, and resumed from JSON."""
    (rows,) = changed(name, 1, 32)
    whole = first_act(name, rows)
    for kill in (2, 11, CALM - 1, whole - 1):
        cls, settings, *_ = NULL[name]
        first = cls(action="save", sinks=[], **settings)
        assert first_act(name, rows | {"logs": rows["logs"][:kill]}, first) is None
        saved = json.loads(json.dumps({"step": kill, "memory": first.memory}, allow_nan=False))
        state = TrainerState(global_step=kill)
        state.stateful_callbacks[REGISTRY] = {cls.__name__: {"attributes": {"memory": saved["memory"]}}}
        second = cls(action="save", sinks=[], **settings)
        second.memory = saved["memory"]
        assert first_act(name, rows | {"logs": rows["logs"][kill:]}, second, state) == whole
