"""Patterns and JSON schemas as rewards: what is kept, and what cannot hang, fetch or overflow."""

import json
import pickle
import time
import urllib.request

import pytest
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

import trl_ext.rewards
from trl_ext.rewards import JSONSchemaReward, PatternReward

CATASTROPHE = r"^(([a-z])+.)+[A-Z]([a-z])+$"  # tries every way to cut the text
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "id": {"type": "string", "pattern": r"^\d+$"}},
    "required": ["x"],
    "additionalProperties": False,
}


def score(reward, *completions, **kwargs):
    return reward(prompts=["p"] * len(completions), completions=list(completions), **kwargs)


def test_every_required_pattern_and_no_forbidden_one():
    reward = PatternReward(required=["please", r"\bthanks\b"], forbidden=[r"(?i)\bkill\b"])
    told = [{"role": "assistant", "content": "please, thanks"}]
    answers = ["please and thanks", "please", "please, thanks, KILL", "please, thanks, skill", told]
    assert score(reward, *answers) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert reward.__name__ == "pattern" and PatternReward(forbidden="x").__name__ == "forbidden_pattern"
    assert score(pickle.loads(pickle.dumps(reward)), *answers) == score(reward, *answers)


def test_a_format_is_a_pattern_for_the_whole_answer():
    reward = PatternReward(required=[r"(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z"], name="format")
    right = "<think>\nso\n</think>\n<answer>4</answer>\n"
    assert score(reward, right, "<answer>4</answer>", f"{right} and more", "") == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_tries_every_way_ends_by_the_policy():
    long, logged = "a" * 100_000, {}
    with pytest.raises(RuntimeError, match=r"required_pattern.*0.1 s on completion 1 \(100,000 characters\)"):
        score(PatternReward(required=[CATASTROPHE], timeout=0.1), "aaA!", long)
    for on_error, expected in (("skip", None), (-1.0, -1.0)):
        reward = PatternReward(required=[CATASTROPHE], timeout=0.1, on_error=on_error)
        start = time.monotonic()
        assert score(reward, "!", long, log_metric=logged.__setitem__) == [0.0, expected]
        assert time.monotonic() - start < 20 and logged == {"rewards/required_pattern/failed": 0.5}


def test_json_is_checked_in_the_last_block_or_the_whole_answer(tmp_path):
    (tmp_path / "point.json").write_text(json.dumps(POINT))
    reward = JSONSchemaReward(str(tmp_path / "point.json"))
    assert reward.__name__ == "json_point"
    answers = [
        '{"x": 1}',
        '```json\n{"x": "no"}\n```\nRather:\n```json\n{"x": 2, "id": "12"}\n```\nDone.',
        '```json\n{"x": 2}\n```\nRather:\n```\n{"x": "no"}\n```',
        '{"x": 1, "id": "a"}',
        '{"x": NaN}',
        '{"x": 1} and more',
        "",
    ]
    assert score(reward, *answers) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert score(JSONSchemaReward({}), "1", "NaN", "[Infinity]", "-Infinity") == [1.0, 0.0, 0.0, 0.0]
    assert score(pickle.loads(pickle.dumps(reward)), *answers) == score(reward, *answers)


def test_what_is_twice_is_so_by_its_json():
    assert score(JSONSchemaReward({"uniqueItems": True}), "[true, 1]", "[1, 1.0]", '["1", 1]') == [1.0, 0.0, 1.0]


@pytest.mark.slow
def test_nothing_that_an_answer_holds_raises_or_hangs():
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    deep = "[" * 20 + "]" * 20
    bombs = ["[" * n + "]" * n for n in (33, 900, 9_000, 100_000)] + ['{"a":' * 5_000, "9" * 10_000, "\ud83d", "\x00"]
    assert score(JSONSchemaReward(tree), deep, *bombs) == [1.0] + [0.0] * len(bombs)
    slow = JSONSchemaReward({"patternProperties": {CATASTROPHE: {"type": "string"}}, "pattern": CATASTROPHE})
    start = time.monotonic()
    assert score(slow, json.dumps("a" * 10_000), json.dumps({"a" * 10_000: ""})) == [0.0, 0.0]
    assert time.monotonic() - start < 30


def test_no_schema_is_fetched(monkeypatch, tmp_path):
    def fetch(*args, **kwargs):
        raise AssertionError("fetched")

    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    (tmp_path / "other.json").write_text("{}")
    for place in ("http://localhost:1/other.json", (tmp_path / "other.json").as_uri(), "other.json"):
        for key in ("$ref", "$dynamicRef"):
            with pytest.raises(ValueError, match="but does not contain it, and no file is fetched"):
                JSONSchemaReward({"properties": {"a": {"items": {key: place}}}})
    here = {"$id": "http://localhost:1/a", "$ref": "b", "$defs": {"b": {"$id": "b", "type": "integer"}}}
    assert score(JSONSchemaReward(here), "1", '"1"') == [1.0, 0.0]


def test_formats_are_checked_where_told():
    schema = {"type": "string", "format": "ipv4"}
    assert score(JSONSchemaReward(schema), '"x"') == [1.0]
    assert score(JSONSchemaReward(schema, check_formats=True), '"x"', '"127.0.0.1"') == [0.0, 1.0]


def test_trls_own_rules_are_reachable_from_here():
    assert trl_ext.rewards.get_soft_overlong_punishment is get_soft_overlong_punishment
    assert trl_ext.rewards.get_repetition_penalty_reward is get_repetition_penalty_reward


def test_bad_arguments(subtests):
    for build, error, message in [
        (lambda: PatternReward(), ValueError, "there is no pattern: give"),
        (lambda: PatternReward(required=["("]), ValueError, "is not a regular expression"),
        (lambda: PatternReward(required=[3]), ValueError, "must be a text"),
        (lambda: PatternReward(required=["a"], timeout=0), ValueError, "more than 0 seconds"),
        (lambda: PatternReward(required=["a"], on_error="no"), ValueError, "'raise', 'skip'"),
        (lambda: PatternReward(required=["a"], name="a b"), ValueError, "may have only letters"),
        (lambda: JSONSchemaReward({"type": "strin"}), ValueError, "is not a JSON schema"),
        (lambda: JSONSchemaReward("absent.json"), ValueError, "'absent.json' cannot be read"),
        (lambda: JSONSchemaReward([]), TypeError, "must be a mapping"),
        (lambda: JSONSchemaReward({}, max_depth=0), ValueError, "1 or more"),
        (lambda: score(JSONSchemaReward({"$ref": "#"}), "1"), ValueError, "leads back to itself"),
    ]:
        with subtests.test(message=message), pytest.raises(error, match=message):
            build()
