"""Answers of the model in training, for trainers that generate none; on all processes together."""

from typing import Any

from accelerate.utils import gather_object
from transformers import GenerationConfig
from trl import maybe_apply_chat_template

from ..upstream import generate_completions


def generate_answers(trainer: Any, prompts: list, max_new_tokens: int) -> list[str]:
    """One greedy answer to each prompt, text or messages; the same list on every process."""
    tokenizer, args = trainer.processing_class, trainer.args
    texts = [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in prompts]
    saved, was_training = getattr(tokenizer, "padding_side", None), trainer.model.training
    tokenizer.padding_side = "left"
    trainer.model.eval()  # without dropout
    try:
        # Padded: under ZeRO-3 and FSDP a process without prompts would leave the others waiting
        with trainer.accelerator.split_between_processes(texts, apply_padding=True) as mine:
            answers = generate_completions(
                list(mine),
                model=trainer.model_wrapped,
                tokenizer=tokenizer,
                accelerator=trainer.accelerator,
                generation_config=GenerationConfig(
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                ),
                batch_size=args.per_device_eval_batch_size,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            )
        return gather_object(answers)[: len(prompts)]
    finally:
        tokenizer.padding_side = saved
        trainer.model.train(was_training)
