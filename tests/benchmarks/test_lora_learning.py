"""Each variant of the benchmark changes what is trained; one that did nothing would compare a run with itself."""

import sys
from pathlib import Path

import pytest
import torch

from tests.ppo.worker import lora_trainer, make_trainer
from trl_ext.models.adapter_switch import CRITIC, POLICY


@pytest.fixture
def varied(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import lora_learning

    yield lora_learning.varied
    sys.modules.pop("lora_learning")


def trained(trainer):
    """The names of the parameters that two steps change."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    return {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}


@pytest.mark.slow
def test_variants_train_what_they_say(varied, tmp_path):
    settings = {"max_steps": 2, "learning_rate": 1e-2}
    for variant in ("", "frozen LM head"):
        with varied(variant):
            names = trained(make_trainer(tmp_path / f"full {variant}", **settings))
        assert any("lm_head" in name for name in names) == (not variant), variant
    for variant in ("", "joint adapter"):
        with varied(variant):
            trainer = lora_trainer(tmp_path / f"lora {variant}", **settings)
        assert trainer.model.critic.name == (POLICY if variant else CRITIC)
        names = trained(trainer)
        assert any(CRITIC in name.split(".") and "lora" in name for name in names) == (not variant), variant
        assert any(POLICY in name.split(".") for name in names)
