"""The number of optimizer steps, computed before training."""

import pytest
from datasets import Dataset

from tests.tiny import ON_CPU, tiny_llama, tiny_tokenizer
from trl_ext.dpo import ResumableSFTTrainer, SFTConfig


def make(folder, rows=13, **kwargs):
    text = {"text": ["the cat sat"] * rows}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "record_run": False}
    return ResumableSFTTrainer(
        tiny_llama(),
        args=SFTConfig(str(folder), **ON_CPU | sizes | kwargs),
        train_dataset=Dataset.from_dict(text),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "epochs", "steps"), [(13, 1.5, 6), (1, 1.0, 1), (16, 0.3, 2)])
def test_the_number_of_steps_is_that_of_the_training(tmp_path, rows, epochs, steps):
    check_steps(make(tmp_path, rows, num_train_epochs=epochs), steps)


@pytest.mark.slow
def test_steps_with_dataloader_drop_last(tmp_path):
    check_steps(make(tmp_path, 9, num_train_epochs=1, dataloader_drop_last=True), 2)  # 4 micro-batches of 2; not 5


def check_steps(trainer, steps):
    assert trainer._steps() == steps
    trainer.train()
    assert trainer.state.max_steps == trainer.state.global_step == steps
