"""A chat template whose turns do not end by EOS is reported, a pad token without an embedding is refused."""

import warnings

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tests.tiny import ON_CPU, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext.dpo import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig
from trl_ext.ppo import CriticConfig, CriticTrainer

USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}


def chat_tokenizer(end):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<im_end>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("</s>", end)
    return tokenizer


def sft(folder, tokenizer, rows, **settings):
    args = SFTConfig(str(folder), **{"max_length": 32, "max_steps": 1, **ON_CPU, **settings})
    model = tiny_llama(vocab_size=len(tokenizer) + 2)
    return ResumableSFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def ppo(folder, tokenizer, rows, **settings):
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    model = tiny_llama(vocab_size=len(tokenizer) + 2)
    return tiny_ppo(folder, model, train_dataset=prompts, processing_class=tokenizer, **settings)


@pytest.mark.parametrize("build, fixed", [(sft, {"eos_token": "<im_end>"}), (ppo, {"stop_token_id": None})])
def test_a_turn_end_other_than_eos_is_reported_with_the_setting(build, fixed, tmp_path):
    chat = [{"prompt": [USER], "completion": [ANSWER]}] * 16
    with pytest.warns(UserWarning, match="ends the assistant's turn by '<im_end>'") as said:
        build(tmp_path, chat_tokenizer("<im_end>"), chat)
    end = chat_tokenizer("<im_end>").convert_tokens_to_ids("<im_end>")
    setting = f"stop_token_id: {end}" if build is ppo else "eos_token: '<im_end>'"
    assert any(f"Set `{setting}`" in str(each.message) for each in said)
    fixed = {"stop_token_id": end} if build is ppo else fixed
    text = [{"prompt": "the cat", "completion": " a dog"}] * 16
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The chat template ends")
        build(tmp_path, chat_tokenizer("<im_end>"), chat, **fixed)
        build(tmp_path, chat_tokenizer("</s>"), chat)
        build(tmp_path, chat_tokenizer("<im_end>"), text)


def test_a_critic_that_could_not_be_loaded_again_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    args = CriticConfig(str(tmp_path), **ON_CPU)
    rows = Dataset.from_list([{"prompt_ids": [5], "completion_ids": [6], "returns": [1.0]}] * 2)
    with pytest.raises(ValueError, match=r"'\[PAD\]' has the id"):
        CriticTrainer(tiny_reward_model(tiny_llama()), args, rows, processing_class=tokenizer)


@pytest.mark.parametrize("lacking", ["policy", "reward model"])
def test_ppo_refuses_a_pad_token_without_an_embedding(lacking, tmp_path):
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy, reward = tiny_llama(vocab_size=len(tokenizer)), tiny_reward_model(tiny_llama())
    given = {"model": policy, "reward_funcs": reward} if lacking == "reward model" else {"model": tiny_llama()}
    with pytest.raises(ValueError, match=r"'\[PAD\]' has the id"):
        tiny_ppo(tmp_path, **given, processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_another_pad_token_replaces_one_without_an_embedding(kind, tmp_path):
    row = {"prompt": "the cat", "completion": " a dog"} if kind == "sft" else {"chosen": "the cat", "rejected": " a"}
    rows = Dataset.from_list([row] * 8)

    def build(**settings):
        tokenizer, model = tiny_tokenizer(pad=False), tiny_llama()
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        settings = {"max_steps": 1, "record_run": False, **ON_CPU, **settings}
        if kind == "sft":
            args, trainer = SFTConfig(str(tmp_path), **settings), ResumableSFTTrainer
        else:
            args, trainer, model = (
                RewardConfig(str(tmp_path), **settings),
                ResumableRewardTrainer,
                tiny_reward_model(model),
            )
        return trainer(model, args, train_dataset=rows, processing_class=tokenizer)

    with pytest.raises(ValueError, match=r"'\[PAD\]' has the id"):
        build()
    trainer = build(pad_token="</s>")
    trainer.train()
    trainer.save_model()
    type(trainer.model).from_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "</s>"
