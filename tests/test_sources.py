"""Which function this is: what changes a score changes it, and nothing else does."""

import functools
import importlib.util
import linecache
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_llama, tiny_tokenizer
from trl_ext.rewards import PhraseReviewReward
from trl_ext.sources import source_identity

SOURCE = """
import functools
import re
from dataclasses import dataclass
WORDS = ["good", "bad"]
PATTERN = re.compile("a+")
STOP = {"the", "of", "and", "to", "in", "is"}
LIMITS = {"low": {"a": 1}, "high": 2}
NESTED = [["x"], "y"]

def helper(text):
    return text.count(WORDS[0]) + len(PATTERN.findall(text))

@functools.lru_cache
def cached(text):
    return len(text) + 5

def clipped(function):
    @functools.wraps(function)
    def inner(completions, **kwargs):
        return [min(score, 6) for score in function(completions, **kwargs)]
    return inner

@dataclass
class Settings:
    bias: float

SETTINGS = Settings(bias=7.0)

@clipped
def varied(completions, stop=STOP, **kwargs):
    return [cached(text) + SETTINGS.bias + len(str(LIMITS)) + len(str(NESTED)) for text in completions]

class Base:
    def bonus_of(self, text):
        return 8

class Scorer(Base):
    scale = 2.0
    def __init__(self, bonus=1.0):
        self.bonus = bonus
        self._calls = 0
    @staticmethod
    def add(x):
        return x + 1
    @classmethod
    def twice(cls, x):
        return 2 * x
    @property
    def shift(self):
        return 9
    @functools.cached_property
    def slope(self):
        return 10
    def grade(self, completions, **kwargs):
        return [11.0 for _ in completions]
    def __call__(self, completions, **kwargs):
        self._calls += 1
        return [self.add(self.scale * helper(text) + self.bonus) for text in completions]

def make(factor):
    def score(completions, *, power=1, **kwargs):
        return [factor * helper(text) ** power for text in completions]
    return score

async def later(completions, **kwargs):
    return [helper(text) for text in completions]

def endless(n):
    return endless(n - 1)

def rounds(*judges):
    return lambda completions, **kwargs: [judge(completions) for judge in judges]

reward = make(3)
scorer, used = Scorer(), Scorer()
used(["good"])
bound = Scorer().grade
partly = functools.partial(Scorer(), 12)
often = rounds(endless, reward, endless)
anonymous = lambda completions, **kwargs: [len(text) for text in completions]
"""
NAMES = ("reward", "scorer", "anonymous", "later", "endless", "varied", "bound", "partly", "often")
SCORERS = {"scorer", "bound", "partly"}


def identities(folder, source):
    path = Path(folder) / "some_rewards.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("some_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.clearcache()
    assert source_identity(module.used) == source_identity(module.scorer)
    return {name: source_identity(getattr(module, name)) for name in NAMES}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("factor *", "factor +", {"reward", "often"}),
        ("power=1", "power=2", {"reward", "often"}),
        ("make(3)", "make(4)", {"reward", "often"}),
        ("WORDS[0]", "WORDS[1]", {"reward", "later", "often", *SCORERS}),
        ('"good", "bad"', '"fine", "bad"', {"reward", "later", "often", *SCORERS}),
        ('"a+"', '"b+"', {"reward", "later", "often", *SCORERS}),
        ("scale = 2.0", "scale = 3.0", SCORERS),
        ("return x + 1", "return x + 2", SCORERS),
        ("2 * x", "3 * x", SCORERS),
        ("return 8", "return 9", SCORERS),
        ("return 9", "return 8", SCORERS),
        ("return 10", "return 9", SCORERS),
        ("return [11.0", "return [9.0", SCORERS),
        ("scorer, used = Scorer(), Scorer()", "scorer = used = Scorer(2.0)", {"scorer"}),
        ("Scorer().grade", "Scorer(2.0).grade", {"bound"}),
        ("Scorer().grade", "Scorer().__call__", {"bound"}),
        ("Scorer(), 12", "Scorer(), 13", {"partly"}),
        ("endless, reward, endless", "endless, reward, reward", {"often"}),
        ("[len(text)", "[-len(text)", {"anonymous"}),
        ("n - 1", "n - 2", {"endless", "often"}),
        ("len(text) + 5", "len(text)", {"varied"}),
        ("min(", "max(", {"varied"}),
        ("bias=7.0", "bias=8.0", {"varied"}),
        ('"the", ', "", {"varied"}),
        ('{"a": 1}, "high": 2', '{"a": 1, "high": 2}', {"varied"}),
        ('"high"', '"top"', {"varied"}),
        ('["x"], "y"', '["x", "y"]', {"varied"}),
        # Nothing that changes a score
        ("    return text", "    # why\n    return  text", set()),
        ("reward = make(3)", "\n\nunused = 1\nreward = make(3)", set()),
        ("self._calls = 0", "self._calls = 0  # so far", set()),
    ],
)
def test_what_changes_a_score_changes_its_identity(old, new, changed, tmp_path):
    assert old in SOURCE
    before, after = identities(tmp_path, SOURCE), identities(tmp_path, SOURCE.replace(old, new))
    assert {name for name in NAMES if before[name] != after[name]} == changed


@pytest.mark.slow
def test_another_process_says_the_same(tmp_path):
    """Nothing hangs on addresses, on the order of sets or on the folder."""
    here = identities(tmp_path, SOURCE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = f"from tests.test_sources import *; print(identities({str(elsewhere)!r}, SOURCE))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert there.stdout.strip().splitlines()[-1] == str(here), there.stderr


def test_arguments_attributes_and_a_word_of_its_own():
    def score(completions, n=1, **kwargs):
        return [n for _ in completions]

    assert source_identity(functools.partial(score, n=1)) != source_identity(functools.partial(score, n=2))
    assert source_identity(PhraseReviewReward(["a"])) != source_identity(PhraseReviewReward(["b"]))
    used = PhraseReviewReward(["a"])
    before = source_identity(used)
    used(prompts=["x"], completions=["a"])
    assert source_identity(used) == before

    def judged_by(model):
        return lambda completions, **kwargs: [model(text) for text in completions]

    for make, another in [
        (tiny_llama, lambda: tiny_llama(seed=1)),
        (tiny_tokenizer, lambda: tiny_tokenizer(bos=True)),
        (lambda: torch.ones(3), lambda: torch.tensor([1.0, 1.0, 2.0])),
    ]:
        assert source_identity(judged_by(make())) == source_identity(judged_by(make()))
        assert source_identity(judged_by(make())) != source_identity(judged_by(another()))
    score.identity = "the third"
    assert source_identity(score) == "the third"
    score.identity = lambda: "no string"
    assert source_identity(score).startswith("xxh3:") and source_identity(len)


def test_what_was_typed_in_counts_without_a_file():
    def typed(code):
        namespace = {"__name__": "__main__"}
        exec(code, namespace)
        return source_identity(namespace["score"])

    assert typed("score = lambda completions: 1") == typed("score = lambda completions: 1")
    assert typed("score = lambda completions: 1") != typed("score = lambda completions: 2")
