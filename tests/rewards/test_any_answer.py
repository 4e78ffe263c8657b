"""Answers as attacks: whatever a policy prints, a rule gives a score, raises nothing, and ends."""

import contextlib
import json
import re
import time
import unicodedata
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.rewards.test_rules import CATASTROPHE, score
from trl_ext.rewards import (
    CodeReward,
    ConstitutionReward,
    JSONSchemaReward,
    PatternReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
    json_schema,
)
from trl_ext.rewards.judge import score_in
from trl_ext.rewards.service import ServiceError
from trl_ext.rewards.texts import last_block
from trl_ext.rewards.wire import PATHS, scores_in_answer
from trl_ext.workbench.serving.app import Limits, Refusal, rows_in

anything = settings(derandomize=True, deadline=None, max_examples=60, database=None)

# ---- Answers ----

PIECES = [
    *("a", "A", " ", "\n", "\t", "```", "```json\n", "\n```", '"', "\\", "{", "}", "[", "]", ",", ":", '{"x":', "[1,"),
    *(
        "0",
        "9",
        "-",
        ".",
        "1e",
        "1e400",
        "null",
        "true",
        "NaN",
        "\u0301\u0327",
        "\u200b",
        "\ufdfa",
        "漢",
        "ไ",
        "\ud83d",
    ),
    *("\x00", "\u2028", "<think>", "kill you", "Score: ", "score", "*", "`", "(", "a{9999999999999999999999}"),
]
# Any text, with halves of surrogate pairs; and a few pieces, each many times
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

WORDY = {
    "type": ["object", "array", "string", "number", "boolean", "null"],
    "properties": {"a": {"type": "integer", "multipleOf": 0.01}, "b": {"type": "string", "pattern": r"^\w+$"}},
    "patternProperties": {r"^([a-z]+)+$": {"minLength": 1}},
    "additionalProperties": {"$ref": "#"},
    "propertyNames": {"maxLength": 5},
    "items": {"$ref": "#"},
    "contains": {"type": ["number", "string"]},
    "minContains": 0,
    "uniqueItems": True,
    "minimum": -1e9,
    "exclusiveMaximum": 1e300,
    "multipleOf": 0.5,
    "if": {"type": "string"},
    "then": {"maxLength": 50, "not": {"const": "b"}},
    "else": {"not": {"enum": [7.5, [1], {"a": 0}, None]}},
}
FORMATS = {"anyOf": [{"type": "string", "format": each} for each in Draft202012Validator.FORMAT_CHECKER.checkers]}
UNEVALUATED = {
    "anyOf": [{"properties": {"a": True}}, {"prefixItems": [True]}],
    "unevaluatedProperties": {"type": "string"},
    "unevaluatedItems": {"type": "number"},
}


RULES = [
    JSONSchemaReward({}),
    JSONSchemaReward(WORDY),
    JSONSchemaReward(WORDY | {"$schema": "https://json-schema.org/draft/2020-12/schema"}, max_depth=200),
    JSONSchemaReward(UNEVALUATED),
    JSONSchemaReward(FORMATS, check_formats=True, max_chars=400),
    PatternReward(required=[r"(?s)\A<think>.+?</think>", CATASTROPHE], timeout=0.05, on_error=0.0),
    PatternReward(forbidden=[r"(?i)\bkill\b"]),
    PhraseReviewReward(["kill you", "漢 字", "a"], veto=1.0),
]
RULES += [ConstitutionReward(RULES[0], [RULES[1], RULES[-1]], cap=0.0)]


@pytest.mark.slow
@anything
@given(st.lists(answers, min_size=1, max_size=3))
def test_rules_score_any_answer(completions):
    for rule in RULES:
        given = score(rule, *completions)
        assert len(given) == len(completions) and {*given} <= {0.0, 1.0}


@anything
@given(st.lists(answers, min_size=1, max_size=3))
def test_watches_note_any_answer(tmp_path_factory, completions):
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


@anything
@given(answers, st.lists(plain | st.fixed_dictionaries({"output": plain}), max_size=3))
def test_code_is_found_in_any_answer(completion, tests):
    reward, seen = CodeReward(template="{test}{x}{1}", max_chars=1000), []
    reward._probe = lambda: None
    reward._start = lambda code, test, token: seen.append(code) or (0, token or f"{test['output']} \n\n")
    (share,) = reward(["p"], [completion], tests=[tests])
    assert share == (1.0 if len(last_block(completion)) <= 1000 else 0.0) if tests else share is None
    assert all(code in completion for code in seen)


# ---- JSON ----

simple = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from([0.5, -1.5, 7.5, 1.0])
    | st.text("ab1", max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab1", max_size=6), inner, max_size=4),
    max_leaves=12,
)


@anything
@given(simple)
def test_what_is_kept_is_what_the_validator_keeps(value):
    for schema, rule in ((WORDY, RULES[1]), (UNEVALUATED, RULES[3])):
        assert score(rule, json.dumps(value)) == [float(Draft202012Validator(schema).is_valid(value))]


MULTIPLES = {factor: JSONSchemaReward({"multipleOf": factor}) for factor in (0.01, 0.07, 3, 2.5e-7, 1e22)}


@anything
@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30, places=4), numbers)
def test_multiples_are_decimal_whatever_the_exponents(value, text):
    for factor, rule in MULTIPLES.items():
        for number in (str(value), text):
            (kept,) = score(rule, number)
            if "e" not in number.lower():  # else a fraction may be of any size
                assert kept == float((Fraction(number) / Fraction(str(factor))).denominator == 1)


def test_numbers_that_no_float_holds():
    hundredths = JSONSchemaReward({"type": "number", "multipleOf": 0.01})
    assert score(hundredths, "0.07", "0.29", "1e400", "9" * 401, "3e-400", "1e-999999999", "1e999999999") == [
        *(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    ]
    assert score(JSONSchemaReward({"type": "integer"}), "1e400", "1.0", "1.5", "1e-400", "true") == [1.0, 1.0, 0, 0, 0]
    assert score(JSONSchemaReward({"const": 0.1}), "0.1", "1e-1", "0.10000000000000001") == [1.0, 1.0, 0.0]
    assert score(JSONSchemaReward({}), "1e9999999999999999999999", "1." + "0" * 5000) == [0.0, 0.0]
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"has the number {number}, which JSON does not have"):
            JSONSchemaReward({"maximum": number})


OPERATOR = [
    {"type": "object", "properties": {"left": {"$ref": "#"}, "operator": {"const": each}}, "required": ["operator"]}
    for each in ("add", "sub", "mul", "div")
]
NESTED = "1"
for _ in range(30):
    NESTED = f'{{"left": {NESTED}, "operator": "div"}}'
BLOWN_UP = {
    "a key": ({"patternProperties": {"^([a-z]+)+$": True}, "additionalProperties": False}, {"a" * 60 + "!": 1}),
    "a key in a part": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "properties": {"x": {"$ref": "#"}},
            "patternProperties": {"^([a-z]+)+$": True},
            "additionalProperties": False,
        },
        {"x": {"a" * 60 + "!": 1}},
    ),
    "many keys": (
        {"patternProperties": {CATASTROPHE: True}, "additionalProperties": False},
        {"a" * 25 + str(i): 1 for i in range(500)},
    ),
    "every way to nest": ({"oneOf": [{"type": "number"}, *OPERATOR]}, json.loads(NESTED)),
    "things of all kinds": (
        {"uniqueItems": True, "minItems": 9000},
        [each for i in range(2000) for each in (i, f"{i}")],
    ),
    "an expression": ({"format": "regex"}, "(?i)" + "[Ā-\uffff]" * 3000),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BLOWN_UP)
def test_a_check_ends_by_its_limit(case, monkeypatch):
    """The limit is on processor time. A search that has begun may exceed it by one more limit at most."""
    monkeypatch.setattr(json_schema, "_SECONDS", 0.5)
    monkeypatch.setattr(json_schema, "_PATTERN_SECONDS", 0.5)
    schema, value = BLOWN_UP[case]
    reward = JSONSchemaReward(schema, check_formats=True, max_chars=100_000)
    start = time.thread_time()
    assert score(reward, json.dumps(value)) == [0.0]
    assert time.thread_time() - start < 20


def test_what_would_have_no_limit_is_refused():
    schema = {"$defs": {"a": {"patternProperties": {"a": True}}}, "$ref": "#/$defs/a", "unevaluatedProperties": False}
    with pytest.raises(
        ValueError, match="`unevaluatedProperties` and `patternProperties`.* may take forever: use `additionalProp"
    ):
        JSONSchemaReward(schema)


def test_the_marks_on_a_letter_are_not_sorted_by_the_thousand(monkeypatch):
    """The time to sort them grows with their square: 40,000 took five seconds."""
    given, normalize = [], unicodedata.normalize
    monkeypatch.setattr(unicodedata, "normalize", lambda form, text: given.append(text) or normalize(form, text))
    watch = PhraseReviewReward(["kill you"], veto=-1.0)
    assert score(watch, "kill you, a" + "\u0301\u0327" * 20_000, "kill a\u0301\u0327 you") == [-1.0, 0.0]
    assert max(len(run) for text in given for run in re.findall("[\u0301\u0327]+", text)) <= 30


# ---- Servers, and who asks them ----


@anything
@given(values | st.fixed_dictionaries({"choices": st.lists(values | st.fixed_dictionaries({"message": values}))}))
def test_any_answer_of_a_server_is_scores_or_an_error_of_the_service(answer):
    for read in (
        lambda: score_in(answer, (1, 10)),
        *(lambda api=api: scores_in_answer(api, answer, 2, None) for api in PATHS),
    ):
        try:
            read()
        except ServiceError as error:
            assert len(str(error)) < 500


@anything
@given(answers)
def test_any_message_of_a_judge_is_a_score_within_the_scale_or_none(message):
    answer = {"choices": [{"message": {"content": message}, "finish_reason": "stop"}]}
    with contextlib.suppress(ServiceError):
        assert 1 <= score_in(answer, (1, 10)) <= 10


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
def test_any_request_is_rows_or_a_refusal(body):
    try:
        prompts, completions, finished = rows_in(body, Limits(), "m")
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and len(str(refusal)) < 200
    else:
        assert len(prompts) == len(completions) == len(finished or prompts) > 0
        assert len({type(row) for row in prompts + completions}) == 1 and all(row or row == "" for row in prompts)
        json.dumps([prompts, completions], ensure_ascii=False).encode()  # UTF-8 can say it


def test_a_request_of_any_depth_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    turns = [[{"role": "assistant", "content": "c"}]]
    for prompts, completions in (([deep], turns), (turns, [[{**turns[0][0], "more": deep}]]), (["p"], deep)):
        with pytest.raises(Refusal, match="must be all texts, or all lists of messages|nested too deeply") as refused:
            rows_in({"prompts": prompts, "completions": completions}, Limits(), "m")
        assert refused.value.status == 422
