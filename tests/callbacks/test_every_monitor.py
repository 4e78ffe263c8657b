"""What each monitor and each other callback must have: cases, refusals, a runnable example."""

import doctest
import inspect

import pytest

import trl_ext.callbacks as callbacks
from tests.callbacks.cases import BAD_NUMBERS, CHANGES, NULL, REFUSED
from tests.callbacks.test_runbook import MONITORS
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer

CALLBACKS = [name for name in callbacks.__all__ if name.endswith("Callback") or name == "HackWatch"]


@pytest.mark.parametrize("monitor", MONITORS)
def test_each_monitor_has_its_cases(monitor):
    """A monitor without them would be tested neither on noise, nor on a change, nor in a real trainer."""
    of_null = {name for name, case in NULL.items() if case[0] is monitor}
    assert of_null and of_null & CHANGES.keys() and monitor in BAD_NUMBERS
    assert any(cls is monitor for cls, _, _ in REFUSED)


def test_a_log_without_a_number_is_beyond_no_bound_and_leaves_no_trace():
    monitor = callbacks.MonitorCallback()
    monitor.follow("x", 1.0, error=0.0)
    before = str(monitor.memory)
    series = monitor.follow("x", None)
    assert series.first is None and not series.falls
    assert series.above(plus=-1e9) is None and series.below(plus=1e9) is None and str(monitor.memory) == before


@pytest.mark.parametrize(("monitor", "arguments", "message"), REFUSED)
def test_arguments_that_cannot_work_are_refused(monitor, arguments, message):
    with pytest.raises(ValueError, match=message):
        monitor(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_the_example_in_the_docstring_runs(name, tmp_path, monkeypatch):
    """As it is printed, and then a run with that callback trains a step."""
    monkeypatch.chdir(tmp_path)
    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=tiny_config(tmp_path, max_steps=1),
        train_dataset=prompts(8),
        eval_dataset=prompts(8, seed=1),
        processing_class=tiny_tokenizer(),
    )
    names = {exported: getattr(callbacks, exported) for exported in callbacks.__all__} | {"trainer": trainer}
    docstring = inspect.getdoc(getattr(callbacks, name))
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert example.examples, "the docstring needs an example that begins with >>>"
    assert doctest.DocTestRunner().run(example).failed == 0
    trainer.train()
    assert trainer.state.global_step == 1
