"""The benchmark of agents plays the same episodes on both sides."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.slow
def test_both_sides_play_the_same_episodes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import agents

    given = {"size": "tiny", "vocabulary": 300, "batch": 4, "mini_batches": 2, "response": 512, "rollouts": 2}
    ours, grpo = (agents.run(SimpleNamespace(side=side, lora=False, **given)) for side in agents.SIDES)
    assert ours["calls"] == grpo["calls"] > 1 and ours["length"] == grpo["length"]
    assert ours["failures"] == grpo["failures"] == 0 and ours["reward"] == grpo["reward"] == 1
    sys.modules.pop("agents")
