"""Score the demonstrations in the training set, for `reward_normalization='reference'`."""

from contextlib import ExitStack
from typing import Any

import torch

from ..upstream.names import is_conversational
from ..upstream.temporarily import temporarily
from .inputs import with_prompts
from .metrics import Accumulator
from .rollout import sequence_scores


def mean_demonstration_score(trainer: Any) -> float:
    """Score each demonstration once, with an EOS at its end, and return the mean score over all processes."""
    stats, dataset, accelerator, args = Accumulator(), trainer.train_dataset, trainer.accelerator, trainer.args
    tokenizer, size = trainer._tokenizer, args.local_rollout_forward_batch_size
    for start in range(0, len(dataset), size * accelerator.num_processes):
        first = start + size * accelerator.process_index
        rows = torch.arange(first, first + size)
        inputs, token_ids = with_prompts([dataset[int(i)] for i in rows % len(dataset)], tokenizer)
        texts = [row["completion"] for row in inputs]
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in texts]
        completion_ids = [
            [*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        prompts = [row["prompt"] for row in inputs]
        prompt_ids = token_ids or trainer._tokenize_prompts(prompts)[0]
        inputs = [{**row, "prompt_ids": ids, "finished": True} for row, ids in zip(inputs, prompt_ids, strict=True)]
        chat = is_conversational(inputs[0])
        completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        with ExitStack() as muted:  # what reward functions log belongs to no rollout
            for function in trainer.reward_funcs:
                muted.enter_context(temporarily(function, is_muted=True))
            rewards = trainer._local(trainer._scored(inputs, prompts, completions, completion_ids))
        ended = torch.ones(len(rewards), dtype=torch.bool, device=rewards.device)
        scores = sequence_scores(rewards, trainer.reward_weights, ended)
        stats.add("scores", scores, (rows < len(dataset)).to(scores.device) & ~scores.isnan())
    return stats.pop(accelerator)["scores"][1].item()
