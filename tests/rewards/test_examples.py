"""The examples in the docstrings of rewards run, and each public class has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import trl_ext.rewards
from tests.rewards.http_stub import serving
from tests.tiny import tiny_gpt2, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import text_of

MODULES = [
    module.name for module in pkgutil.walk_packages(trl_ext.rewards.__path__, "trl_ext.rewards.") if not module.ispkg
]


@pytest.fixture
def stage(tmp_path):
    """Names that the examples use but do not define: a reward model and two servers."""
    model = tmp_path / "reward"
    tiny_reward_model(tiny_gpt2()).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)

    def lengths(body, _):
        return {"scores": [float(len(text_of(completion).split())) for completion in body["completions"]]}

    def judge(body, _):
        return {"choices": [{"message": {"content": "Score: 7"}, "finish_reason": "stop"}]}

    with serving(lengths) as (server, _), serving(judge) as (judge_url, _):
        yield {"MODEL": str(model), "SERVER": server, "JUDGE": f"{judge_url}/v1"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, stage):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=stage)
    assert not results.failed


def test_each_public_class_has_an_example():
    classes = filter(inspect.isclass, (getattr(trl_ext.rewards, name) for name in trl_ext.rewards.__all__))
    assert [it for it in classes if not issubclass(it, Exception) and ">>> " not in it.__doc__] == []
