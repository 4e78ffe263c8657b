"""Read saved rollouts: get their token ids and scores, and compute the returns that PPO would compute."""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, concatenate_datasets
from torch import Tensor

from ..data.texts import check_texts
from ..functional import gae, moments, token_rewards, whiten
from ..models.generation import answer_texts, prompt_token_ids
from ..runs.jsonl import is_finite_number
from .critic_config import CriticConfig
from .reward_normalizer import RewardNormalizer
from .rewards import CheckedReward, Mistakes
from .rollout import sequence_scores, summed_token_scores

_IDS = ("prompt_ids", "completion_ids")
_CHECKED = 256  # rows whose text is compared with their token ids
_CHUNK = 1024  # rows whose token rewards are computed at once


def with_token_ids(
    dataset: Dataset, tokenizer: Any, eos_token_ids: list[int], vocabulary: int, context: int | None = None
) -> Dataset:
    """
    Return saved rollouts with the columns `prompt_ids`, `completion_ids` and `finished` (whether EOS ended them).

    Rows with `prompt_ids` and `completion_ids`, as `trl-ext generate --rollouts true` writes them, hold the tokens
    that the policy sampled. Other rows have the texts `prompt` and `completion`, and `finished`. These texts are
    tokenised, maybe into other tokens than the policy sampled; a finished completion gets an EOS at its end.

    Args:
        dataset: rows of one of the two kinds, with any other columns.
        tokenizer: the policy's tokenizer.
        eos_token_ids: the policy's tokens that end a completion.
        vocabulary: number of token ids that the critic has embeddings for.
        context: most tokens that the critic can read; None for no bound.

    Raises:
        ValueError: the rows are of neither kind, or have only one of `prompt_ids` and `completion_ids`; or a row has
            an empty prompt or completion, more tokens than `context`, ids of another tokenizer, or a `finished` that
            is not true or false.
    """
    given = [name for name in _IDS if name in dataset.column_names]
    has_ids = len(given) == len(_IDS)
    if given and not has_ids:  # else the texts would be read without a word
        (missing_ids,) = {*_IDS} - {*given}
        raise ValueError(
            f"the rollouts have {given[0]}, but no {missing_ids}: give both, or neither to have the texts read"
        )
    if "finished" in dataset.column_names:
        for row, stated in enumerate(dataset["finished"]):
            if not isinstance(stated, bool):
                raise ValueError(f"rollout {row} has `finished` {stated!r}: it must be true or false")
    if has_ids:
        prompts, completions = (dataset[name][:] for name in _IDS)
    else:
        missing = {"prompt", "completion", "finished"} - {*dataset.column_names}
        if missing:
            raise ValueError(
                f"the rollouts have no {' and '.join(_IDS)}, and to read their texts they lack "
                f"{', '.join(sorted(missing))}: write them with `trl-ext generate --rollouts true`"
            )
        check_texts(dataset, ("prompt", "completion"), "the rollouts")
        prompts, completions = _tokenized(dataset, tokenizer)
    empty = [row for row, (p, c) in enumerate(zip(prompts, completions, strict=True)) if not p or not c]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(dataset)} rollouts have an empty prompt or completion (the first is row "
            f"{empty[0]}): leave them out"
        )
    for row, ids in enumerate(zip(prompts, completions, strict=True)):
        wrong = [i for part in ids for i in part if not (isinstance(i, int) and 0 <= i < vocabulary)]
        if wrong and not isinstance(wrong[0], int):
            raise ValueError(f"rollout {row} has the token id {wrong[0]!r}: token ids must be whole numbers")
        if wrong:
            raise ValueError(
                f"rollout {row} has the token id {wrong[0]}, but the critic's vocabulary has only {vocabulary} ids: "
                "use rollouts of a policy with the critic's tokenizer"
            )
        if context is not None and len(ids[0]) + len(ids[1]) > context:
            raise ValueError(
                f"rollout {row} has {len(ids[0])} + {len(ids[1])} tokens, but the critic can read only {context}: "
                "leave out such rows"
            )
    finished = [ids[-1] in eos_token_ids for ids in completions]
    if has_ids:
        _check_texts_of_ids(dataset, tokenizer, completions, finished, eos_token_ids)
    read = Dataset.from_dict(dict(zip((*_IDS, "finished"), (prompts, completions, finished), strict=True)))
    others = dataset.remove_columns([name for name in read.column_names if name in dataset.column_names])
    return concatenate_datasets([others.flatten_indices(), read], axis=1) if others.column_names else read


def _tokenized(dataset: Dataset, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Tokenize the texts or messages of all rows; return the prompts' token ids, and the completions' token ids."""
    texts, answers = dataset["prompt"][:], dataset["completion"][:]
    prompts, completions = prompt_token_ids(tokenizer, texts), []
    for prompt, asked, answer, ended in zip(texts, prompts, answers, dataset["finished"], strict=True):
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        together = tokenizer(prompt + text)["input_ids"] if isinstance(prompt, str) else []
        if together[: len(asked)] == asked:  # SentencePiece adds a space to a text alone
            ids = together[len(asked) :]
        else:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:  # from a tokenizer that ends every text by EOS
            ids = ids[:-1]
        completions.append([*ids, *([tokenizer.eos_token_id] if ended else [])])
    return prompts, completions


def _check_texts_of_ids(
    dataset: Dataset, tokenizer: Any, completions: list[list[int]], finished: list[bool], ends: list[int]
) -> None:
    """
    Raise if a completion's last id contradicts the row's `finished`, or if its ids do not decode to its text.

    The texts of the first rows alone are compared.
    """
    if "finished" in dataset.column_names:
        for row, (stated, found) in enumerate(zip(dataset["finished"], finished, strict=True)):
            if stated != found:
                raise ValueError(
                    f"rollout {row} says `finished: {str(stated).lower()}`, but its last token is "
                    f"{completions[row][-1]}, and a completion is finished if it ends with one of {ends}: pass the "
                    "policy's tokenizer"
                )
    if "completion" in dataset.column_names:
        some = dataset.select(range(min(len(dataset), _CHECKED)))["completion"][:]
        for row, (stated, text) in enumerate(
            zip(some, answer_texts(tokenizer, completions[: len(some)], ends), strict=True)
        ):
            if (stated if isinstance(stated, str) else stated[-1]["content"]) != text:
                raise ValueError(
                    f"rollout {row} has ids that decode to {text[:60]!r}, but its text is {str(stated)[:60]!r}: pass "
                    "the tokenizer that made the ids"
                )


def given_scores(dataset: Dataset, column: str) -> Tensor:
    """Return the (B, 1) scores in a column of saved rollouts; raise if a score is missing or not a finite number."""
    if column not in dataset.column_names:
        raise ValueError(
            f"the rollouts have no column {column!r} with scores; they have "
            f"{', '.join(map(repr, dataset.column_names))}: give `score_column`, or a reward that scores them"
        )
    scores = dataset[column][:]
    for row, score in enumerate(scores):
        if not is_finite_number(score):
            raise ValueError(
                f"rollout {row} has the score {score!r} in {column!r}: give it a finite number, or leave the row out"
            )
    return torch.tensor(scores, dtype=torch.float64)[:, None]


def score_rollouts(
    dataset: Dataset, functions: list[Callable], names: list[str], batch_size: int
) -> tuple[Tensor, list[list[list[float] | None]]]:
    """
    Score saved rollouts by reward functions, called as PPO calls them; each process scores its share of the rows.

    Args:
        dataset: B rows of [`with_token_ids`]; their other columns are given to the functions, too.
        functions, names: F reward functions with TRL's signature, and their names.
        batch_size: number of rows in one call of a function.

    Returns:
        Two values, the same on every process and for all rows: the (B, F) scores on the CPU, NaN where a function
        gives None; and for each function and row the scores of the single tokens, None where the function scores the
        row as a whole.

    Raises:
        ValueError: the rows have no texts.
        RuntimeError: a function failed, or returned something that is not a score.
    """
    if missing := {"prompt", "completion"} - {*dataset.column_names}:
        raise ValueError(
            f"the rollouts have no {', '.join(sorted(missing))}, and rewards read it: write them with `trl-ext "
            "generate --rollouts true`, or give their scores in a column"
        )
    processes = PartialState()
    mistakes = Mistakes(processes)
    wrapped = [CheckedReward(function, name, mistakes) for function, name in zip(functions, names, strict=True)]
    size = -(-len(dataset) // processes.num_processes)
    first = min(processes.process_index * size, len(dataset))
    mine = dataset.select(range(first, min(first + size, len(dataset))))
    left_out = ("prompt", "completion", *_IDS, "finished")
    rows: list[Any] = []
    for batch in mine.iter(batch_size):
        columns = {name: values for name, values in batch.items() if name not in left_out}
        given = {
            "prompts": batch["prompt"],
            "completions": batch["completion"],
            "completion_ids": batch["completion_ids"],
            "prompt_ids": batch["prompt_ids"],
            "finished": batch["finished"],
        }
        by_row = zip(*(function(**given, **columns) for function in wrapped), strict=True)
        rows += zip(by_row, zip(*(function.token_scores for function in wrapped), strict=True), strict=True)
        if mistakes.notes:
            break
    mistakes.raise_everywhere(0)
    rows = gather_object(rows) if processes.num_processes > 1 else rows
    whole = [[math.nan if score is None else score for score in scores] for scores, _ in rows]
    by_function = [[tokens[f] for _, tokens in rows] for f in range(len(functions))]
    return torch.tensor(whole, dtype=torch.float64), by_function


def with_returns(
    dataset: Dataset,
    rewards: Tensor,
    args: CriticConfig,
    token_scores: list[list[list[float] | None]] | None = None,
) -> Dataset:
    """
    Return rollouts with a column `returns`, the critic's target at each completion token.

    R_t = Σ_{k ≥ t} γ^(k − t) r_k: the Monte Carlo return, λ = 1 (VC-PPO, 2503.01491). The token rewards r are PPO's,
    without the KL term: the policy that drew the rollouts is the reference, so the log-probs are equal. A response's
    score is weighted, changed by the rule for a missing EOS, standardised and clipped. The parts that a function gave
    to single tokens are at these tokens, and the rest of the score is at the last token. r_k = 0 elsewhere.

    Args:
        dataset: B rows of [`with_token_ids`].
        rewards: (B, F), NaN where a function gives no score.
        args: the settings that decide the scale of the returns.
        token_scores: each function's scores of single tokens, as [`score_rollouts`] returns them.

    Returns:
        The rows that have a score, with two more columns: `score`, standardised and clipped, and `returns`.

    Raises:
        ValueError: `reward_weights` does not have one weight for each function, the column `reward_group_column` is
            missing, no row has a score, or all scores are equal and no token has a score of its own.
    """
    count = rewards.shape[1]
    if args.reward_weights is not None and len(args.reward_weights) != count:
        raise ValueError(
            f"`reward_weights` must have one number for each of the {count} rewards, got {args.reward_weights}"
        )
    weights = torch.tensor(args.reward_weights or [1.0] * count, dtype=torch.float64)
    weighted = [] if token_scores is None else zip(weights.tolist(), token_scores, strict=True)
    if not any(tokens is not None for weight, given in weighted if weight != 0 for tokens in given):
        token_scores = None
    ended = torch.tensor(dataset["finished"][:])
    scores = sequence_scores(rewards, weights, ended, args.missing_eos_score, args.missing_eos_penalty)
    if args.mask_truncated_completions:
        scores = scores.masked_fill(~ended, torch.nan)
    groups = None
    if args.reward_normalization == "group":
        if args.reward_group_column not in dataset.column_names:
            raise ValueError(
                f"the rollouts have no column {args.reward_group_column!r} (`reward_group_column`): name one of "
                f"{dataset.column_names}"
            )
        groups = [str(value) for value in dataset[args.reward_group_column]]
    scores, scales = RewardNormalizer(args.reward_normalization)(scores, groups)
    if args.reward_clip_range:
        scores = scores.clamp(*args.reward_clip_range)
    valid = ~scores.isnan()
    if not valid.any():
        raise ValueError(
            "no rollout is left to train on: give each one a score, or set `mask_truncated_completions` to false if "
            "none ends with an EOS"
        )
    if scores[valid].min() == scores[valid].max() and token_scores is None:
        raise ValueError(
            f"all rollouts have the score {scores[valid][0]:g}, so a critic can learn nothing from them: use rollouts "
            "with different scores"
        )

    kept = valid.nonzero()[:, 0].tolist()
    dataset = dataset.select(kept)
    lengths = [len(ids) for ids in dataset["completion_ids"]]
    chunks = []
    for start in range(0, len(kept), _CHUNK):
        rows, sizes = kept[start : start + _CHUNK], torch.tensor(lengths[start : start + _CHUNK])
        mask = torch.arange(int(sizes.max())) < sizes[:, None]
        of_tokens = None
        if token_scores is not None:
            some = [[given[row] for row in rows] for given in token_scores]
            of_tokens = summed_token_scores(some, weights, ended[rows], mask.size(1), args.missing_eos_score)
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
    """Raise if a prompt has rollouts in the training set and in the held-out set."""
    trained = set(map(tuple, train["prompt_ids"]))
    both = sum(tuple(ids) in trained for ids in held_out["prompt_ids"])
    if both:
        raise ValueError(
            f"{both} of {len(held_out)} held-out rollouts answer prompts that are trained on: leave them out, or use "
            "`eval_size`, which keeps prompts apart"
        )
