"""Code in a checkpoint, as Python or in a pickle, is not executed."""

import json
import os

import pytest
import torch

from tests.tiny import prompts, tiny_config, tiny_gpt2, tiny_reward_model, tiny_tokenizer
from trl_ext import PPOTrainer


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def hostile(tmp_path):
    """A reward model with code, and a folder that exists once that code has run."""
    folder, trace = tmp_path / "reward", tmp_path / "trace"
    tiny_reward_model(tiny_gpt2()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder, trace


def train(folder, tmp_path):
    args = tiny_config(tmp_path / "out", max_steps=1)
    tokenizer = tiny_tokenizer()
    trainer = PPOTrainer(tiny_gpt2(), str(folder), args=args, train_dataset=prompts(), processing_class=tokenizer)
    trainer.train()


def test_python_beside_the_weights_is_not_executed(hostile, tmp_path):
    folder, trace = hostile
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(trace)!r})\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        classes = ("AutoConfig", "AutoModelForSequenceClassification") if name == "config.json" else ("AutoTokenizer",)
        config["auto_map"] = {each: "evil.Evil" if name == "config.json" else ["evil.Evil", None] for each in classes}
        (folder / name).write_text(json.dumps(config))
    train(folder, tmp_path)  # transformers' class of that name loads it
    assert not trace.exists()


def test_a_pickle_in_place_of_the_weights_is_not_executed(hostile, tmp_path):
    folder, trace = hostile
    (folder / "model.safetensors").unlink()
    torch.save({"score.weight": Evil(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        train(folder, tmp_path)
    assert not trace.exists()
    with pytest.raises(FileExistsError):  # the pickle does run code
        for _ in range(2):
            torch.load(folder / "pytorch_model.bin", weights_only=False)
