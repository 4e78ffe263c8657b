"""The rules are the table of docs/advise.md, and better numbers never send from training back to labelling."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trl_ext.workbench.planning.advice import RULES, AdviseArguments, advise, main

PAGE = (Path(__file__).parents[3] / "docs" / "advise.md").read_text()
SHARE, COUNT = st.none() | st.floats(0, 1), st.none() | st.integers(0, 5000)
KNOWN = {name: st.none() | st.booleans() for name in ("verifiable", "passed", "fits")}
KNOWN |= dict.fromkeys(("agreement", "accuracy", "accuracy_low"), SHARE)
KNOWN |= dict.fromkeys(("pairs", "demonstrations", "prompts"), COUNT)


def test_the_rules_are_those_of_the_page():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:2] == "| "]
    table = [row for row in rows if row[0] in {rule.when for rule in RULES}]
    assert [row[0] for row in table] == [rule.when for rule in RULES]
    for (_, then, _), rule in zip(table, RULES, strict=True):
        assert re.split("[;,]", then)[0] == rule.method.split(",")[0]


@given(st.fixed_dictionaries(KNOWN), st.sampled_from(["agreement", "accuracy_low", "pairs", "accuracy"]))
def test_a_better_number_never_sends_back_to_labelling(known, name):
    better = {**known, name: 10_000 if name == "pairs" else 1.0}
    if advise(AdviseArguments(**known))[0].method != "label more":
        assert advise(AdviseArguments(**better))[0].method != "label more"


def test_it_prints_what_holds_the_deciding_row_first(capsys):
    main(["--pairs", "12000", "--accuracy", "0.7", "--passed", "true", "--prompts", "500"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("DPO: fewer than 1,000 prompts") and second.startswith("  else PPO: the reward model is")
