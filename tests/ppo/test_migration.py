"""Prompts as token ids, tokens without rows, and what TRL 1.12's own tests of PPO ask for."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.ppo.worker import rows_of
from tests.tiny import (
    WORDS,
    length_reward,
    prompts,
    tiny_config,
    tiny_gpt2,
    tiny_llama,
    tiny_reward_model,
    tiny_tokenizer,
)
from trl_ext import PPOConfig, PPOTrainer


def tokenised(tokenizer, n=16, padded_to=None, seed=0):
    """What TRL 1.12's example script made of its dataset: `input_ids`, here also padded on the left."""
    rows = [tokenizer(text) for text in prompts(n, seed)["prompt"]]
    if padded_to:
        rows = [tokenizer.pad(row, padding="max_length", max_length=padded_to) for row in rows]
    columns = ["input_ids", "attention_mask"] if padded_to else ["input_ids"]
    return Dataset.from_list([{name: row[name] for name in columns} for row in rows])


def rollout_prompts(trainer):
    """The prompt tokens of the trainer's rollout, without padding, as the policy read them."""
    ids, mask = rows_of(trainer)["prompt_ids"], rows_of(trainer)["prompt_mask"].bool()
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


def test_input_ids_become_the_prompt_tokens_verbatim(tmp_path):
    """No text in between: a second BOS, lost special tokens or another split into tokens would all show."""
    tokenizer = tiny_tokenizer(bos=True)
    rows = [[1, 6, 7, 2, 6], [8], [1, 1, 9, 3, 2], [4, 10, 11, 5], [1, 12], [2, 2], [13, 14, 15], [1, 16, 17]]
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=reward,
        args=tiny_config(tmp_path, max_steps=1, shuffle_dataset=False),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert rollout_prompts(trainer) == rows
    assert seen == tokenizer.batch_decode(rows, skip_special_tokens=True)  # reward functions read text


def test_stop_token_id_ends_responses(tmp_path):
    tokenizer, stop = tiny_tokenizer(), 9
    model = tiny_llama()
    model.lm_head.weight.data[stop] *= 4  # drawn often
    trainer = PPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=tiny_config(tmp_path, max_steps=1, stop_token_id=stop, missing_eos_score=-7.0, max_completion_length=20),
        train_dataset=prompts(),
        processing_class=tokenizer,
    )
    trainer.train()
    ids, mask = rows_of(trainer)["completion_ids"], rows_of(trainer)["completion_mask"].bool()
    ended = 0
    for row, real in zip(ids, mask, strict=True):
        tokens = row[real].tolist()
        assert not {stop, tokenizer.eos_token_id} & set(tokens[:-1])
        ended += tokens[-1] == stop
    assert ended >= 1
    log = trainer.state.log_history[0]
    assert log["val/num_eos_tokens"] >= ended  # it counts as an end
    assert log["completions/clipped_ratio"] == 1 - log["val/num_eos_tokens"] / 8


# ---- TRL 1.12's own tests of its PPOTrainer, with models built here ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peft", "pad_is_known"),
    [
        pytest.param(True, False, id="pad_added-peft"),
        pytest.param(False, True, id="pad_known-basic"),
        pytest.param(False, False, id="pad_added-basic", marks=pytest.mark.extra),
        pytest.param(True, True, id="pad_known-peft", marks=pytest.mark.extra),
    ],
)
def test_trl_112s_own_tests(tmp_path, peft, pad_is_known):
    """
    A pad token is added to the tokenizer, but no row to the model, rows are token ids that end by EOS, and a policy
    with an adapter stands beside a full value model. The policy has a row for each of 151,665 tokens, value and reward
    model have 152,064, the added pad token's included: Qwen2.5's numbers.
    """
    own, theirs = (len(tiny_tokenizer()),) * 2 if pad_is_known else (151_665, 152_064)
    words = [*WORDS, *(f"word{i}" for i in range(own - len(tiny_tokenizer())))]
    tokenizer = tiny_tokenizer(words, pad=pad_is_known)
    tokenizer.add_special_tokens({"pad_token": "<pad>" if pad_is_known else "[PAD]"})
    shape = {"pad_token_id": None, "hidden_size": 4, "num_attention_heads": 2}
    model = tiny_llama(own, **shape)
    assert pad_is_known or tokenizer.pad_token_id == model.config.vocab_size
    like = tiny_llama(theirs, **shape)
    value_model, reward_model = tiny_reward_model(like, seed=3), tiny_reward_model(like, seed=4)
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in prompts(17)["prompt"]]
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    datasets = {"train": Dataset.from_dict(columns), "test": Dataset.from_dict({k: v[:2] for k, v in columns.items()})}
    start = {
        "policy": {name: p.detach().clone() for name, p in model.named_parameters()},
        "critic": {name: p.detach().clone() for name, p in value_model.named_parameters()},
    }
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=2,
            num_ppo_epochs=2,
            report_to="none",
            max_completion_length=8,
            use_cpu=True,
            bf16=False,
            learning_rate=1e-4,
        ),
        processing_class=tokenizer,
        model=model,
        ref_model=None if peft else tiny_llama(own, **shape),
        reward_funcs=reward_model,
        value_model=value_model,
        train_dataset=datasets["train"],
        eval_dataset=datasets["test"],
        peft_config=LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM") if peft else None,
    )
    trainer.train()
    trainer.evaluate()
    critic = dict(trainer.model.critic.named_parameters())
    assert any(not torch.equal(critic[name], value) for name, value in start["critic"].items())
    policy = dict(trainer.model.policy.named_parameters())
    if peft:
        trained = [p for name, p in policy.items() if "lora" in name and p.requires_grad]
        assert trained and all(p.any() for p in trained)
    else:
        assert any(not torch.equal(policy[name], value) for name, value in start["policy"].items())

    # What is saved is a model that loads, and the tokenizer as it was passed
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == tokenizer.pad_token
    if not peft:
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic")


@pytest.mark.slow
def test_a_pad_token_out_of_the_vocabulary_changes_nothing(tmp_path):
    """Weights, scores and logs are those of a run that pads by a token of the vocabulary: pads are masked."""
    ends = []
    for pad in ("<unk>", "[PAD]"):
        tokenizer = tiny_tokenizer(pad=False)
        tokenizer.add_special_tokens({"pad_token": pad})
        model = tiny_gpt2(pad_token_id=None)
        trainer = PPOTrainer(
            model=model,
            reward_funcs=[tiny_reward_model(model, seed=4), length_reward],
            args=tiny_config(tmp_path / pad, local_rollout_forward_batch_size=3),
            train_dataset=prompts(),
            processing_class=tokenizer,
        )
        trainer.train()
        logs = [
            {k: v for k, v in log.items() if k.startswith(("objective", "rewards", "loss", "policy", "val"))}
            for log in trainer.state.log_history
        ]
        ends.append((trainer.model.state_dict(), logs))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)


def test_a_token_out_of_the_vocabulary_that_is_no_pad_token_raises(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match="the tokenizer has more: .*<tool>"):
        PPOTrainer(
            model=tiny_llama(),
            reward_funcs=length_reward,
            args=tiny_config(tmp_path),
            train_dataset=prompts(),
            processing_class=tokenizer,
        )
