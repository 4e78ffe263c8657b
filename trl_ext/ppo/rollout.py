"""Hold one rollout: the answers, their log-probs, values and scores, and the micro-batches made from it."""

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from ..data.calls import repeated_calls
from ..functional import importance_weights, kl_estimate, last_token_index, turn_sums
from ..models.histories import Histories
from .config import PPOConfig
from .environments import Calls
from .inputs import with_prompts


@dataclass(frozen=True)
class Rollout:
    """
    Hold this process's rows of a rollout, in the order of generation.

    There are B rows: responses padded to T tokens, to prompts padded to P tokens, scored by F reward functions.
    Log-probs are in nats.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; 1 = real token, EOS and what tools wrote included.
        logprobs: (B, T), of the policy before the update. They are the sampler's where these can stand in for a
            forward pass of the policy.
        ref_logprobs: (B, T), of the reference; None without a reference.
        values: (B, T), of the critic; None in evaluation, and with `baseline="mean"`.
        sampler_logprobs: (B, T), of the distribution that was drawn from; None if they are not known, or are in
            `logprobs` already.
        rewards_per_func: (B, F), NaN where a function returned None.
        scores: (B,), the weighted rewards after the rule for a missing EOS, not normalised; NaN for rows that take no
            part in training.
        ended: (B,), whether the response is complete: it ends by EOS, and no tool call waits for an answer.
        lengths: (B,), number of tokens that the policy drew, EOS included.
        token_scores: (B, T), the part of the scores that belongs to single tokens; None if no token was scored. The
            hooks of [`PPOTrainer`] get token scores that are normalised as the scores are.
        tool_mask: (B, T), TRL's name: 1 = drawn by the policy, 0 = what a tool or an environment said, and padding.
            None if the policy drew all tokens.
        end_values: (B,), the critic's value after the response's last token, or before that token where the response
            fills the context; None without `bootstrap_truncated`.
        environments: for each environment's name a (B,) bool, whether the row was played in that environment.
        tool_lengths: (B,), number of tokens in the response that tools and environments wrote.
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
    ended: Tensor
    lengths: Tensor
    token_scores: Tensor | None = None
    tool_mask: Tensor | None = None
    end_values: Tensor | None = None
    environments: dict[str, Tensor] = field(default_factory=dict)
    tool_lengths: Tensor | None = None
    repeats: Tensor | None = None

    @property
    def drawn(self) -> Tensor:
        """Return the (B, T) mask of the tokens that the policy sampled."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def valid(self) -> Tensor:
        """Return for each of the B rows whether it has a score, and so takes part in training."""
        return ~self.scores.isnan()

    @property
    def mask(self) -> Tensor:
        """Return the (B, T) mask of the tokens to train on: sampled by the policy, in rows that have a score."""
        return self.drawn * self.valid[:, None]

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
        Compute weights of the policy's loss that correct for answers sampled from another distribution.

        Returns:
            The weights, (B, T) or (B, 1), and a mask of the weights that a bound changed; None if
            `importance_sampling_mode` asks for no correction.
        """
        mode = args.importance_correction
        if mode == "none":
            return None
        assert self.sampler_logprobs is not None
        bounds = args.importance_sampling_clip_min, args.importance_sampling_clip_max
        ours, drawn = self.logprobs, self.sampler_logprobs
        if args.gae_level == "turn" and mode.startswith("token"):  # a turn is one action
            ours, drawn = turn_sums(ours, self.drawn), turn_sums(drawn, self.drawn)
        return importance_weights(ours, drawn, self.drawn, mode, *bounds)

    def bootstrapped(self, rewards: Tensor, gamma: float) -> Tensor:
        """Add γ · `end_values` to the (B, T) rewards, at the last token of each row that was cut off before EOS."""
        if self.end_values is None:
            return rewards
        is_last = torch.arange(rewards.size(1), device=rewards.device) == last_token_index(self.mask)[:, None]
        return rewards + torch.where(is_last & ~self.ended[:, None], gamma * self.end_values[:, None], 0.0)

    def rows_for_training(
        self, advantages: Tensor, returns: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors that an update needs, by name, with a row for each response."""
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


def check_hook(name: str, rollout: Rollout, *returned: Tensor) -> None:
    """Raise if the trainer's hook `name` returned a tensor that is not (B, T)."""
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
    Weigh each response's rewards, and apply the rule for responses that do not end by EOS (N+ details, 2403.17031).

    score = Σ_f weight_f · reward_f over the functions that apply to the response. Without EOS the score is replaced by
    `missing_eos_score`, or lowered by `missing_eos_penalty`. A function of weight 0 only measures: the scores are the
    same with and without it, bit for bit.

    Args:
        rewards: (B, F), NaN where a function does not apply.
        weights: (F,).
        ended: (B,), whether the response ends by EOS.
        missing_eos_score, missing_eos_penalty: score units; None for no replacement, or no penalty.

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
    Add up the weighted scores that reward functions gave to single tokens, at each token.

    Args:
        given: for each of F functions a list of B entries: one float per token of the response, or None if the
            function scored the response as a whole.
        weights: (F,).
        ended: (B,), whether the response ends by EOS.
        width: T.
        missing_eos_score: if not None, it replaces the score of a response without EOS, whose tokens then get 0.

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


class Collection:
    """
    Collect one rollout while TRL runs it.

    TRL's `_generate_and_score_completions` sets up environments, generates, and then calls the trainer's
    `_calculate_rewards`, which runs our forward passes and the reward functions. TRL itself would keep neither the
    reference's log-probs nor the critic's values.

    Args:
        trainer: the trainer that collects.
        inputs: dataset rows, one for each response.
    """

    def __init__(self, trainer: Any, inputs: list[dict[str, Any]]):
        self.trainer = trainer
        self.rows, self.given_ids = with_prompts(inputs, trainer._tokenizer)
        self.prompt_ids: list[list[int]] = []
        self.completion_ids: list[list[int]] = []
        self.tool_mask: list[list[int]] | None = None  # 1 = drawn by the policy; None if all tokens are
        self.drawn_first: list[list[int]] | None = None  # the sampler's answers to the prompts, in the first turn
        self.drawn_logprobs: list[list[float]] | None = None  # each token's when it was drawn; 0 for tools' tokens
        self.ended: list[bool] = []
        self.repeats: list[list[bool]] = []  # for each tool call, whether an earlier call of its row was the same
        self.started: dict[int, Any] = {}  # reward functions that were started ahead, by their place
        self.tensors: dict[str, Tensor] = {}
        self.passes: dict[str, Any] = {}  # (B, T) each, or None
        self.rewards_per_func = torch.empty(0)  # (rows of all processes, F)
        size = trainer.args.local_rollout_forward_batch_size
        self.histories = Histories(size) if trainer.tools else None  # what the policy has read of each episode
        self.longest_prompt = 0  # tokens
        self.most_rows = 0  # the most rows of any process in a later turn, where all processes generate together
        self.calls = Calls(trainer.args.tool_timeout, trainer._mistakes)

    def generated(self, output: tuple) -> tuple:
        """Keep the result of TRL's `_generate`, and return it unchanged."""
        self.prompt_ids, self.completion_ids, self.tool_mask, completions, self.drawn_logprobs, *_ = output
        ends = self.trainer.eos_token_ids
        has_tools = bool(self.trainer.tools)
        masks = self.tool_mask or [[1]] * len(self.completion_ids)
        self.ended = [
            ids[-1] in ends and not (has_tools and (waits_for_tools(completion) or not mask[-1]))
            for ids, mask, completion in zip(self.completion_ids, masks, completions, strict=True)
        ]
        self.repeats = list(map(repeated_calls, completions))
        self.started = self.trainer._started_ahead()
        return output

    def rows_with_answers(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the columns that reward functions get."""
        rows = with_answers(inputs, self.prompt_ids, self.ended)
        is_greedy = self.trainer._evaluation is not None and self.trainer._evaluation.is_greedy
        return [{**row, "is_greedy": True} for row in rows] if is_greedy else rows

    def start_scoring(self, rows: list[dict[str, Any]], prompts: list, completions: list) -> None:
        """Start the reward functions that score in the background, with the arguments that TRL will pass to them."""
        trainer = self.trainer
        given = given_to_rewards(rows, prompts, completions, self.completion_ids, trainer.environments)
        for place, function in enumerate(trainer.reward_funcs):
            waiting, started = trainer.metrics.timed("score_wait"), self.started.get(place)
            function.start(waiting, started, **given, trainer_state=trainer.state)

    def make_passes(self) -> None:
        """Run policy, critic and reference over the prompts and responses."""
        trainer, args = self.trainer, self.trainer.args
        self.tensors = tensors = self._padded()
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        lengths = lengths_of(tensors["prompt_mask"], tensors["completion_mask"])
        width, size = tensors["completion_ids"].size(1), args.local_rollout_forward_batch_size
        drawn = self._drawn_logprobs(tensors)
        trusted = drawn if trainer._trusts_sampler else None
        outputs: dict[str, Any] = {"logprobs": trusted}
        goes_on = args.bootstrap_truncated and trainer.model.training
        if goes_on:  # a token behind each answer, for the value after its last one, if the context has room
            context = getattr(trainer._actor_critic.policy.config.get_text_config(), "max_position_embeddings", inf)
            ids = torch.cat([ids, ids[:, -1:]], dim=1)
            lengths = [(asked, drawn + (asked + drawn < context)) for asked, drawn in lengths]
        asked = {"with_logprobs": trusted is None, "with_values": trainer.model.training and args.baseline != "mean"}
        with torch.no_grad(), trainer._no_checkpointing(), trainer.metrics.timed("logprobs"):
            if any(asked.values()):
                outputs |= trainer._passes(trainer.model, ids, lengths, width + goes_on, size, **asked)
            if args.use_ref_model:
                outputs["ref_logprobs"] = trainer._reference_logprobs(ids, lengths, width + goes_on, size)
        self.passes = {
            "sampler_logprobs": drawn if trusted is None else None,
            "end_values": None,
            **{name: outputs.get(name) for name in ("logprobs", "ref_logprobs", "values")},
        }
        if goes_on:
            last = torch.tensor([max(drawn - 1, 0) for _, drawn in lengths], device=ids.device)
            self.passes["end_values"] = outputs["values"].gather(1, last[:, None])[:, 0]
            for name in ("ref_logprobs", "values", *(["logprobs"] if trusted is None else [])):
                if outputs.get(name) is not None:
                    self.passes[name] = outputs[name][:, :width] * tensors["completion_mask"]

    def rollout(self) -> Rollout:
        """Return the rollout that was collected."""
        trainer, args = self.trainer, self.trainer.args
        mask = self.tensors["completion_mask"]
        device = mask.device
        ended = torch.tensor(self.ended, device=device)
        # If the last token of a cut-off row happens to be a PAD that the policy drew, TRL takes the row for finished
        takes_part = mask.any(1) & (ended | (not args.mask_truncated_completions))
        rewards = trainer._local(self.rewards_per_func)
        scores = sequence_scores(
            rewards, trainer.reward_weights, ended, args.missing_eos_score, args.missing_eos_penalty
        )
        token_scores = summed_token_scores(
            [function.token_scores for function in trainer.reward_funcs],
            trainer.reward_weights,
            ended,
            mask.size(1),
            args.missing_eos_score,
        )
        tool_mask = self.tensors.get("tool_mask")
        if token_scores is not None and tool_mask is not None:
            token_scores = onto_policy_tokens(token_scores, tool_mask)
        drawn = [sum(row) for row in self.tool_mask or [[1] * len(ids) for ids in self.completion_ids]]
        told = [len(ids) - of_policy for ids, of_policy in zip(self.completion_ids, drawn, strict=True)]
        repeats = padded(self.repeats, nan, "right", dtype=torch.float32)
        return Rollout(
            **self.tensors,
            **self.passes,
            rewards_per_func=rewards,
            scores=scores.masked_fill(~takes_part, torch.nan),
            token_scores=token_scores,
            ended=ended,
            environments={name: torch.tensor(rows, device=device) for name, rows in self._environments().items()},
            lengths=torch.tensor(drawn, device=device, dtype=torch.float32),
            tool_lengths=torch.tensor(told, device=device, dtype=torch.float32),
            repeats=repeats.to(device),
        )

    def _environments(self) -> dict[str, list[bool]]:
        """Return, for each environment's name, which rows were played in it; all processes have the same names."""
        trainer = self.trainer
        if trainer.environments is None:
            return {}
        if None in trainer.environment_factories:  # TRL's name for the environment, if there is only one
            return {type(trainer.environments[0]).__name__: [True] * len(self.rows)}
        played = [row["environment"] for row in self.rows]
        return {name: [name == each for each in played] for name in trainer.environment_factories}

    def _padded(self) -> dict[str, Tensor]:
        """Return (B, P) and (B, T) ids and masks, as TRL pads them."""
        trainer = self.trainer
        pad, multiple = trainer._tokenizer.pad_token_id, trainer.args.pad_to_multiple_of
        prompts, completions = self.prompt_ids, self.completion_ids
        ones = [[1] * len(ids) for ids in completions]
        if trainer.args.mask_truncated_completions:
            finished = [*trainer.eos_token_ids, pad]
            ones = [row if ids[-1] in finished else [0] * len(row) for row, ids in zip(ones, completions, strict=True)]
        rows = {
            "prompt_ids": (prompts, pad, "left"),
            "prompt_mask": ([[1] * len(ids) for ids in prompts], 0, "left"),
            "completion_ids": (completions, pad, "right"),
            "completion_mask": (ones, 0, "right"),
        }
        if self.tool_mask is not None:
            rows["tool_mask"] = (self.tool_mask, 0, "right")
        device = trainer.accelerator.device
        return {name: padded(*given, multiple=multiple).to(device) for name, given in rows.items()}

    def _drawn_logprobs(self, tensors: dict[str, Tensor]) -> Tensor | None:
        """
        Return the sampler's (B, T) log-probs.

        If some process does not know them for all of its tokens, return None; or raise, if training needs them.
        """
        trainer, mask = self.trainer, tensors["completion_mask"]
        logprobs = None
        if trainer._keeps_logprobs and self.drawn_logprobs is not None and self._is_as_drawn():
            rows = [[nan if x is None else x for x in row] for row in self.drawn_logprobs]
            logprobs = padded(rows, 0.0, "right", width=mask.size(1), dtype=torch.float32).to(mask.device)
            logprobs = logprobs.masked_fill(mask == 0, 0.0)
        is_known = logprobs is not None and logprobs.isfinite().all().item()
        who_knows = trainer.accelerator.gather(mask.new_tensor([is_known]))
        if who_knows.all():
            return logprobs
        if trainer.model.training and trainer.args.needs_sampler_logprobs:
            raise RuntimeError(
                f"The sampler's log-probs are missing on {int((~who_knows.bool()).sum())} of {len(who_knows)} "
                "process(es), or belong to other tokens. "
                f"`importance_sampling_mode={trainer.args.importance_sampling_mode!r}` and "
                f"`old_logprobs={trainer.args.old_logprobs!r}` need them. Return the log-probs with the answers, and "
                "do not change answers afterwards; or set `importance_sampling_mode='none'` and "
                "`old_logprobs='recompute'` to train without a correction."
            )
        return None

    def _is_as_drawn(self) -> bool:
        """Return whether the answers are still those that were generated, not changed by other code."""
        assert self.drawn_logprobs is not None
        is_of_all = [len(row) for row in self.drawn_logprobs] == [len(ids) for ids in self.completion_ids]
        first = self.drawn_first  # None with a `rollout_func`, which draws by itself
        return is_of_all and (
            first is None
            or all(ids[: len(drawn)] == drawn for ids, drawn in zip(self.completion_ids, first, strict=True))
        )


def waits_for_tools(completion: Any) -> bool:
    """Return whether a response ends with tool calls that got no answer, since the episode was cut off there."""
    return isinstance(completion, list) and bool(completion) and bool(completion[-1].get("tool_calls"))


def onto_policy_tokens(values: Tensor, tool_mask: Tensor) -> Tensor:
    """
    Move the values at tool tokens onto the policy's last token before them. Each row keeps its sum.

    Args:
        values: (B, T), any unit.
        tool_mask: (B, T), 1 = drawn by the policy; padding is 0. The first token of a row is the policy's.

    Returns:
        (B, T), 0 where `tool_mask` is 0.
    """
    places = torch.arange(values.size(1), device=values.device).expand_as(values)
    owners = torch.where(tool_mask.bool(), places, 0).cummax(dim=1).values
    return torch.zeros_like(values).scatter_add(1, owners, values)


def padded(
    rows: list[list],
    value: float,
    side: str,
    multiple: int | None = None,
    width: int = 0,
    dtype: torch.dtype = torch.long,
) -> Tensor:
    """
    Pad rows of numbers with `value` into a (B, L) tensor.

    L is the length of the longest row, at least `width`, rounded up to a multiple of `multiple`.
    """
    width = max(width, max((len(row) for row in rows), default=0))
    width += -width % (multiple or 1)
    missing = [[value] * (width - len(row)) for row in rows]
    filled = [m + row if side == "left" else row + m for row, m in zip(rows, missing, strict=True)]
    return torch.tensor(filled, dtype=dtype)


def with_answers(rows: list[dict[str, Any]], prompt_ids: list[list[int]], ended: list[bool]) -> list[dict[str, Any]]:
    """Add the columns `prompt_ids` and `finished`, which reward functions get besides the dataset's columns."""
    return [
        {**row, "prompt_ids": asked, "finished": finished}
        for row, asked, finished in zip(rows, prompt_ids, ended, strict=True)
    ]


def given_to_rewards(
    rows: list[dict[str, Any]],
    prompts: list,
    completions: list,
    completion_ids: list[list[int]],
    environments: list | None = None,
) -> dict[str, Any]:
    """Return the arguments that TRL calls a reward function with, except the loggers and the trainer's state."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    if environments is not None:
        columns["environments"] = environments
    for name in ("prompt", "completion", "completion_ids"):  # TRL passes on no columns of these names
        columns.pop(name, None)
    return {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}


def lengths_of(prompt_mask: Tensor, completion_mask: Tensor) -> list[tuple[int, int]]:
    """Return the numbers of real tokens in each row's prompt and response, as Python integers."""
    return [tuple(row) for row in torch.stack([prompt_mask.sum(1), completion_mask.sum(1)], dim=1).tolist()]


def joined(micro_batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Join a rollout's micro-batches into one batch, with the rows in the order of generation."""
    columns = [name for name in micro_batches[0] if name not in ("step_tokens", "step_turns", "lengths")]
    rollout = {name: torch.cat([batch[name] for batch in micro_batches]) for name in columns}
    order = rollout["row"].argsort()
    return {name: values[order] for name, values in rollout.items()}


def permuted(lengths: list[int], mini_batches: int, seed: int) -> list[int]:
    """
    Return the order of rows for a pass over a rollout: which minibatch a row is in depends on the seed alone.

    Within a minibatch the shorter rows come first, so a micro-batch has rows of similar length. The order within a
    minibatch does not change the minibatch's gradient.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    size = len(order) // mini_batches
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [row for chunk in chunks for row in sorted(chunk, key=lengths.__getitem__)]
