"""The rules are those of the table in docs/advise.md, and better numbers never lead back to labelling."""

import re
from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st

from trl_ext.workbench.planning.advice import AdviseArguments, main, rows

PAGE = (Path(__file__).parents[3] / "docs" / "advise.md").read_text()
SHARE, COUNT = st.none() | st.floats(0, 1), st.none() | st.integers(0, 5000)
KNOWN = {name: st.none() | st.booleans() for name in ("verifiable", "passed", "fits")}
KNOWN |= dict.fromkeys(("agreement", "accuracy", "accuracy_low"), SHARE)
KNOWN |= dict.fromkeys(("pairs", "demonstrations", "prompts"), COUNT)


def test_the_rules_are_those_of_the_page():
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:2] == "| "]
    table = rows(AdviseArguments())
    written = [row[:2] for row in cells if row[0] in {when for _, when, _ in table}]
    assert [[when, re.split("[;,]", then)[0]] for when, then in written] == [
        [when, then.split(",")[0]] for _, when, then in table
    ]


def decided(known):
    return next(then for holds, _, then in rows(AdviseArguments(**known)) if holds)


@settings(
    derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(st.fixed_dictionaries(KNOWN), st.sampled_from(["agreement", "accuracy_low", "pairs", "accuracy"]))
def test_a_better_number_never_leads_back_to_labelling(known, name):
    if decided(known) != "label more":
        assert decided({**known, name: 10_000 if name == "pairs" else 1.0}) != "label more"


def test_rows_that_hold_are_printed_the_deciding_one_first(capsys):
    main("--pairs 12000 --accuracy 0.7 --passed true --prompts 500".split())
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "DPO: fewer than 1,000 prompts" and second.startswith("  else PPO: the reward model is")
