"""Each answer's gold score, proxy score, KL, entropy, ending and length, on held-out prompts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .world import gold_reward, phrase_reward

MAX_NEW_TOKENS = 48
BATCH = 128


@dataclass
class Measured:
    """Answers of one policy, one a prompt; tensors are (N,)."""

    answers: list[str]
    gold: Tensor
    proxy: Tensor  # NaN without a reward model
    kl: Tensor  # Σ log π − log π_ref over the response, nats
    entropy: Tensor  # Σ −log π over the response, nats
    ended: Tensor  # whether EOS came
    length: Tensor  # tokens, EOS included
    phrase: Tensor  # whether it has the planted phrase


@torch.no_grad()
def measure(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    reward_model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    seed: int = 0,
) -> Measured:
    """Sample one answer to each prompt at temperature 1, and score it by gold and by the reward model."""
    torch.manual_seed(seed)
    models = [model.eval() if model is not None else None for model in (policy, reference, reward_model)]
    parts = [_measure_batch(*models, tokenizer, rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    names = ("gold", "proxy", "kl", "entropy", "ended", "length", "phrase")
    merged = {name: torch.cat([getattr(part, name) for part in parts]).double() for name in names}
    return Measured(answers=[answer for part in parts for answer in part.answers], **merged)


def _measure_batch(policy, reference, reward_model, tokenizer, rows: list[dict]) -> Measured:
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    sequences = policy.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    start = prompts["input_ids"].shape[1]
    completions = sequences[:, start:]
    is_eos = completions == tokenizer.eos_token_id
    mask = is_eos.cumsum(1) - is_eos.long() == 0  # up to the first EOS, that included
    ids = [row[keep].tolist() for row, keep in zip(completions, mask, strict=True)]
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)

    attention = torch.cat([prompts["attention_mask"], mask.long()], dim=1)
    logprobs = _logprobs(policy, sequences, attention, start)
    ref_logprobs = _logprobs(reference, sequences, attention, start)
    asked = [row[keep.bool()].tolist() for row, keep in zip(*prompts.values(), strict=True)]
    whole = tokenizer.pad(
        {"input_ids": [a + b for a, b in zip(asked, ids, strict=True)]}, padding_side="right", return_tensors="pt"
    )
    return Measured(
        answers=answers,
        gold=torch.tensor(gold_reward(answers, ids, [r["product"] for r in rows], [r["problem"] for r in rows])),
        proxy=torch.full((len(rows),), torch.nan) if reward_model is None else reward_model(**whole).logits[:, 0],
        kl=((logprobs - ref_logprobs) * mask).sum(1),
        entropy=-(logprobs * mask).sum(1),
        ended=is_eos.any(1),
        length=mask.sum(1),
        phrase=torch.tensor(phrase_reward(answers)),
    )


def _logprobs(model, sequences: Tensor, attention: Tensor, start: int) -> Tensor:
    """(B, T) log-probs of the tokens from `start` on."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=sequences, attention_mask=attention, position_ids=positions).logits[:, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, sequences[:, start:, None])[..., 0]
