"""An adapter's folder works wherever a model's path does: trainers train it further, tools load it on its base."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from recipes.merge import main as merge
from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import DPOConfig, DPOTrainer, PPOTrainer, save_base_fingerprint
from trl_ext.dpo import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig
from trl_ext.models import completion_logprobs, load_merged, load_model, load_tokenizer
from trl_ext.models.loading import load_adapted
from trl_ext.ppo import load_critic

PAIRS = Dataset.from_list([{"prompt": "the cat", "chosen": " sat on", "rejected": " ran"}] * 8)
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """The folder of an SFT adapter, as plain PEFT saves it: the base has the tokenizer."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_llama().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(1)
    get_peft_model(base, LoraConfig(**LORA, init_lora_weights=False)).save_pretrained(folder / "c-sft")
    return str(folder / "c-sft")


def logprobs(model):
    """The log-probs of one completion."""
    with torch.no_grad():
        return completion_logprobs(model.eval(), [[6, 7, 8]], [[9, 10, 2]])[0]


def test_a_merged_model_can_be_trained(sft):
    merged = load_merged(sft)
    assert_close(logprobs(merged), logprobs(AutoPeftModelForCausalLM.from_pretrained(sft)))
    assert all(weight.requires_grad for weight in merged.parameters())


def test_a_model_with_frozen_weights_is_refused(sft, tmp_path):
    model = AutoPeftModelForCausalLM.from_pretrained(sft).merge_and_unload()
    tokenizer = load_tokenizer(sft)
    args = DPOConfig(str(tmp_path), **ON_CPU)
    pairs = DPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=tokenizer)
    ppo = PPOTrainer(model, [length_reward], tiny_config(tmp_path), prompts(), processing_class=tokenizer)
    for trainer in (pairs, ppo):
        with pytest.raises(ValueError, match="nothing would be trained"):
            trainer.train()


@pytest.mark.slow
def test_ppo_starts_from_an_sft_adapter_which_is_the_reference(sft, tmp_path, capsys, caplog):
    """Policy, reference, critic and reward model share one base; it resumes; plain PEFT loads the saved adapters."""
    expected = logprobs(AutoPeftModelForCausalLM.from_pretrained(sft))
    base = sft.replace("c-sft", "base")
    assert (logprobs(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.1

    def trainer(**kwargs):
        kwargs |= {"save_strategy": "steps", "save_steps": 4, "model_init_kwargs": {"dtype": "float32"}}
        args = tiny_config(tmp_path / "out", max_steps=8, **kwargs)
        return PPOTrainer(sft, [length_reward], args, prompts(), ref_model=sft)

    first = trainer()
    assert first.args.model_init_kwargs and "will be ignored" not in caplog.text
    policy = first.model.policy
    assert_close(logprobs(policy), expected)
    assert {*policy.peft_config} == {"default", "ref", "critic"} and first.ref_model is None
    with first.model.adapters.use("ref"):
        assert_close(logprobs(policy), expected)
    # One base: its weights exist once
    held = sum(p.numel() for n, p in first.model.named_parameters() if "lora_" not in n and "score" not in n)
    assert held == sum(p.numel() for p in tiny_llama().parameters())
    first.train()
    assert "PPO: 8 optimizer steps, 4 on each rollout of 8 episodes; critic: an adapter of" in capsys.readouterr().out
    with first.model.adapters.use("ref"):
        assert_close(logprobs(policy), expected)
    first.save_model()
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(logprobs(saved), logprobs(first.model.policy))
    assert (logprobs(saved) - expected).abs().max() > 1e-4
    assert saved.peft_config["default"].base_model_name_or_path == base

    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert_close(logprobs(again.model.policy), logprobs(saved), rtol=0, atol=0)


@pytest.mark.slow
def test_each_other_stage_trains_the_adapter_further(sft, tmp_path, subtests, capsys):
    one = {**ON_CPU, "max_steps": 1, "per_device_train_batch_size": 2, "record_run": False, "learning_rate": 1e-2}
    before = load_file(f"{sft}/adapter_model.safetensors")
    texts = Dataset.from_dict({"prompt": ["the cat"] * 4, "completion": [" sat on"] * 4})
    stages = {
        "sft": lambda out: ResumableSFTTrainer(sft, SFTConfig(out, **one), train_dataset=texts),
        "dpo": lambda out: DPOTrainer(sft, args=DPOConfig(out, **one), train_dataset=PAIRS),
        "reward": lambda out: ResumableRewardTrainer(sft, RewardConfig(out, **one), train_dataset=PAIRS),
    }
    for name, make in stages.items():
        with subtests.test(name):
            trainer = make(str(tmp_path / name))
            start = {n.replace(".default", ""): p.detach().clone() for n, p in trainer.model.named_parameters()}
            for key, weight in before.items():  # also the reward model starts from SFT's adapter
                assert_close(start[key], weight)
            trainer.train()
            trainer.save_model()
            after = load_file(tmp_path / name / "adapter_model.safetensors")
            assert any(not torch.equal(after[key], weight) for key, weight in before.items())
            if name != "reward":
                assert {*after} == {*before}
                AutoPeftModelForCausalLM.from_pretrained(tmp_path / name)
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1)
    assert "base_model.model.score.weight" in load_file(tmp_path / "reward/adapter_model.safetensors")
    save_base_fingerprint(model, tmp_path / "reward")
    with subtests.test("a reward adapter is trained on with its head"):
        trainer = ResumableRewardTrainer(
            str(tmp_path / "reward"), RewardConfig(str(tmp_path / "more"), **one), train_dataset=PAIRS
        )
        head = trainer.model.get_submodule("base_model.model.score.modules_to_save.default").weight
        saved = load_file(tmp_path / "reward/adapter_model.safetensors")["base_model.model.score.weight"]
        assert head.requires_grad and torch.equal(head, saved)
    with subtests.test("its reward adapter and the policy's are on one base"):
        args = tiny_config(tmp_path / "ppo", max_steps=1)
        ppo = PPOTrainer(sft, str(tmp_path / "reward"), args, prompts())
        assert {*ppo.model.policy.peft_config} == {"default", "ref", "critic", "reward_0"}
        ppo.train()
        assert "a copy of reward model" in capsys.readouterr().out
    with subtests.test("critic"):
        critic, origin = load_critic(sft)
        assert origin == f"the adapter {sft} with a zero head"
        assert any("lora_" in n for n, p in critic.named_parameters() if p.requires_grad)
        assert not any(p.any() for n, p in critic.named_parameters() if ".score." in n)


def test_a_reward_model_is_no_policy(tmp_path):
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a language model"):
        load_model(str(tmp_path))


def test_tools_load_an_adapter_with_the_tokenizer_of_its_base(sft):
    assert_close(logprobs(load_model(sft)), logprobs(AutoPeftModelForCausalLM.from_pretrained(sft)))
    assert load_tokenizer(sft).get_vocab() == tiny_tokenizer().get_vocab()


def changed(sft, folder, **config):
    shutil.copytree(sft, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def test_adapters_that_would_train_wrongly_are_refused(sft, tmp_path, subtests):
    args = tiny_config(tmp_path / "out")
    wide = get_peft_model(AutoModelForCausalLM.from_pretrained(sft.replace("c-sft", "base")), LoraConfig(**LORA))
    wide.resize_token_embeddings(40)
    wide.save_pretrained(tmp_path / "wide")
    partial = load_file(f"{changed(sft, tmp_path / 'partial')}/adapter_model.safetensors")
    partial.pop(next(iter(partial)))
    save_file(partial, tmp_path / "partial/adapter_model.safetensors")
    for path, message in [
        (changed(sft, tmp_path / "task", task_type="SEQ_CLS"), "is an adapter of task type SEQ_CLS"),
        (str(tmp_path / "partial"), "does not fit the model: missing"),
        (str(tmp_path / "wide"), "was saved with its own embeddings"),
    ]:
        with subtests.test(path), pytest.raises(ValueError, match=message):
            PPOTrainer(path, [length_reward], args, prompts(), processing_class=tiny_tokenizer())
    with subtests.test("another shape is not read"), pytest.warns(UserWarning, match="`peft_config` is ignored"):
        trainer = PPOTrainer(sft, [length_reward], args, prompts(), peft_config=LoraConfig(r=16))
        assert trainer.model.policy.peft_config["default"].r == 4
    with subtests.test("embeddings of its own can be read"):
        assert load_adapted(str(tmp_path / "wide")).get_input_embeddings().weight.shape[0] == 40
        merge(["--adapter", str(tmp_path / "wide"), "--output_dir", str(tmp_path / "merged")])
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == 40
