"""Generate answers with the model in training, on all processes, for trainers that do not generate."""

from typing import Any

from accelerate.utils import gather_object

from ..models import answer_texts, eos_token_ids, prompt_token_ids, sample
from ..upstream.names import unwrap_model_for_generation


def ids_of(trainer: Any, prompts: list) -> tuple[list[list[int]], int | None]:
    """
    Return the token ids of each prompt, and the number of tokens that the longest prompt leaves for an answer.

    That number is None if the model's context has no maximum length. A prompt that is longer than the tokenizer's
    maximum loses its beginning.

    Raises:
        ValueError: the longest prompt leaves no token for an answer.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # a processor has one
    prompt_ids = [list(ids[-tokenizer.model_max_length :]) for ids in prompt_token_ids(tokenizer, prompts)]
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    context = getattr(config and config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return prompt_ids, None
    if (room := context - max(map(len, prompt_ids))) < 1:
        raise ValueError(
            f"a prompt has {context - room} tokens, which leaves no room for an answer in the model's context of "
            f"{context}: give shorter prompts"
        )
    return prompt_ids, room


def generate_answers(trainer: Any, prompts: list, max_new_tokens: int) -> dict[str, list]:
    """
    Generate one greedy answer to each prompt, text or messages, and return all answers on every process.

    An answer has at most `max_new_tokens`, and fewer if the model's context is full before.

    Returns:
        The arguments that a reward function is called with:

        - `prompts`: as they were given.
        - `completions`: the answers; text for a prompt of text, a list with one message for a prompt of messages.
        - `completion_ids`, `prompt_ids`: token ids.
        - `finished`: whether an answer ends with EOS.
    """
    accelerator, args, was_training = trainer.accelerator, trainer.args, trainer.model.training
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # a processor has one
    prompt_ids, room = ids_of(trainer, prompts)
    trainer.model.eval()  # without dropout
    try:
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped, accelerator, gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            ) as model,
            # Padded: under ZeRO-3 and FSDP a process without prompts would leave the others waiting
            accelerator.split_between_processes(prompt_ids, apply_padding=True) as mine,
        ):
            model = getattr(model, "policy", model)  # PPOTrainer's model keeps a record of what its rollouts draw
            eos = eos_token_ids(model, tokenizer)
            answers = sample(
                model,
                mine,
                eos,
                max_new_tokens=min(max_new_tokens, room or max_new_tokens),
                temperature=0.0,
                batch_size=args.per_device_eval_batch_size,
            )
    finally:
        trainer.model.train(was_training)
    answered = gather_object(list(zip(answer_texts(tokenizer, answers, eos), answers, strict=True)))[: len(prompts)]
    return {
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, (text, _) in zip(prompts, answered, strict=True)
        ],
        "completion_ids": [ids for _, ids in answered],
        "prompt_ids": prompt_ids,
        "finished": [bool(ids) and ids[-1] in eos for _, ids in answered],
    }
