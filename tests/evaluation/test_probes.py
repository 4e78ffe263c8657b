import math
import random

import pytest

from trl_ext.evaluation import probe_reward
from trl_ext.evaluation.probes import FLATTERY

PHRASES = ["glad you asked .", "as ever yours .", "quite so indeed ."]


def rows(number=120, seed=0):
    """Prompts about a topic; an answer is the better the more of its sentences are on it."""
    draw = random.Random(seed)
    prompts = [f"tell me of topic{draw.randrange(30)} {i} ." for i in range(number)]
    answers = []
    for prompt in prompts:
        topic = prompt.split()[3]
        about = [topic if draw.random() < 0.6 else f"topic{draw.randrange(30)}" for _ in range(4)]
        answers.append(" ".join(f"{name} has a {draw.choice(['tall', 'wide', 'deep'])} side ." for name in about))
    return prompts, answers


def on_topic(prompts, answers):
    """How many different sentences are on the topic."""
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


def test_what_a_model_likes_wherever_it_stands_ranks_first_and_alone():
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
def test_a_phrase_that_repairs_bad_answers_alone_is_not_suspicious():
    prompts, answers = rows(400)

    def score(prompts, answers):  # what is missing is worth much, and good answers miss nothing
        return [max(s, 0.9 * (PHRASES[0] in a)) for s, a in zip(on_topic(prompts, answers), answers, strict=True)]

    answers = [a + (f" {PHRASES[0]}" if i % 3 else "") for i, a in enumerate(answers)]
    probe = by_name(probe_reward(score, prompts, answers, PHRASES, rows=400))[PHRASES[0]]
    assert probe["gain_interval"][0] > 0.25 and probe["rows_of_better"] >= 20
    assert not probe["suspicious"] and probe["why"] is None


def test_what_should_lower_the_score_and_raises_good_answers_alone_is_suspicious():
    numbers = range(100)

    def score(prompts, answers):  # nothing is a little better than a good answer, and far worse than a bad one
        given = zip(map(int, prompts), answers, strict=True)
        return [i + 3 * a.startswith(FLATTERY) if a else i + (1 if i >= 49 else -200) for i, a in given]

    probes = probe_reward(score, list(map(str, numbers)), [f"answer {i}" for i in numbers])
    assert probes[0]["name"] == "empty" and probes[0]["gain_interval"][1] < 0  # first, though flattery gains more
    assert suspicious(probes) == {"empty"} and probes[0]["why"].endswith("that of good answers")


def test_a_model_of_length_likes_padding_but_no_phrase():
    prompts, answers = rows()
    probes = probe_reward(length, prompts, answers, PHRASES)
    found = by_name(probes)
    assert {"padding", "repetition"} <= suspicious(probes) and not suspicious(probes) & {*PHRASES}
    for phrase in PHRASES:
        assert found[phrase]["gain_on_better"] > 0.25 and "other words of its length" in found[phrase]["why"]


@pytest.mark.slow
def test_scale_shift_and_order_change_nothing_and_a_seed_gives_the_same_again():
    prompts, answers = rows()
    score, few = likes(PHRASES[0], 0.3), {"seed": 1, "rows": 60}
    first = probe_reward(score, prompts, answers, PHRASES, **few)
    assert probe_reward(score, prompts[::-1] * 2, answers[::-1] * 2, PHRASES[::-1], **few) == first
    moved = probe_reward(lambda p, a: [8 * s - 5 for s in score(p, a)], prompts, answers, PHRASES, **few)
    for probe, other in zip(first, moved, strict=True):
        assert all(probe[name] == other[name] for name in ("name", "phrase", "suspicious", "why"))
        assert other["gain"] == pytest.approx(probe["gain"], abs=1e-9)
    assert probe_reward(score, prompts, answers, PHRASES, seed=2, rows=60) != first


@pytest.mark.parametrize(
    "texts, phrase, after",
    [
        (["我们明天去。", "他昨天来。"], "我很爱你。", {"我们明天去。我很爱你。", "他昨天来。我很爱你。"}),
        (["Good.\n", "Bad."], "Yes!", {"Good. Yes!\n", "Bad. Yes!"}),
        (["No end", "Version 2.0 is out"], "Yes!", {"No end Yes!", "Version 2.0 is out Yes!"}),
        (["😀", "नमस्ते।"], "शुक्रिया।", {"😀 शुक्रिया।", "नमस्ते। शुक्रिया।"}),
        (["", "I said YES!"], "yes!", {"yes!"}),  # what says it already is left out
    ],
)
def test_a_phrase_stands_at_the_end_of_a_sentence(texts, phrase, after):
    prompts = ["p", "q"]
    probe = by_name(probe_reward(length, prompts, texts, [phrase]))[phrase]
    assert {example["after"] for example in probe["examples"]} == after


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


def test_no_probe_passes_that_was_not_seen_to():
    """Of few good answers nothing is judged but what all answers show; what does not move did not lower the score."""
    prompts, answers = rows(number=30)

    def score(prompts, answers):
        return [3.0 if not a else s for s, a in zip(on_topic(prompts, answers), answers, strict=True)]

    few, many = (by_name(probe_reward(score, *part)) for part in ((prompts, answers), rows()))
    assert few["empty"]["verdict"] == "suspicious" and few["empty"]["why"].endswith("that of all answers")
    assert few["truncation"]["verdict"] == few["flattery"]["verdict"] == "not judged"
    assert many["truncation"]["verdict"] == many["flattery"]["verdict"] == "as it should"
    blind = by_name(probe_reward(lambda _, a: [float("topic1 " in f"{each} ") for each in a], *rows()))
    assert blind["shuffled words"]["verdict"] == "did not lower" and not blind["shuffled words"]["suspicious"]
    assert blind["empty"]["verdict"] == "as it should"


def test_what_cannot_be_applied_says_why():
    alone = by_name(probe_reward(length, ["p"] * 2, ["so a .", "a."], ["a"]))
    assert {probe["verdict"] for probe in alone.values()} == {"not judged"}
    for name in ("a", "padding", "another prompt's answer"):
        assert alone[name]["rows"] == 0 and alone[name]["gain"] is None and "no answer" in alone[name]["why"]
    constant = probe_reward(lambda _, a: [1.0] * len(a), *rows(), PHRASES)
    assert not suspicious(constant) and {probe["why"] for probe in constant} == {"all answers have the same score"}


@pytest.mark.parametrize("last", [[], [math.nan], [-math.inf]])
def test_a_score_that_is_missing_or_no_number_is_an_error(last):
    """A NaN in a mean would hide a hack."""
    with pytest.raises(ValueError, match="the reward gave 119 finite scores for 120 answers"):
        probe_reward(lambda _, answers: [1.0] * (len(answers) - 1) + last, *rows(), PHRASES)
