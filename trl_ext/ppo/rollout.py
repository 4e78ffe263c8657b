"""Hold one rollout (completions, log-probs, values, scores), and cut it into micro-batches."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..functional import importance_weights, kl_estimate, turn_sums
from .config import PPOConfig


@dataclass(frozen=True)
class Rollout:
    """
    Hold this process's rows of a rollout, in the order of generation.

    Each of the B rows is a prompt, padded to P tokens, with a completion, padded to T tokens. F reward functions
    scored the completions. Log-probs are in nats; values and scores are in score units.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; 1 = real token, EOS and what tools wrote included. With
            `mask_truncated_completions` the mask of a completion that was cut off is 0.
        logprobs: (B, T), of the policy before the update. They are the sampler's log-probs if `old_logprobs` lets
            these replace a forward pass of the policy.
        ref_logprobs: (B, T), of the reference; None without a reference.
        values: (B, T), of the critic before each token; None in evaluation, and with `baseline="mean"`.
        sampler_logprobs: (B, T), of the distribution that was sampled from; None if they are not known, or are in
            `logprobs` already.
        rewards_per_func: (B, F), NaN where a function gave no score.
        scores: (B,), as [`sequence_scores`] adds up the weighted rewards, not normalised; NaN for rows that are not
            trained on.
        finished: (B,), whether the completion is complete: it ends by EOS, and no tool call waits for an answer.
        lengths: (B,), number of tokens that the policy sampled, EOS included.
        token_scores: (B, T), the part of the scores that belongs to single tokens; None if no token was scored. The
            methods of [`PPOTrainer`] that subclasses override get normalised token scores.
        tool_mask: (B, T), TRL's name: 1 = sampled by the policy, 0 = what a tool or an environment said, and padding.
            None if TRL has no such mask: then the policy sampled all tokens.
        environments: for each environment's name a (B,) bool, whether the row was played in that environment.
        tool_lengths: (B,), number of tokens in the completion that tools and environments wrote.
        repeats: (B, C), a number for each of up to C tool calls of a row: 1 if an earlier call of the row was the same
            and had the same answer, else 0; NaN where there is no call.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    sampler_logprobs: Tensor | None
    rewards_per_func: Tensor
    scores: Tensor
    finished: Tensor
    lengths: Tensor
    token_scores: Tensor | None = None
    tool_mask: Tensor | None = None
    environments: dict[str, Tensor] = field(default_factory=dict)
    tool_lengths: Tensor | None = None
    repeats: Tensor | None = None

    @property
    def sampled_mask(self) -> Tensor:
        """Return `completion_mask` without the tokens of tools and environments, (B, T): what the policy sampled."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def valid(self) -> Tensor:
        """Return a (B,) mask of the rows that have a score; only these are trained on."""
        return ~self.scores.isnan()

    @property
    def mask(self) -> Tensor:
        """Return the (B, T) mask of the tokens to train on: sampled by the policy, in rows that have a score."""
        return self.sampled_mask * self.valid[:, None]

    @cached_property
    def k1(self) -> Tensor:
        """Return the (B, T) log-ratio of policy to reference, nats; 0 without a reference."""
        return self.kl("k1")

    def kl(self, estimator: str) -> Tensor:
        """
        Estimate the KL to the reference at each token, (B, T), nats; 0 without a reference.

        Args:
            estimator: a name in `trl_ext.functional.KL_ESTIMATORS`.
        """
        return kl_estimate(self.logprobs, self.logprobs if self.ref_logprobs is None else self.ref_logprobs, estimator)

    def importance_weights(self, args: PPOConfig) -> tuple[Tensor, Tensor] | None:
        """
        Compute weights of the policy's loss that correct for completions sampled from another distribution.

        Returns:
            The weights, and a mask of the weights that a bound changed; both (B, T), or (B, 1) if
            `importance_sampling_mode` weights whole completions. None if that setting asks for no correction.
        """
        mode = args.importance_correction
        if mode == "none":
            return None
        assert self.sampler_logprobs is not None
        bounds = args.importance_sampling_clip_min, args.importance_sampling_clip_max
        logprobs = self.logprobs
        sampler_logprobs = self.sampler_logprobs
        if args.gae_level == "turn" and mode.startswith("token"):  # a turn is one action
            logprobs = turn_sums(logprobs, self.sampled_mask)
            sampler_logprobs = turn_sums(sampler_logprobs, self.sampled_mask)
        return importance_weights(logprobs, sampler_logprobs, self.sampled_mask, mode, *bounds)

    def rows_for_training(
        self, advantages: Tensor, returns: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """
        Return the tensors that an update needs, by name; each has one row per completion.

        Args:
            advantages, returns: (B, T).
            weights: importance weights, (B, T) or (B, 1); None for none.

        Returns:
            The fields `prompt_ids`, `prompt_mask`, `completion_ids` and `completion_mask`; `mask` as `loss_mask`;
            `logprobs` as `old_logprobs`; `advantages`; and `row`, (B,), each row's place in the rollout. With a critic
            also `values` as `old_values`, and `returns`; with `weights` also `importance_weights`.
        """
        return {
            **({} if weights is None else {"importance_weights": weights}),
            "row": torch.arange(len(self.scores), device=self.scores.device),
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "loss_mask": self.mask,
            "old_logprobs": self.logprobs,
            **({} if self.values is None else {"old_values": self.values, "returns": returns}),
            "advantages": advantages,
        }


def sequence_scores(
    rewards: Tensor,
    weights: Tensor,
    finished: Tensor,
    missing_eos_score: float | None = None,
    missing_eos_penalty: float | None = None,
) -> Tensor:
    """
    Add up each completion's weighted rewards; replace or lower the score where EOS is missing (2403.17031).

    score = Σ_f weight_f · reward_f over the functions that apply to the completion. Without EOS the score is replaced
    by `missing_eos_score`, or lowered by `missing_eos_penalty`. A function of weight 0 is only logged: the
    scores are the same with and without it, bit for bit.

    Args:
        rewards: (B, F), NaN where a function does not apply to the completion (it returned None).
        weights: (F,).
        finished: (B,), as in [`Rollout`].
        missing_eos_score, missing_eos_penalty: score units; None for no replacement, or no penalty.

    Returns:
        (B,), NaN where no function with a weight applies.
    """
    counts = weights != 0
    rewards = rewards[:, counts.to(rewards.device)]
    weights = weights[counts]
    weighted = rewards * weights.to(rewards.device)
    scores = weighted.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    if missing_eos_score is not None:
        scores = torch.where(finished | scores.isnan(), scores, missing_eos_score)
    if missing_eos_penalty is not None:
        scores = torch.where(finished, scores, scores - missing_eos_penalty)
    return scores


def summed_token_scores(
    given: list[list[list[float] | None]],
    weights: Tensor,
    finished: Tensor,
    width: int,
    missing_eos_score: float | None = None,
) -> Tensor | None:
    """
    Add up, for each token, the weighted scores that reward functions gave to that token.

    Args:
        given: for each of F functions a list with B entries. An entry has one float for each token of the completion,
            or is None if the function scored the completion as a whole.
        weights: (F,).
        finished: (B,), as in [`Rollout`].
        width: T.
        missing_eos_score: if not None, it replaces the score of a completion without EOS, whose tokens then get 0.

    Returns:
        (B, T), on the device of `finished`; None if no function with a weight scored any token.
    """
    weighted = [(weight, rows) for weight, rows in zip(weights.tolist(), given, strict=True) if weight != 0]
    if not any(tokens is not None for _, rows in weighted for tokens in rows):
        return None
    total = torch.zeros(len(finished), width, dtype=torch.double)
    for weight, rows in weighted:
        for row, tokens in enumerate(rows):
            if tokens is not None:
                total[row, : len(tokens)] += weight * torch.tensor(tokens, dtype=torch.double)
    if missing_eos_score is not None:
        total = torch.where(finished.cpu()[:, None], total, 0.0)
    return total.to(finished.device, torch.float32)


def onto_policy_tokens(values: Tensor, tool_mask: Tensor) -> Tensor:
    """
    Move values at tools' tokens onto the last token before them that the policy sampled. Each row keeps its sum.

    Args:
        values: (B, T), any unit.
        tool_mask: (B, T), 1 = sampled by the policy; padding is 0. The first token of a row is the policy's.

    Returns:
        (B, T), 0 where `tool_mask` is 0.
    """
    places = torch.arange(values.size(1), device=values.device).expand_as(values)
    owners = torch.where(tool_mask.bool(), places, 0).cummax(dim=1).values
    return torch.zeros_like(values).scatter_add(1, owners, values)


def token_counts_of(prompt_mask: Tensor, completion_mask: Tensor) -> list[tuple[int, int]]:
    """
    Return for each row the number of real tokens in its prompt and in its completion, from `prompt_mask` (B, P) and
    `completion_mask` (B, T).
    """
    counts = torch.stack([prompt_mask.sum(1), completion_mask.sum(1)], dim=1)
    return [tuple(row) for row in counts.tolist()]


def joined(micro_batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """
    Join a rollout's `micro_batches` into one batch; its rows have the order in which they were generated.

    A micro-batch is a dict as [`Rollout.rows_for_training`] returns it. What was added to it for an optimizer step,
    such as `step_tokens`, is left out.
    """
    columns = [name for name in micro_batches[0] if name not in ("step_tokens", "step_turns", "token_counts")]
    rollout = {name: torch.cat([batch[name] for batch in micro_batches]) for name in columns}
    order = rollout["row"].argsort()
    return {name: values[order] for name, values in rollout.items()}


def permuted(lengths: list[int], mini_batches: int, seed: int) -> list[int]:
    """
    Return a rollout's row indices in the order of one pass, which has `mini_batches` minibatches.

    The seed alone decides which minibatch a row is in. Within a minibatch the shorter rows come first, so that a
    micro-batch has rows of similar length; this does not change the minibatch's gradient. `lengths` has each row's
    number of tokens.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    size = len(order) // mini_batches
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [row for chunk in chunks for row in sorted(chunk, key=lengths.__getitem__)]
