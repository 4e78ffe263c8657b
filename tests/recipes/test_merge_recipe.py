import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

from recipes.merge import main
from tests.recipes.small_runs import refusal
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer


def save_base(model, folder):
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, max_new_tokens=7)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def train(folder, base, **kwargs):
    """A PPO run with adapters, at a learning rate that changes them a lot."""
    config = tiny_config(folder, learning_rate=0.05, critic_learning_rate=0.05, **kwargs.pop("config", {}))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = PPOTrainer(base, length_reward, config, prompts(), peft_config=lora, **kwargs)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    base = save_base(tiny_llama(pad_token_id=None), folder / "base")
    return folder, base, train(folder / "adapter", base).model.eval()


def batch():
    """Two right-padded rows."""
    input_ids = torch.randint(6, 24, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[1, 5:] = 0
    return {"input_ids": input_ids * mask, "attention_mask": mask}


def merge(adapter, output_dir, *more):
    main(["--adapter", str(adapter), "--output_dir", str(output_dir), *more])


@pytest.mark.slow
@torch.no_grad()
def test_plain_transformers_loads_the_trained_policy(run, tmp_path, capsys):
    folder, base, trained = run
    merge(folder / "adapter", tmp_path / "merged")
    said, onwards = capsys.readouterr().out.splitlines()
    assert float(said.rsplit(" ", 1)[1]) <= 1e-4 and onwards.startswith("next: trl-ext generate --model_name_or_path ")
    merged, plain = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (tmp_path / "merged", base))
    mask = batch()["attention_mask"].bool()
    logits, expected = merged(**batch()).logits[mask], trained(**batch()).logits[mask]
    assert_close(logits, expected, atol=1e-4, rtol=0)
    assert (logits - plain(**batch()).logits[mask]).abs().max() > 0.1
    assert merged.state_dict().keys() == plain.state_dict().keys()  # no file of the adapter or the critic
    assert merged.generation_config.to_dict() == plain.generation_config.to_dict()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab() and tokenizer.chat_template
    assert [path.name for path in (tmp_path / "merged").glob("*.safetensors")] == ["model.safetensors"]


@torch.no_grad()
def test_the_critic_becomes_a_sequence_classifier_that_reads_batches(run, tmp_path):
    folder, _, trained = run
    merge(folder / "adapter" / "critic", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    rows = [batch()["input_ids"][:1], batch()["input_ids"][1:, :5]]
    expected = torch.cat([trained.critic(row, torch.ones_like(row)) for row in rows])
    assert expected.abs().min() > 0.01
    assert_close(merged(**batch()).logits[:, 0], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_adapter_of_a_4_bit_base_is_merged_into_the_unquantised_one(tmp_path):
    base = save_base(tiny_llama(hidden_size=64, intermediate_size=64), tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    trained = train(tmp_path / "adapter", base, quantization_config=quantization).model.policy
    assert trained.get_base_model().is_loaded_in_4bit
    merge(tmp_path / "adapter", tmp_path / "merged")
    unquantised = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype == torch.float32 and not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        expected = unquantised(**batch()).logits
        assert_close(merged(**batch()).logits, expected, atol=1e-4, rtol=0)
        with unquantised.disable_adapter():
            assert (expected - unquantised(**batch()).logits).abs().max() > 0.1


def test_a_merged_model_with_other_outputs_raises(run, tmp_path, monkeypatch):
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self, **kwargs: self.unload(), raising=False)
    with pytest.raises(RuntimeError, match=r"by \d.*, but torch.float32 explains only .*: do not use .*_unfinished"):
        merge(run[0] / "adapter", tmp_path / "merged")


def test_a_merge_that_would_give_another_model_is_refused(subtests, run, tmp_path, capsys):
    adapter, base = run[0] / "adapter", run[1]
    PeftConfig.from_pretrained(adapter / "critic").save_pretrained(tmp_path / "headless")
    save_file(load_file(adapter / "adapter_model.safetensors"), tmp_path / "headless" / "adapter_model.safetensors")
    shallow = save_base(tiny_llama(num_hidden_layers=1), tmp_path / "other")
    for given, message in [
        ((adapter, base), f"`output_dir` {base} exists and is not empty: choose another"),
        ((tmp_path / "headless", tmp_path / "new"), "has no `score` head"),
        ((adapter, tmp_path / "new", "--base_model", shallow), f"{adapter} does not fit the base {shallow}: "),
    ]:
        with subtests.test(message=message):
            words = ["--adapter", given[0], "--output_dir", *given[1:]]
            assert message in refusal(capsys, main, words)
