"""Which function this is: what changes a score changes it, and nothing else does."""

import functools
import importlib.util
import itertools
import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_llama
from trl_ext.rewards import PhraseReviewReward
from trl_ext.runs.sources import source_identity

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

CHECKS = {helper: 1, make: 2}
exec("def typed_in(completions): return list(filter(lambda c: c in {'a', 'b', 'c'}, completions))")

def of_functions(completions, **kwargs):
    return [check(text) for text in completions for check in {*CHECKS} | SET]

SET = {helper, make}
reward = make(3)
scorer = Scorer()
anonymous = lambda completions, **kwargs: [len(text) for text in completions]
"""
NAMES = ("reward", "scorer", "anonymous", "later", "endless", "of_functions", "typed_in")


HEAD = """
import functools, itertools, math, operator, re, torch, numpy as np
from collections import defaultdict, deque
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
"""
# Each is of a file with a function `score`; one of the two words in <|> changes it
CHANGES = [
    "@functools.lru_cache\ndef helper(text): return <1|2>\ndef score(texts): return [helper(text) for text in texts]",
    """
def times(n):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(texts): return [n * x + <1|2> for x in function(texts)]
        return wrapper
    return decorate
def plain(texts): return [1.0 for _ in texts]
score = times(<3|4>)(plain)
""",
    "W = np.array([1.0, <2.0|3.0>])\ndef score(texts): return [W[1] for _ in texts]",
    """
class Judge:
    scale = <1|2>
    def __init__(self, word): self._word = word
    def score(self, texts): return [text.count(self._word) + <3|4> for text in texts]
judge = Judge(<"a"|"b">)
score = <judge.score|functools.partial(judge.score)|lambda texts: judge.score(texts)>
""",
    "score = math.<sqrt|log1p>",
    "score = {'a': <1|2>}.get",
    "score = operator.itemgetter(<0|1>)",
    "score = (\n    lambda texts:\n        [<1|2> for _ in texts]\n)",
    "A, B = [1], [2]\nALL = (A, B, <A|B>)\ndef score(texts): return [ALL[2][0] for _ in texts]",
    """
class Scorer:
    __slots__ = ("word",)
    def __init__(self, word): self.word = word
    @functools.cached_property
    def scale(self): return <1|2>
    @functools.lru_cache
    def offset(self): return <3|4>
    def __call__(self, texts): return [self.scale + self.offset() for _ in texts]
score = Scorer(<"a"|"b">)
""",
    "class Size(Enum):\n    A = <1|2>\n    B = 3\nsize = Size.<A|B>\ndef score(texts): return [size.value]",
    """
class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, text): return self.scale * <1|2>
net = Net(<3|4>)
def score(texts): return [net(text) for text in texts]
""",
    "W = Decimal('<1|2>')\ndef score(texts): return [float(W) for _ in texts]",
    "W = SimpleNamespace(a=deque([<1|2>]))\ndef score(texts): return [W.a[0] for _ in texts]",
    "W = defaultdict(lambda: <1|2>)\ndef score(texts): return [W[text] for text in texts]",
    "N = <1|2>\ndef score(texts, n=N, *, m=-N): return [n * m for _ in texts]",
    """
class Base:
    def rate(self): return <1|2>
class Scorer(Base):
    def __call__(self, texts): return [self.rate() for _ in texts]
score = Scorer()
""",
    "P = re.compile('<a|b>'.rjust(300, 'x'))\ndef score(texts): return [len(P.findall(text)) for text in texts]",
]


def identities(folder, source, names=NAMES):
    path = Path(folder) / "some_rewards.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("some_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.clearcache()
    return {name: source_identity(getattr(module, name)) for name in names}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("factor *", "factor +", {"reward", "of_functions"}),
        ("power=1", "power=2", {"reward", "of_functions"}),
        ("make(3)", "make(4)", {"reward"}),
        ("WORDS[0]", "WORDS[1]", {"reward", "scorer", "later", "of_functions"}),
        ('"good"', '"fine"', {"reward", "scorer", "later", "of_functions"}),
        ('"a+"', '"b+"', {"reward", "scorer", "later", "of_functions"}),
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


@pytest.mark.slow
@pytest.mark.parametrize("source", CHANGES)
def test_whatever_a_function_stands_on_counts(source, tmp_path):
    pieces = re.split(r"<([^<>]*\|[^<>]*)>", source)  # every other one is a choice
    words = itertools.product(*(piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces)))
    sources = [HEAD + "".join(chosen) for chosen in words]
    found = [identities(tmp_path, text, ["score"])["score"] for text in sources]
    assert len(set(found)) == len(found) > 1
    assert found == [identities(tmp_path, text, ["score"])["score"] for text in sources]


def test_a_module_of_ones_own_counts(tmp_path, monkeypatch):
    """`import my_rules`, and what is named of it; not the rest."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for rules in ("def rule(text): return 1", "def rule(text): return 22", "def rule(text): return 1\nOTHER = 3"):
        (tmp_path / "my_rules.py").write_text(rules)
        sys.modules.pop("my_rules", None)
        importlib.invalidate_caches()
        source = "import my_rules\ndef score(texts): return [my_rules.rule(text) for text in texts]"
        found.append(identities(tmp_path, source, ["score"])["score"])
        linecache.clearcache()
    sys.modules.pop("my_rules")
    assert found[0] == found[2] != found[1]


def test_what_else_is_on_the_lines_of_a_lambda_does_not_count(tmp_path):
    made = "score, folder = lambda texts: [1.0 for _ in texts], 'run-1'"
    found = [identities(tmp_path, text, ["score"]) for text in (made, made.replace("run-1", "run-2"))]
    assert found[0] == found[1]


@pytest.mark.slow
def test_another_process_says_the_same(tmp_path):
    """Nothing hangs on addresses, on the order of sets or on the folder."""
    here = identities(tmp_path, SOURCE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = f"from tests.runs.test_sources import *; print(identities({str(elsewhere)!r}, SOURCE))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
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
