"""
The work that ppo.py measures: models, prompts, lengths, and the trainers of both sides.

It runs in the environment of TRL 1.12, too, and imports nothing there but what that has.
"""

import math

from memory import LORA, SHAPES as MEMORY_SHAPES, tokenizer

PAD, BOS, EOS = range(3)
SHAPES = {
    **MEMORY_SHAPES,
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8},
}
# vocabulary, prompt, response, episodes of a rollout, minibatches, PPO epochs
WORK = {
    "tiny": (500, 8, 8, 4, 2, 2),
    "small": (32_000, 32, 48, 16, 2, 2),
    "medium": (151_936, 32, 32, 8, 2, 2),
    "0.5B": (151_936, 256, 256, 64, 8, 2),
    "1.5B": (151_936, 256, 256, 64, 8, 2),
}
REWARD = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
LEARNING_RATE, KL_COEF = 1e-4, 0.05


# ---- Models and data ----


def build(settings, shape, is_classifier=False, seed=0):
    """A model with weights drawn anew; the same ones whoever asks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "qwen2" if settings.size.endswith("B") else "llama",
        vocab_size=settings.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        num_labels=1,
        **shape,
    )
    torch.manual_seed(seed)
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    return auto.from_config(config, dtype=getattr(torch, settings.dtype))


def prompts(settings, as_text):
    """In each rollout such prompts, in any order, that their `position_in_lengths` are spread evenly over [0, 1]."""
    import torch
    from datasets import Dataset

    generator, ids = torch.Generator().manual_seed(1), []
    for _ in range(settings.rollouts):
        drawn = torch.randint(4, settings.vocabulary, (200 * settings.batch, settings.prompt), generator=generator)
        wanted = torch.randperm(settings.batch, generator=generator) / (settings.batch - 1)
        ids += drawn[(position_in_lengths(drawn) - wanted[:, None]).abs().argmin(1)].tolist()
    if as_text:
        return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})
    return Dataset.from_dict({"input_ids": ids})


# ---- Lengths ----


def position_in_lengths(prompt_ids):
    """(B,) uniform numbers in [0, 1) that depend on the (B, P) prompts alone, so that they hold in any batch."""
    import torch

    weights = torch.arange(1, prompt_ids.size(1) + 1, device=prompt_ids.device) * 7919
    return (prompt_ids * weights).sum(1) % 10_007 / 10_007


def length_of(prompt_ids, longest):
    """(B,) tokens that the responses to (B, P) prompts have: longest · u², so that their mean is a third of it."""
    return (longest * position_in_lengths(prompt_ids).square()).round().clamp(1, longest).long()


def forced_lengths(settings, device):
    """The processor that ends each response at its length and nowhere else, and counts what was drawn."""
    import torch
    from transformers import LogitsProcessor

    class ForcedLengths(LogitsProcessor):
        def __init__(self):
            self.drawn = torch.zeros(settings.response + 1, dtype=torch.long, device=device)

        def __call__(self, input_ids, scores):
            position = input_ids.size(1) - settings.prompt
            lengths = torch.full_like(input_ids[:, 0], settings.response)
            scores[:, PAD] = -math.inf
            scores[:, EOS] = -math.inf
            if settings.varying:
                lengths = length_of(input_ids[:, : settings.prompt], settings.response)
                ends = (lengths == position + 1)[:, None]
                scores = scores.masked_fill(ends, -math.inf)
                scores[:, EOS] = torch.where(ends[:, 0], 0.0, -math.inf)
            self.drawn.scatter_add_(0, lengths, (lengths == position + 1).long())
            return scores

    return ForcedLengths()


def force(model, processor):
    """Have `generate` use the processor; return the settings it was called with, once it was."""
    generate, seen = model.generate, {}

    def forced(*args, logits_processor=(), **kwargs):
        config = kwargs["generation_config"]
        seen.update(
            do_sample=config.do_sample,
            temperature=round(config.temperature, 5),  # TRL 1.12 adds 1e-7
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
        )
        return generate(*args, logits_processor=[processor, *logits_processor], **kwargs)

    model.generate = forced
    return seen


# ---- Trainers: each is given the policy, and returns its trainer ----


def arguments(settings, folder, per_device):
    return {
        "output_dir": folder,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.0,  # TRL 1.12's PPO does not clip
        "use_cpu": settings.device == "cpu",
        "bf16": settings.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def lora(**changes):
    from peft import LoraConfig

    return LoraConfig(**{"task_type": "CAUSAL_LM", **LORA, **changes})


def ppo_arguments(settings):
    return {
        "total_episodes": settings.rollouts * settings.batch,
        "num_mini_batches": settings.mini_batches,
        "num_ppo_epochs": settings.epochs,
        "local_rollout_forward_batch_size": 64,
        "temperature": 1.0,
        "kl_coef": KL_COEF,
    }


def ours(settings, folder, policy):
    from trl_ext import PPOConfig, PPOTrainer

    per_device = settings.batch // settings.mini_batches // settings.processes
    args = PPOConfig(
        **arguments(settings, folder, per_device),
        **ppo_arguments(settings),
        max_completion_length=settings.response,
        logging_steps=settings.mini_batches * settings.epochs,  # once a rollout, as TRL 1.12 does
        shuffle_dataset=False,
        record_run=False,
        **settings.options,
    )
    return PPOTrainer(
        model=policy,
        reward_funcs=build(settings, REWARD, is_classifier=True, seed=1),
        value_model=None if settings.lora else build(settings, SHAPES[settings.size], is_classifier=True),
        args=args,
        train_dataset=prompts(settings, as_text=True),
        processing_class=tokenizer(settings.vocabulary),
        peft_config=lora() if settings.lora else None,
    )


def trl112(settings, folder, policy):
    import trl
    from peft import inject_adapter_in_model
    from torch.utils.data import DataLoader
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    if not trl.__version__.startswith("1.12."):
        raise ImportError(f"`--trl112` must be the Python of an environment with TRL 1.12, got {trl.__version__}.")
    value_model = build(settings, SHAPES[settings.size], is_classifier=True)
    if settings.lora and settings.side == "trl112":  # it has no option for that, and trains all weights of the critic
        inject_adapter_in_model(lora(task_type=None, exclude_modules=["score"]), value_model)
        value_model.score.requires_grad_(True)
    rows = prompts(settings, as_text=False)
    trainer = PPOTrainer(
        args=PPOConfig(
            **arguments(settings, folder, settings.batch),
            **ppo_arguments(settings),
            response_length=settings.response,
            stop_token="eos" if settings.varying else None,
            num_sample_generations=0,
        ),
        processing_class=tokenizer(settings.vocabulary),
        model=policy,
        ref_model=None,  # a copy; with LoRA the base without the adapter
        reward_model=build(settings, REWARD, is_classifier=True, seed=1),
        value_model=value_model,
        train_dataset=rows,
        peft_config=lora() if settings.lora else None,
    )
    in_order = DataLoader(rows, batch_size=settings.batch, collate_fn=trainer.data_collator)
    trainer.dataloader = trainer.accelerator.prepare(in_order)
    return trainer


def without_critic(settings, folder, policy):
    """RLOO or GRPO: two answers to each of half as many prompts, and the reward model as a function of tokens."""
    import torch
    import trl
    from torch.nn.utils.rnn import pad_sequence

    reward_model = build(settings, REWARD, is_classifier=True, seed=1).to(settings.device).eval()

    @torch.no_grad()
    def reward(completion_ids, **kwargs):
        rows = pad_sequence([torch.tensor(ids) for ids in completion_ids], batch_first=True, padding_value=PAD)
        rows = rows.to(settings.device)
        return reward_model(rows, attention_mask=(rows != PAD).long()).logits[:, 0].tolist()

    policy.save_pretrained(f"{folder}/sft")
    policy.config._name_or_path = f"{folder}/sft"  # from which they load their reference
    name = settings.side.upper()
    args = getattr(trl, f"{name}Config")(
        **arguments(settings, folder, settings.batch // settings.mini_batches),
        max_steps=settings.rollouts * settings.mini_batches * settings.epochs,
        steps_per_generation=settings.mini_batches,
        num_iterations=settings.epochs,
        num_generations=2,
        max_completion_length=settings.response,
        temperature=1.0,
        top_k=0,
        beta=KL_COEF,
        logging_steps=settings.mini_batches * settings.epochs,
        shuffle_dataset=False,
    )
    return getattr(trl, f"{name}Trainer")(
        model=policy,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(settings, as_text=True),
        processing_class=tokenizer(settings.vocabulary),
        peft_config=lora() if settings.lora else None,
    )


TRAINERS = {"ours": ours, "trl112": trl112, "trl112-whole": trl112, "rloo": without_critic, "grpo": without_critic}
