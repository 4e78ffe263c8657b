"""The reference is the initial policy, and does not change."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from tests.dpo.worker import DRIFT, logged, make_trainer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def test_a_model_built_in_memory_gets_a_frozen_copy(tmp_path):
    model = tiny_llama(seed=4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = make_trainer(tmp_path, model, **DRIFT)
    trainer.train()
    reference = dict(trainer.ref_model.named_parameters())
    assert_close(reference, before, rtol=0, atol=0, check_stride=False)
    assert not any(p.requires_grad for p in reference.values()) and not trainer.ref_model.training
    assert logged(trainer, "logps/drift")[0] == 0
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(("precompute", "options"), [(False, {}), (False, DRIFT), (True, DRIFT)])
def test_with_lora_the_reference_is_the_model_without_its_adapter(precompute, options, tmp_path):
    config = copy.deepcopy(LORA)
    given = copy.deepcopy(config)
    tiny_llama().save_pretrained(tmp_path / "model")  # else PEFT writes its name into the configuration
    trainer = make_trainer(
        tmp_path,
        str(tmp_path / "model"),
        trainer_kwargs={"peft_config": given},
        precompute_ref_log_probs=precompute,
        **options,
    )
    assert trainer.ref_model is None and given.to_dict() == config.to_dict()
    ids, base = torch.tensor([[5, 6, 7, 8]]), tiny_llama()
    trainer.train()
    with torch.no_grad(), trainer.model.disable_adapter():
        assert_close(trainer.model(input_ids=ids).logits, base(input_ids=ids).logits)
    with torch.no_grad():
        assert not torch.allclose(trainer.model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-4)
    for name, parameter in trainer.model.named_parameters():
        if "lora" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert_close(parameter.data, base.get_parameter(plain).data, rtol=0, atol=0)
