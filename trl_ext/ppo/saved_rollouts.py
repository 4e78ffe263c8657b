"""Check saved rollouts, and compute the returns that PPO would compute for them."""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ..functional import gae, moments, token_rewards, whiten
from ..models.generation import answer_texts
from .controllers import RewardNormalizer
from .critic_trainer import CriticConfig
from .rollout import sequence_scores, summed_token_scores

_CHECKED = 256  # rows whose text is compared with their token ids
_CHUNK = 1024  # rows whose token rewards are computed at once


def with_finished(dataset: Dataset, tokenizer: Any, eos_token_ids: list[int]) -> Dataset:
    """
    Return saved rollouts with the column `finished`: whether the completion ends by one of `eos_token_ids`.

    Args:
        dataset: rows with `prompt_ids` and `completion_ids`, the tokens that the policy read and sampled, as
            `trl-ext generate --rollouts true` writes them.
        tokenizer: the policy's tokenizer.
        eos_token_ids: the policy's tokens that end a completion.

    Raises:
        ValueError: the ids of one of the first 256 rows do not decode to the text in a column `completion`, or the ids
            of any row contradict a column `finished`. Usually `tokenizer` is then not the policy's.
    """
    completions = dataset["completion_ids"][:]
    finished = [ids[-1] in eos_token_ids for ids in completions]
    stated = dataset["finished"][:] if "finished" in dataset.column_names else finished
    texts = answer_texts(tokenizer, completions[:_CHECKED], eos_token_ids)
    expected = dataset.select(range(len(texts)))["completion"][:] if "completion" in dataset.column_names else texts
    expected = [text if isinstance(text, str) else text[-1]["content"] for text in expected]
    wrong = [row for row, (a, b) in enumerate(zip(finished, stated, strict=True)) if a != b]
    wrong += [row for row, (a, b) in enumerate(zip(texts, expected, strict=True)) if a != b]
    if wrong:
        raise ValueError(
            f"the token ids of rollout {wrong[0]} do not match its columns: this tokenizer decodes them to another "
            "text than `completion`, or its EOS contradicts `finished`. Pass the tokenizer of the policy that sampled "
            "the rollouts (`trl-ext pretrain-critic`: set `policy_name_or_path`)"
        )
    others = dataset.remove_columns([name for name in ("finished",) if name in dataset.column_names])
    return others.add_column("finished", finished)


def with_returns(
    dataset: Dataset,
    rewards: Tensor,
    args: CriticConfig,
    token_scores: list[list[list[float] | None]] | None = None,
) -> Dataset:
    """
    Return rollouts with a column `returns`, the critic's target at each completion token.

    R_t = Σ_{k ≥ t} γ^(k − t) r_k: the Monte Carlo return, λ = 1 (VC-PPO, 2503.01491). The token rewards r are PPO's,
    without the KL term: the policy that sampled the rollouts is the reference, so the log-probs are equal. A
    completion's score is weighted, changed by the rule for a missing EOS, standardised and clipped. Scores that a
    function gave to single tokens are at these tokens, and the rest of the score is at the last token. r_k = 0
    elsewhere. With `whiten_rewards` r is then whitened, except for its mean.

    Args:
        dataset: B rows, as [`with_finished`] returns them.
        rewards: (B, F), NaN where a function gives no score.
        args: the settings that decide the scale of the returns.
        token_scores: each function's scores of single tokens, as [`score_rollouts`] returns them.

    Returns:
        The rows that have a score, with two more columns: `score`, standardised and clipped, and `returns`.
    """
    count = rewards.shape[1]
    weights = torch.tensor(args.reward_weights or [1.0] * count, dtype=torch.float64)
    finished = torch.tensor(dataset["finished"][:])
    scores = sequence_scores(rewards, weights, finished, args.missing_eos_score, args.missing_eos_penalty)
    if args.mask_truncated_completions:
        scores = scores.masked_fill(~finished, torch.nan)
    groups = None
    if args.reward_normalization == "group":
        groups = [str(value) for value in dataset[args.reward_group_column]]
    scores, scales = RewardNormalizer(args.reward_normalization)(scores, groups)
    if args.reward_clip_range:
        scores = scores.clamp(*args.reward_clip_range)
    valid = ~scores.isnan()
    kept = valid.nonzero()[:, 0].tolist()
    dataset = dataset.select(kept)
    lengths = [len(ids) for ids in dataset["completion_ids"]]
    chunks = []
    for start in range(0, len(kept), _CHUNK):
        rows = kept[start : start + _CHUNK]
        sizes = torch.tensor(lengths[start : start + _CHUNK])
        mask = torch.arange(int(sizes.max())) < sizes[:, None]
        of_tokens = None
        if token_scores is not None:
            some = [[given[row] for row in rows] for given in token_scores]
            of_tokens = summed_token_scores(some, weights, finished[rows], mask.size(1), args.missing_eos_score)
            of_tokens = None if of_tokens is None else of_tokens * scales[rows, None].float()
        zero = torch.zeros(mask.shape)
        chunks.append((token_rewards(scores[rows].float(), zero, mask, 0.0, of_tokens), mask))
    if args.whiten_rewards:
        every = moments(torch.cat([rewards[mask] for rewards, mask in chunks]))
        chunks = [(whiten(rewards, mask, every, shift_mean=False), mask) for rewards, mask in chunks]
    returns = [
        row[real].tolist()
        for rewards, mask in chunks
        for row, real in zip(gae(rewards, torch.zeros_like(rewards), mask, args.gamma, 1.0), mask, strict=True)
    ]
    dataset = dataset.remove_columns([name for name in ("score", "returns") if name in dataset.column_names])
    return dataset.add_column("score", scores[kept].tolist()).add_column("returns", returns)


def check_apart(train: Dataset, held_out: Dataset) -> None:
    """Raise a `ValueError` if `prompt_ids` of the training set `train` are in the held-out set `held_out`, too."""
    trained = set(map(tuple, train["prompt_ids"]))
    if both := sum(tuple(ids) in trained for ids in held_out["prompt_ids"]):
        raise ValueError(
            f"{both} of {len(held_out)} held-out rollouts answer prompts of the training set: remove them, or use "
            "`eval_size`, which splits by prompt"
        )
