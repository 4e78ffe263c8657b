"""Measure a policy's answers to held-out prompts: gold and proxy score, KL, entropy, ending and length."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_ext.models import answer_texts, completion_logprobs, eos_token_ids, prompt_token_ids, sample

from .world import gold_reward, phrase_reward

MAX_NEW_TOKENS = 48
BATCH = 128


@dataclass
class Measured:
    """Hold a policy's N answers, one for each prompt, and their figures; tensors are (N,)."""

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
    """
    Sample one answer to the prompt of each row at temperature 1, and score it by gold and, if given, the reward model.
    """
    models = policy.eval(), reference.eval()
    prompts = prompt_token_ids(tokenizer, [row["prompt"] for row in rows])
    ends = eos_token_ids(policy, tokenizer)
    ids = sample(policy, prompts, ends, max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH, seed=seed)
    answers = answer_texts(tokenizer, ids, ends)
    kl = []
    entropy = []
    proxy = []
    for start in range(0, len(rows), BATCH):
        asked = prompts[start : start + BATCH]
        said = ids[start : start + BATCH]
        (logprobs, _), (ref_logprobs, _) = (completion_logprobs(model, asked, said) for model in models)
        kl.append((logprobs - ref_logprobs).sum(1))
        entropy.append(-logprobs.sum(1))
        if reward_model is None:
            proxy.append(torch.full((len(said),), torch.nan))
        else:
            whole = {"input_ids": [prompt + answer for prompt, answer in zip(asked, said, strict=True)]}
            batch = tokenizer.pad(whole, padding_side="right", return_tensors="pt")
            proxy.append(reward_model.eval()(**batch).logits[:, 0])
    gold = gold_reward(answers, ids, [row["product"] for row in rows], [row["problem"] for row in rows])
    return Measured(
        answers=answers,
        gold=torch.tensor(gold).double(),
        proxy=torch.cat(proxy).double(),
        kl=torch.cat(kl).double(),
        entropy=torch.cat(entropy).double(),
        ended=torch.tensor([answer[-1] in ends for answer in ids]).double(),
        length=torch.tensor([len(answer) for answer in ids]).double(),
        phrase=torch.tensor(phrase_reward(answers)).double(),
    )
