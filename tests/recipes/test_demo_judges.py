"""Judges whose errors are stated: what they say, and what the gate makes of them."""

import sys

import pytest

from recipes.demo import judges, world
from trl_ext.workbench.feedback.criteria import read_criteria
from trl_ext.workbench.feedback.judges import Question, ServedJudge

PROMPT = f"hello , my lamp gets too hot . it was a gift . {world.AGENT}"
GOOD = f"this is about your lamp . {world.PROBLEMS['hot'][1]} . have a very nice day ."
LONG = f"this is about your lamp . {world.PROBLEMS['hot'][1]} . {' '.join(world.FILLERS)} that is all ."


def test_a_judge_says_what_gold_says_but_for_its_biases(tmp_path):
    judges.make(tmp_path, [], pairs=3, known=1, seed=0)
    criteria = read_criteria(str(tmp_path / "rubric.yaml"), str(tmp_path / "constitution.yaml"))
    judge = ServedJudge(criteria, url="http://127.0.0.1:1/v1", model="m")
    messages = judge.asked(Question("k", PROMPT, (LONG, GOOD), "a", 0))
    said = judges.verdicts(messages)
    assert said == {**dict.fromkeys(judges.PRINCIPLES, "tie"), "polite": "B", "in_time": "B", "overall": "B"}
    assert judges.verdicts(messages, length=0.2)["overall"] == "A" == judges.verdicts(messages, position=1)["polite"]
    assert {*judges.verdicts(messages, error=1).values()} == {"A", "tie"}
    warm = world.OPENINGS["warm"][0].format(product="lamp")
    messages = judge.asked(Question("k", PROMPT, (LONG.replace("this is about your lamp .", warm), GOOD), "a", 0))
    assert [judges.verdicts(messages, sycophancy=gold)["overall"] for gold in (0, 1)] == ["B", "A"]


@pytest.mark.slow
def test_the_table_says_who_is_refused(tmp_path, monkeypatch, capsys):
    kept = ("right", "error 25 %")
    monkeypatch.setattr(judges, "JUDGES", {name: judges.JUDGES[name] for name in kept})
    given = ["--output_dir", str(tmp_path / "out"), "--pairs", "80", "--known", "60"]
    monkeypatch.setattr(sys, "argv", ["judges", *given])
    judges.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(kept)
    assert rows[0][5:7] == ["20", "100.0%"] and rows[1][5:] == ["refused", "–", "–"]
