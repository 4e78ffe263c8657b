"""One rollout: what the policy answered, what that is worth, and the micro-batches that PPO makes of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from trl import RLOOTrainer

from ..functional import importance_weights, kl_estimate
from ..models.sampler import SamplerRecorder
from ..upstream.temporarily import temporarily
from .config import PPOConfig
from .inputs import tokenized, with_prompts


@dataclass(frozen=True)
class Rollout:
    """
    Hold this process's rows of a rollout, in the order of generation.

    B responses of up to T tokens, to prompts of up to P tokens, scored by F reward functions. Log-probs are in nats.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; 1 = real token, EOS included.
        logprobs: (B, T), of the policy before the update; of the sampler if it is trusted.
        ref_logprobs: (B, T), of the reference; None without one.
        values: (B, T), of the critic; None in evaluation.
        sampler_logprobs: (B, T), of the distribution that was drawn from, if recorded beside `logprobs`.
        rewards_per_func: (B, F), NaN where a function returned None.
        scores: (B,), after the EOS rule, not normalised; NaN for rows that take no part.
        ended: (B,), whether EOS came.
        lengths: (B,), tokens drawn, EOS included.
        token_scores: (B, T), the part of the scores that belongs to single tokens, or None. The hooks of
            [`PPOTrainer`] get them normalised as the scores are.
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
    ended: Tensor
    lengths: Tensor
    token_scores: Tensor | None = None

    @property
    def valid(self) -> Tensor:
        """(B,): whether the row takes part."""
        return ~self.scores.isnan()

    @property
    def mask(self) -> Tensor:
        """(B, T): real tokens of the rows that take part."""
        return self.completion_mask * self.valid[:, None]

    @cached_property
    def k1(self) -> Tensor:
        """(B, T): log-ratio to the reference, nats; 0 without one."""
        return self.kl("k1")

    def kl(self, estimator: str) -> Tensor:
        """
        (B, T): KL to the reference, nats; 0 without one.

        Args:
            estimator: a name in `trl_ext.functional.KL_ESTIMATORS`.
        """
        return kl_estimate(self.logprobs, self.logprobs if self.ref_logprobs is None else self.ref_logprobs, estimator)

    def importance_weights(self, args: PPOConfig) -> tuple[Tensor, Tensor] | None:
        """Weigh the policy's loss: (B, T) or (B, 1), and where a bound has changed that; None without a correction."""
        mode = args.importance_correction
        if mode == "none":
            return None
        assert self.sampler_logprobs is not None
        bounds = args.importance_sampling_clip_min, args.importance_sampling_clip_max
        return importance_weights(self.logprobs, self.sampler_logprobs, self.completion_mask, mode, *bounds)

    def rows_for_training(
        self, advantages: Tensor, returns: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what an update needs of each row; TRL's buffer shuffles and splits every tensor by row."""
        assert self.values is not None
        return {
            **({} if weights is None else {"importance_weights": weights}),
            "row": torch.arange(len(self.scores), device=self.scores.device),
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "loss_mask": self.mask,
            "old_logprobs": self.logprobs,
            "old_values": self.values,
            "advantages": advantages,
            "returns": returns,
        }


def check_hook(name: str, rollout: Rollout, *returned: Tensor) -> None:
    """Raise if a hook of the trainer returned another shape than (B, T)."""
    for tensor in returned:
        if tensor.shape != rollout.mask.shape:
            raise ValueError(
                f"`{name}` must return one number for each token, shape (B, T) = {tuple(rollout.mask.shape)}, got "
                f"{tuple(tensor.shape)}."
            )


def sequence_scores(
    rewards: Tensor,
    weights: Tensor,
    ended: Tensor,
    missing_eos_score: float | None = None,
    missing_eos_penalty: float | None = None,
) -> Tensor:
    """
    Weigh the rewards of each response, and apply the rule for those that do not end by EOS (N+ details, 2403.17031).

    score = Σ_f weight_f · reward_f over the functions that apply; without EOS it is replaced by `missing_eos_score`,
    or lowered by `missing_eos_penalty`. A function of weight 0 only measures: with it the scores are the same, bit for
    bit.

    Args:
        rewards: (B, F), NaN where a function does not apply.
        weights: (F,).
        ended: (B,), whether the response ends by EOS.
        missing_eos_score, missing_eos_penalty: score units, None for no such rule.

    Returns:
        (B,), NaN where no function with a weight applies.
    """
    counts = weights != 0
    rewards, weights = rewards[:, counts.to(rewards.device)], weights[counts]
    scores = (rewards * weights.to(rewards.device)).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    if missing_eos_score is not None:
        scores = torch.where(ended | scores.isnan(), scores, missing_eos_score)
    if missing_eos_penalty is not None:
        scores = torch.where(ended, scores, scores - missing_eos_penalty)
    return scores


def summed_token_scores(
    given: list[list[list[float] | None]],
    weights: Tensor,
    ended: Tensor,
    width: int,
    missing_eos_score: float | None = None,
) -> Tensor | None:
    """
    Weigh and add up what the reward functions gave to single tokens, at their positions.

    Args:
        given: of each of F functions, for each of B responses one float per token, or None for a score of the whole.
        weights: (F,).
        ended: (B,), whether the response ends by EOS.
        width: T.
        missing_eos_score: replaces the score of a response without EOS, so that nothing is left for its tokens.

    Returns:
        (B, T), on the device of `ended`; None if no function with a weight scored any token.
    """
    weighted = [(weight, rows) for weight, rows in zip(weights.tolist(), given, strict=True) if weight != 0]
    if not any(tokens is not None for _, rows in weighted for tokens in rows):
        return None
    total = torch.zeros(len(ended), width, dtype=torch.double)
    for weight, rows in weighted:
        for row, tokens in enumerate(rows):
            if tokens is not None:
                total[row, : len(tokens)] += weight * torch.tensor(tokens, dtype=torch.double)
    if missing_eos_score is not None:
        total = torch.where(ended.cpu()[:, None], total, 0.0)
    return total.to(ended.device, torch.float32)


class RolloutRecorder:
    """
    Stand in for the trainer while TRL's own rollout runs, and note what its steps return.

    TRL keeps neither the reference's log-probs nor the values, and sums the policy's over each response. Whatever is
    not noted here is the trainer's.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.passes: list[Tensor] = []  # (B, T) log-probs: the policy's, then the reference's
        self.values: Tensor | None = None  # (B, T)
        self.given_ids: list[list[int]] | None = None  # prompt tokens of rows with `input_ids`
        self.inputs: list[dict[str, Any]] = []  # each row's columns, and what reward functions are given beside them
        self.prompt_ids: list[list[int]] = []
        self.completion_ids: list[list[int]] = []
        self.rewards_per_func = torch.empty(0)  # (rows of all processes, F)
        self.lengths: list[tuple[int, int]] = []  # real tokens of each row's prompt and response
        self.started: dict[int, Any] = {}  # reward functions that were started ahead, by their place
        self.sampler: SamplerRecorder | None = None
        self.sampler_logprobs: Tensor | None = None  # (B, T)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def run(self, inputs: list[dict[str, Any]]) -> Rollout:
        """Run TRL's rollout; raise if it did not take the steps that we know."""
        trainer, args = self.trainer, self.trainer.args
        inputs, self.given_ids = with_prompts(inputs, trainer._tokenizer)
        self.inputs = inputs
        if trainer._trusts_sampler or args.another_samples or args.importance_correction != "none":
            self.sampler = SamplerRecorder()
        try:
            with temporarily(trainer._actor_critic, sampler_recorder=self.sampler):
                output = RLOOTrainer._generate_and_score_completions(self, inputs)
        finally:
            for function in trainer.reward_funcs:
                function.forget()
        expected = 1 + (trainer.beta != 0)
        if len(self.passes) != expected:
            raise RuntimeError(
                f"TRL made {len(self.passes)} log-prob passes in a rollout, {expected} were expected: this version of "
                "TRL is not supported."
            )
        logprobs, *reference = self.passes
        mask, device = output["completion_mask"], logprobs.device
        ended = torch.tensor([ids[-1] in trainer.eos_token_ids for ids in self.completion_ids], device=device)
        # TRL takes a row that is cut off at a PAD for finished; the policy drew that as it draws any other token
        takes_part = mask.any(1) & (ended | (not args.mask_truncated_completions))
        rewards = trainer._local(self.rewards_per_func)
        scores = sequence_scores(
            rewards, trainer.reward_weights, ended, args.missing_eos_score, args.missing_eos_penalty
        )
        return Rollout(
            prompt_ids=output["prompt_ids"],
            prompt_mask=output["prompt_mask"],
            completion_ids=output["completion_ids"],
            completion_mask=mask,
            logprobs=logprobs,
            ref_logprobs=reference[0] if reference else None,
            values=self.values,
            sampler_logprobs=None if logprobs is self.sampler_logprobs else self.sampler_logprobs,
            rewards_per_func=rewards,
            scores=scores.masked_fill(~takes_part, torch.nan),
            token_scores=summed_token_scores(
                [function.token_scores for function in trainer.reward_funcs],
                trainer.reward_weights,
                ended,
                mask.size(1),
                args.missing_eos_score,
            ),
            ended=ended,
            lengths=torch.tensor([len(ids) for ids in self.completion_ids], device=device, dtype=torch.float32),
        )

    def _generate(self, prompts: list) -> tuple[list, list, list]:
        trainer = self.trainer
        self.prompt_ids, self.completion_ids, completions = trainer._generate(tokenized(prompts, self.given_ids))
        self.started = trainer._started_ahead()
        self.inputs = with_answers(self.inputs, self.prompt_ids, self.completion_ids, trainer.eos_token_ids)
        if trainer._evaluation is not None and trainer._evaluation.is_greedy:
            self.inputs = [{**row, "is_greedy": True} for row in self.inputs]
        self._start_scoring(prompts, completions)
        return self.prompt_ids, self.completion_ids, completions

    def _start_scoring(self, prompts: list, completions: list) -> None:
        """Start the reward functions whose time goes by elsewhere, with what TRL will call them with."""
        given = given_to_rewards(self.inputs, prompts, completions, self.completion_ids)
        for place, function in enumerate(self.trainer.reward_funcs):
            waiting, started = self.trainer.metrics.timed("score_wait"), self.started.get(place)
            function.start(waiting, started, **given, trainer_state=self.trainer.state)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size=None, **kwargs
    ) -> tuple[Tensor, None, None]:
        trainer, width = self.trainer, logits_to_keep
        asked: dict[str, bool] = {}
        said: dict[str, Any] = {}
        if not self.passes:  # the policy's comes first
            mask = attention_mask[:, -width:]
            self.lengths = lengths_of(attention_mask[:, :-width], mask)
            self.sampler_logprobs = self._take_sampler_logprobs(input_ids[:, -width:], mask)
            said["logprobs"] = self.sampler_logprobs if trainer._trusts_sampler else None
            asked = {"with_logprobs": said["logprobs"] is None, "with_values": trainer.model.training}
        if self.passes or any(asked.values()):
            with trainer.metrics.timed("logprobs"):
                size = trainer.args.local_rollout_forward_batch_size
                said |= trainer._passes(model, input_ids, self.lengths, width, size, **asked)
        self.values = said.get("values", self.values)
        self.passes.append(said["logprobs"])
        return said["logprobs"], None, None

    def _take_sampler_logprobs(self, ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return the (B, T) log-probs under which the answers were drawn, if every process has all of its own."""
        trainer = self.trainer
        logprobs = None if self.sampler is None else self.sampler.take(ids, mask)
        is_known = logprobs is not None and logprobs.isfinite().all().item()
        who_knows = trainer.accelerator.gather(mask.new_tensor([is_known]))
        if who_knows.all():
            return logprobs
        if trainer.model.training and trainer.args.needs_sampler_logprobs:
            raise RuntimeError(
                f"The log-probs under which the answers were drawn are missing on {int((~who_knows.bool()).sum())} of "
                f"{len(who_knows)} process(es), or are of other tokens, so that `importance_sampling_mode="
                f"{trainer.args.importance_sampling_mode!r}` and `old_logprobs={trainer.args.old_logprobs!r}` cannot "
                "correct for who has drawn them: have the sampler return them and leave answers as they were drawn, "
                "or set `importance_sampling_mode='none'` to train without a correction."
            )
        return None

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        self.rewards_per_func = self.trainer._calculate_rewards(self.inputs, prompts, completions, completion_ids_list)
        return self.rewards_per_func


def with_answers(
    rows: list[dict[str, Any]], prompt_ids: list[list[int]], completion_ids: list[list[int]], eos_token_ids: list[int]
) -> list[dict[str, Any]]:
    """Return the rows with what reward functions are given beside the dataset's columns."""
    return [
        {**row, "prompt_ids": asked, "finished": answer[-1] in eos_token_ids}
        for row, asked, answer in zip(rows, prompt_ids, completion_ids, strict=True)
    ]


def given_to_rewards(
    rows: list[dict[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
) -> dict[str, Any]:
    """Return what TRL calls a reward function with, but for its loggers and the state."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    for name in ("prompt", "completion", "completion_ids"):  # TRL passes on no columns of these names
        columns.pop(name, None)
    return {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}


def lengths_of(prompt_mask: Tensor, completion_mask: Tensor) -> list[tuple[int, int]]:
    """Return the real tokens of each row's prompt and response, on the host."""
    return [tuple(row) for row in torch.stack([prompt_mask.sum(1), completion_mask.sum(1)], dim=1).tolist()]


def joined(micro_batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the rows of a rollout's micro-batches in the order of generation."""
    columns = [name for name in micro_batches[0] if name not in ("step_tokens", "lengths")]
    rollout = {name: torch.cat([batch[name] for batch in micro_batches]) for name in columns}
    order = rollout["row"].argsort()
    return {name: values[order] for name, values in rollout.items()}


def permuted(lengths: list[int], mini_batches: int, seed: int) -> list[int]:
    """
    Return the order of rows for a pass over a rollout: which minibatch a row is in depends on the seed alone.

    Within a minibatch the shorter rows come first, so that a micro-batch has rows of about one length. The gradient of
    the minibatch is the same.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    size = len(order) // mini_batches
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [row for chunk in chunks for row in sorted(chunk, key=lengths.__getitem__)]
