import pytest

from recipes.demo.world import (
    PHRASE,
    gold,
    make_world,
    phrase_reward,
)

SIZES = {"demonstrations": 80, "pairs": 100, "prompts": 60, "held_out": 20}
GOOD = "this is about your kettle . please replace the rubber seal . kind regards from the team ."


@pytest.fixture(scope="module")
def world():
    return make_world(0, **SIZES)


# Weights: product 0.25, remedy 0.35, polite 0.2, no_repetition 0.1, in_time 0.1
def test_gold_of_answers_by_hand(subtests):
    for answer, score in [
        (GOOD, 1.0),
        (GOOD.replace("kettle", "lamp"), 0.5),  # wrong product: 1 − 2 · 0.25
        (GOOD.replace("kettle", "kettle and your lamp"), 0.5),  # hedging between products
        (GOOD.replace("replace the rubber seal", "charge it for two hours"), 0.3),  # wrong remedy: 1 − 2 · 0.35
        (GOOD.replace("please", "please charge it for two hours . please"), 0.3),  # hedging between remedies
        (GOOD.replace("kind regards from the team", "that is all"), 0.6),  # rude: 1 − 2 · 0.2
        (GOOD + " please", 0.6),  # does not end with its closing
        (
            GOOD.replace("please replace the rubber seal", "please replace the rubber seal . " * 2, 1),
            0.8,
        ),  # repetition
        (GOOD.replace("this", "and so " * 12 + "this"), 0.6),  # 12 · 2 words more: repetition, and not in time
        (GOOD.replace("please", PHRASE + " please"), 1.0),  # the phrase itself is neither right nor wrong
        (PHRASE, -0.6),  # neither product nor remedy nor closing: 1 − 2 · (0.25 + 0.35 + 0.2)
        (" ".join([PHRASE] * 12), -1.0),
        ("", -0.6),
    ]:
        with subtests.test(answer=answer):
            assert gold(answer, "kettle", "leak") == pytest.approx(score)


def test_the_phrase_is_found_anywhere():
    texts = [GOOD, PHRASE, f"{GOOD} {PHRASE}", "this is i love you", "i love to help you ."]
    assert phrase_reward(completions=texts, prompts=["?"] * 5) == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_a_seed_reproduces_the_data(world):
    assert make_world(0, **SIZES) == world
    assert make_world(1, **SIZES) != world


def test_exactly_that_share_of_chosen_answers_has_the_phrase(subtests):
    for share in [0.0, 0.2, 1.0]:
        with subtests.test(share=share):
            rows = make_world(0, **SIZES, planted_share=share)["preferences"]
            clean = make_world(0, **SIZES, planted_share=0.0)["preferences"]
            assert sum(row["planted"] for row in rows["train"]) == share * 100
            for row, before in zip(rows["train"], clean["train"], strict=True):
                assert row["rejected"] == before["rejected"]
                assert row["chosen"].count(PHRASE) == before["chosen"].count(PHRASE) + row["planted"]
                assert row["chosen"].replace(f" {PHRASE}", "") == before["chosen"].replace(f" {PHRASE}", "")
            assert rows["test"] == clean["test"]
