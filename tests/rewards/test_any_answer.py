"""Completions as attacks: for any text a rule returns a score, without an error and in time."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.rewards.test_rules import CATASTROPHE, score
from trl_ext.rewards import (
    ConstitutionReward,
    PatternReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
)
from trl_ext.rewards.judge import score_in
from trl_ext.rewards.remote import PATHS, scores_in_answer
from trl_ext.rewards.service import ServiceError
from trl_ext.workbench.feedback.serving import Limits, Refusal, rows_in

anything = settings(derandomize=True, deadline=None, max_examples=30, database=None)

# ---- Completions ----

PIECES = [
    *("a", "A", " ", "\n", "\t", "```", "```json\n", "\n```", '"', "\\", "{", "}", "[", "]", ",", ":", '{"x":', "[1,"),
    *("9", "-", ".", "1e400", "null", "NaN", "\u0301\u0327", "\u200b", "\ufdfa", "漢", "\ud83d"),
    *("\x00", "\u2028", "<think>", "kill you", "Score: ", "score", "*", "`", "(", "a{9999999999999999999999}"),
]
# Any text, also with halves of surrogate pairs; and a few pieces, each many times
plain = st.text(st.characters(exclude_categories=()), max_size=200)
pumped = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 3000)), max_size=6).map(
    lambda parts: "".join(piece * count for piece, count in parts)
)
numbers = st.from_regex(r"\A-?(0|[1-9][0-9]{0,450})(\.[0-9]{1,9})?([eE][-+]?[0-9]{1,19})?\Z")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(plain, inner, max_size=5),
    max_leaves=20,
)
texts = plain | pumped | numbers | values.map(json.dumps)
answers = texts | texts.map(lambda text: f"```json\n{text}\n```")

RULES = [
    PatternReward(required=[r"(?s)\A<think>.+?</think>", CATASTROPHE], timeout=0.05, on_error="skip"),
    PatternReward(forbidden=[r"(?i)\bkill\b"]),
    PhraseReviewReward(["kill you", "漢 字", "a"], veto=1.0),
]
RULES += [ConstitutionReward(RULES[0], [RULES[1], RULES[2]], cap=0.0)]


@pytest.mark.slow
@anything
@given(st.lists(answers, min_size=1, max_size=3))
def test_rules_score_any_completion(completions):
    for rule in RULES:
        given = score(rule, *completions)
        assert len(given) == len(completions) and {*given} <= {0.0, 1.0, None}


@pytest.mark.slow
@anything
@given(st.lists(answers, min_size=1, max_size=3))
def test_watches_record_any_completion(tmp_path_factory, completions):
    folder = tmp_path_factory.mktemp("watched")
    rule, logged = PatternReward("a"), {}
    for watch in (
        RepetitionWatch(corpus=["a b c kill you"], copied_words=2, folder=folder),
        PhraseReviewReward(["kill you"], folder=folder),
        ScoreWatch(rule, folder=folder),
    ):
        score(watch, *completions, log_metric=logged.__setitem__)
    assert all(0 <= value <= 1 for value in logged.values())
    for file in folder.iterdir():
        lines = [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
        assert {line["completion"] for line in lines} <= {*completions}


# ---- Servers and their clients ----


@anything
@given(
    values
    | st.fixed_dictionaries({"choices": st.lists(values | st.fixed_dictionaries({"message": values}))})
    | answers.map(lambda text: {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})
)
def test_any_reply_of_a_server_is_scores_or_an_error_of_the_service(answer):
    for read in (
        lambda: score_in(answer, (1, 10)),
        *(lambda api=api: scores_in_answer(api, answer, 2, None) for api in PATHS),
    ):
        try:
            assert all(1 <= score <= 10 for score in [read()] if isinstance(score, float))
        except ServiceError as error:
            assert len(str(error)) < 500


turn = st.fixed_dictionaries({"role": plain, "content": plain | values}, optional={"more": values})
cells = values | plain | st.lists(turn, max_size=2)
bodies = st.fixed_dictionaries(
    {"prompts": st.lists(cells, max_size=2) | values, "completions": st.lists(cells, max_size=2) | values},
    optional={
        "finished": values | st.lists(st.booleans(), max_size=2),
        "model": values | st.just("m"),
        "more": values,
    },
)


@anything
@given(values | bodies)
@example({"prompts": [[]], "completions": [[]]})
def test_any_request_gives_rows_or_a_refusal(body):
    try:
        prompts, completions, finished = rows_in(body, Limits(), "m")
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and len(str(refusal)) < 200
    else:
        assert len(prompts) == len(completions) == len(finished or prompts) > 0
        assert len({type(row) for row in prompts + completions}) == 1 and all(row or row == "" for row in prompts)
        json.dumps([prompts, completions], ensure_ascii=False).encode()  # UTF-8 can encode it
