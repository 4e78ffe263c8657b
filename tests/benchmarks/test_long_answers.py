"""The benchmark of long answers measures each kind of arm."""

import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_measures_a_token_of_each_side(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import long_answers

    arms = ("PPO, LoRA", "PPO, a critic of one layer", "GRPO")
    found = {arm: {length: long_answers.measured(arm, length) for length in (4, 8)} for arm in arms}
    assert all(cell["seconds"] > 0 for cells in found.values() for cell in cells.values())
    rows = long_answers.table(found).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {arm}" for arm in arms]
    sys.modules.pop("long_answers")
