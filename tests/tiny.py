"""Tiny models and tokenizers built from config, for tests: nothing is downloaded."""

import functools
import inspect

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from trl_ext import PPOConfig, PPOTrainer

WORDS = "the a cat dog bird sat ran flew on under over mat log sky and then it was very happy sad big small".split()
ON_CPU = {  # arguments of any trainer: fp32, quiet
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% if not (loop.last and continue_final_message) %} </s>"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(words=WORDS, bos=False, pad=True):
    """A word-level tokenizer; `pad=False` leaves the pad token unset."""
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>", *words])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(vocab_size=None, seed=0, **kwargs):
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": vocab_size or len(tiny_tokenizer()),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,
        }
        | kwargs
    )
    return LlamaForCausalLM(config)


def tiny_gpt2(vocab_size=None, seed=0, **kwargs):
    torch.manual_seed(seed)
    config = GPT2Config(
        **{
            "vocab_size": vocab_size or len(tiny_tokenizer()),
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,
        }
        | kwargs
    )
    return GPT2LMHeadModel(config)


def tiny_reward_model(like, seed=1):
    """A sequence classifier with the shape of `like` and other weights."""
    torch.manual_seed(seed)
    config = type(like.config)(**{**like.config.to_dict(), "num_labels": 1})
    return AutoModelForSequenceClassification.from_config(config)


@functools.cache
def prompts(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (n,), generator=generator).tolist()
    rows = [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (m,), generator=generator)) for m in lengths]
    return Dataset.from_dict({"prompt": rows, "topic": [f"topic {i % 3}" for i in range(n)]})


def length_reward(completions, **kwargs):
    return [float(len(text.split())) for text in completions]


def tiny_config(output_dir, **kwargs):
    """fp32 on CPU, quiet, no record, rollouts of 8 in two minibatches, two PPO epochs, a constant learning rate."""
    return PPOConfig(
        output_dir=str(output_dir),
        **{
            **ON_CPU,
            "activation_checkpointing": False,
            "record_run": False,
            "per_device_train_batch_size": 4,
            "num_mini_batches": 2,
            "num_ppo_epochs": 2,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "step_kl_target": 0.0,
            "max_steps": 4,
        }
        | kwargs,
    )


def tiny_ppo(folder, model=None, reward_funcs=length_reward, cls=PPOTrainer, **given):
    """Build a trainer on 16 prompts; other keywords than `PPOTrainer`'s arguments are fields of `PPOConfig`."""
    taken = inspect.signature(PPOTrainer.__init__).parameters
    arguments = {"train_dataset": prompts(), "processing_class": tiny_tokenizer()}
    arguments |= {name: given.pop(name) for name in [*given] if name in taken}
    return cls(tiny_llama() if model is None else model, reward_funcs, tiny_config(folder, **given), **arguments)


def assert_each_changes(changed, trained, subtests):
    """Train with another value of each field in `{name: (value, other settings)}`: the weights must differ."""
    known: dict[str, torch.Tensor] = {}
    for name, (value, needed) in changed.items():
        with subtests.test(name=name):
            key = str(sorted(needed.items()))
            if key not in known:
                known[key] = trained(**needed)
            assert not torch.equal(trained(**{**needed, name: value}), known[key])
    assert torch.equal(trained(), known["[]"])  # else the test shows nothing
