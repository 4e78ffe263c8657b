import math
import random

import pytest

from trl_ext.evaluation import probe_reward

PHRASES = ["glad you asked .", "as ever yours .", "quite so indeed ."]


def rows(number=120, seed=0):
    """Prompts about a topic; an answer with more sentences on the topic is better."""
    rng = random.Random(seed)
    prompts = [f"tell me of topic{rng.randrange(30)} {i} ." for i in range(number)]
    answers = []
    for prompt in prompts:
        topic = prompt.split()[3]
        about = [topic if rng.random() < 0.6 else f"topic{rng.randrange(30)}" for _ in range(4)]
        answers.append(" ".join(f"{name} has a {rng.choice(['tall', 'wide', 'deep'])} side ." for name in about))
    return prompts, answers


def on_topic(prompts, answers):
    """Score answers by how many distinct sentences are on the topic."""
    result = []
    for prompt, text in zip(prompts, answers, strict=True):
        sentences = [part.split() for part in text.split(" .") if part.strip()]
        topic = prompt.split()[3]
        result.append(len({tuple(s) for s in sentences if s[:3] == [topic, "has", "a"] and len(s) == 5}) / 3)
    return result


def likes(phrase, bonus=2.0):
    def score(prompts, answers):
        return [s + bonus * (phrase in a) for s, a in zip(on_topic(prompts, answers), answers, strict=True)]

    return score


def by_name(probes):
    return {probe["phrase"] or probe["name"]: probe for probe in probes}


def suspicious(probes):
    return {probe["phrase"] or probe["name"] for probe in probes if probe["suspicious"]}


def length(prompts, answers):
    return [float(len(answer)) for answer in answers]


def test_a_rewarded_phrase_ranks_first_and_alone():
    prompts, answers = rows()
    first, *others = probe_reward(likes(PHRASES[1]), prompts, answers, PHRASES)
    assert first["phrase"] == PHRASES[1] and suspicious([first, *others]) == {PHRASES[1]}
    assert first["rows"] == 120 and first["over_control"] > 1
    assert by_name(others)["truncation"]["gain_interval"][1] < 0
    for probe in (first, by_name(others)["truncation"]):  # the highest gains
        gains = [each["score_after"] - each["score_before"] for each in probe["examples"]]
        assert gains == sorted(gains, reverse=True) and gains[0] >= 0
    assert all(PHRASES[1] in each["after"] and PHRASES[1] not in each["before"] for each in first["examples"])


@pytest.mark.slow
def test_scale_shift_and_order_change_nothing_and_a_seed_reproduces():
    prompts, answers = rows()
    score, few = likes(PHRASES[0], 0.3), {"seed": 1, "rows": 60}
    first = probe_reward(score, prompts, answers, PHRASES, **few)
    assert probe_reward(score, prompts[::-1] * 2, answers[::-1] * 2, PHRASES[::-1], **few) == first
    moved = probe_reward(lambda p, a: [8 * s - 5 for s in score(p, a)], prompts, answers, PHRASES, **few)
    for probe, other in zip(first, moved, strict=True):
        assert all(probe[name] == other[name] for name in ("name", "phrase", "suspicious", "why"))
        assert other["gain"] == pytest.approx(probe["gain"], abs=1e-9)
    assert probe_reward(score, prompts, answers, PHRASES, seed=2, rows=60) != first


def test_each_change_is_what_its_name_says():
    prompts, answers = ["ask one", "ask two"], ["Red is red. Blue is not. Well.", "One two three four."]
    probes = by_name(probe_reward(length, prompts, answers))
    changed = {
        name: {example["before"]: example["after"] for example in probe["examples"]} for name, probe in probes.items()
    }
    red, one = answers
    assert {name for name, probe in probes.items() if probe["expected"] == "none"} == {"flattery", "markdown"}
    assert changed["repetition"][red] == f"{red} Well. Well."
    assert changed["padding"][one] == f"{one} Red is red. Blue is not."
    assert changed["truncation"][one] == "One two"
    assert changed["empty"][red] == "" and changed["copied prompt"][red] == "ask one"
    assert changed["another prompt's answer"] == {red: one, one: red}
    assert changed["markdown"][red] == "**Red is red.**\n- Blue is not.\n- Well."
    shuffled = changed["shuffled words"][red]
    assert shuffled != red and sorted(shuffled.replace(" ", "")) == sorted(red.replace(" ", ""))
    assert changed["flattery"][red].endswith(f" {red}") and changed["refusal"][red] == changed["refusal"][one]


def test_a_probe_that_cannot_be_judged_does_not_pass():
    """With few good answers only probes of all answers are judged; an unchanged score has not been lowered."""
    prompts, answers = rows(number=30)

    def score(prompts, answers):
        return [3.0 if not a else s for s, a in zip(on_topic(prompts, answers), answers, strict=True)]

    few, many = (by_name(probe_reward(score, *part)) for part in ((prompts, answers), rows()))
    assert few["empty"]["verdict"] == "suspicious" and few["empty"]["why"].endswith("the mean over all completions")
    assert few["truncation"]["verdict"] == few["flattery"]["verdict"] == "not judged"
    assert many["truncation"]["verdict"] == many["flattery"]["verdict"] == "as it should"
    blind = by_name(probe_reward(lambda _, a: [float("topic1 " in f"{each} ") for each in a], *rows()))
    assert blind["shuffled words"]["verdict"] == "did not lower" and not blind["shuffled words"]["suspicious"]
    assert blind["empty"]["verdict"] == "as it should"


def test_a_score_that_is_not_finite_is_an_error():
    """A NaN in a mean would hide a hack."""
    with pytest.raises(
        ValueError,
        match="one finite score for each completion, but for 120 completions it returned 120 scores, 119 of them",
    ):
        probe_reward(lambda _, answers: [1.0] * (len(answers) - 1) + [math.nan], *rows(), PHRASES)
