"""Which function this is: what changes a score changes it, and nothing else does."""

import functools
import importlib.util
import linecache
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_llama
from trl_ext.rewards import PhraseReviewReward
from trl_ext.sources import source_identity

SOURCE = """
import re
from functools import lru_cache
WORDS = ["good", "bad"]
PATTERN = re.compile("a+")

def helper(text):
    return text.count(WORDS[0]) + len(PATTERN.findall(text))

class Scorer:
    scale = 2.0
    def __init__(self, bonus=1.0):
        self.bonus = bonus
        self._calls = 0
    @staticmethod
    def add(x):
        return x + 1
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

reward = make(3)
scorer = Scorer()
anonymous = lambda completions, **kwargs: [len(text) for text in completions]
"""
NAMES = ("reward", "scorer", "anonymous", "later", "endless")


def identities(folder, source):
    path = Path(folder) / "some_rewards.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("some_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.clearcache()
    return {name: source_identity(getattr(module, name)) for name in NAMES}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("factor *", "factor +", {"reward"}),
        ("power=1", "power=2", {"reward"}),
        ("make(3)", "make(4)", {"reward"}),
        ("WORDS[0]", "WORDS[1]", {"reward", "scorer", "later"}),
        ('"good"', '"fine"', {"reward", "scorer", "later"}),
        ('"a+"', '"b+"', {"reward", "scorer", "later"}),
        ("scale = 2.0", "scale = 3.0", {"scorer"}),
        ("return x + 1", "return x + 2", {"scorer"}),
        ("scorer = Scorer()", "scorer = Scorer(2.0)", {"scorer"}),
        ("[len(text)", "[-len(text)", {"anonymous"}),
        ("n - 1", "n - 2", {"endless"}),
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

    assert source_identity(judged_by(tiny_llama())) == source_identity(judged_by(tiny_llama()))
    assert source_identity(judged_by(tiny_llama())) != source_identity(judged_by(tiny_llama(seed=1)))
    score.identity = "the third"
    assert source_identity(score) == "the third"
    assert source_identity(len) and source_identity("typed in")
