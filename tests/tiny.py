"""Tiny models, tokenizers and trainers for tests, built from config; scripted completions, and a run's state."""

import functools
import hashlib
import inspect
import math

import torch
from datasets import Dataset
from peft import LoraConfig
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
from trl_ext.ppo.rollout import joined

WORDS = "the a cat dog bird sat ran flew on under over mat log sky and then it was very happy sad big small".split()
ON_CPU = {  # arguments of any trainer: fp32, quiet
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
}
CLOCK = ("time/", "eps", "tokens_per_second", "step_time", "train_runtime", "train_samples_per", "train_steps_per")
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


def letters_reward(completions, **kwargs):
    return [len(set(text)) / 7 - 1 for text in completions]


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


def tiny_ppo(folder, model=None, reward_funcs=letters_reward, cls=PPOTrainer, rows=16, **given):
    """Build a trainer on `rows` prompts; other keywords than `PPOTrainer`'s arguments are fields of `PPOConfig`."""
    taken = inspect.signature(PPOTrainer.__init__).parameters
    arguments = {"train_dataset": prompts(rows), "processing_class": tiny_tokenizer()}
    arguments |= {name: given.pop(name) for name in [*given] if name in taken}
    return cls(tiny_llama() if model is None else model, reward_funcs, tiny_config(folder, **given), **arguments)


# ---- LoRA ----

# Actor and critic differ in rank, scaling and adapted layers; GPT-2's layers are Conv1D
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
CRITIC_LORA = {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]}
GPT2_LORA = {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
GPT2_CRITIC_LORA = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
BUILDERS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
CHECKPOINTING = {
    "off": {},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
}


def lora_configs(name="llama"):
    actor, critic = (LORA, CRITIC_LORA) if name == "llama" else (LORA | GPT2_LORA, CRITIC_LORA | GPT2_CRITIC_LORA)
    return LoraConfig(**actor), LoraConfig(**critic)


def tiny_lora_ppo(folder, name="llama", model=None, **given):
    actor, critic = lora_configs(name)
    model = BUILDERS[name]() if model is None else model
    return tiny_ppo(folder, model, **{"peft_config": actor, "critic_peft_config": critic} | given)


def randomize(model, seed=5, std=0.1):
    """Give trainable parameters random values: LoRA starts with a product of 0, the head with values of 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    return model


# ---- Scripted completions, and the state of a run ----


def scripted(trainer):
    """Complete each prompt by a fixed pseudo-random text of 1 to 8 tokens, in any process and batch."""
    vocabulary, longest = len(trainer.processing_class), trainer.max_completion_length

    def reply(ids):
        seed = int.from_bytes(hashlib.sha256(bytes(ids)).digest()[:4], "big")
        ids = torch.randint(6, vocabulary, (longest,), generator=torch.Generator().manual_seed(seed)).tolist()
        length = 1 + seed % longest
        return ids[: length - 1] + [trainer.processing_class.eos_token_id] if length < longest else ids

    trainer._generate_single_turn = lambda prompt_ids, *_: ([reply(ids) for ids in prompt_ids], None)
    return trainer


def skewed(trainer, spread=0.5, missing_on=None):
    """Script the completions, with another engine's log-probs: a uniform distribution plus a noise of each token."""
    scripted(trainer)
    reply = trainer._generate_single_turn

    def logprobs_of(ids):
        noise = torch.tensor([math.sin(97.0 * token + i) for i, token in enumerate(ids)])
        return spread * noise - math.log(len(trainer.processing_class))

    def generate(prompt_ids, *args):
        answers, _ = reply(prompt_ids)
        is_missing = trainer.accelerator.process_index == missing_on
        return answers, None if is_missing else [logprobs_of(ids).tolist() for ids in answers]

    trainer._generate_single_turn = generate
    return trainer


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def optimizer_state(trainer):
    return {
        f"{i}.{name}": torch.as_tensor(value).clone()
        for i, state in trainer.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def without_clock(logs):
    return {name: value for name, value in logs.items() if not name.startswith(CLOCK)}


def end_state(trainer):
    """The state that an interrupted run must end with, too; without times."""
    return {
        "weights": weights(trainer),
        "optimizer": optimizer_state(trainer),
        "kl_controller": trainer.kl_controller.state_dict(),
        "learning_rate_controller": trainer.learning_rate_controller.state_dict(),
        "reward_normalizer": trainer.reward_normalizer.state_dict(),
        "baseline_gate": trainer.baseline_gate.state_dict(),
        "episodes": trainer.metrics.episodes,
        "logs": [without_clock(logs) for logs in trainer.state.log_history],
    }


def rows_of(trainer):
    """The rows that are trained on, in the order of generation."""
    return joined(trainer._buffered_inputs)


def collected(trainer):
    """Return a list to which the trainer adds each `Rollout` that it collects for training."""
    seen, observe = [], trainer.metrics.add_rollout

    def watch(rollout, *args):
        seen.append(rollout)
        observe(rollout, *args)

    trainer.metrics.add_rollout = watch
    return seen


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
