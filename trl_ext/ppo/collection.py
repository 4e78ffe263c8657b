"""Collect a rollout: TRL generates and scores the completions; policy, critic and reference are run over them here."""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ..data.messages import repeated_calls
from ..models.adapters import REFERENCE
from ..models.decoding import Histories, SamplerRecorder
from ..models.generation import padded
from ..models.weights import base_model_of, context_of, evaluating, gathered_by_zero3, kept_by_fsdp2
from ..upstream.names import disable_gradient_checkpointing, pad
from ..upstream.statements import temporarily
from .config import PPOConfig
from .environments import ToolCalls, guarded, step_rewards
from .metrics import PPOMetrics
from .passes import Passes
from .reward_calls import DeferredErrors
from .rollout import Rollout, onto_policy_tokens, sequence_scores, summed_token_scores, token_counts_of
from .vllm import RolloutsAhead, ServerGuard


@dataclass
class Collection:
    """Hold what has been collected so far of a rollout of B completions."""

    rows: list[dict[str, Any]]  # of the dataset
    calls: ToolCalls
    histories: Histories | None  # what the policy has read of each episode; None without tools
    longest_prompt: int = 0  # tokens
    most_rows: int = 0  # the most rows of any process in a later turn, where all processes generate together
    first_completions: list[list[int]] | None = None  # as sampled in the first turn; None with a `rollout_func`
    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    tool_mask: list[list[int]] | None = None  # 1 = sampled by the policy; None if all tokens are
    sampler_logprobs: list[list[float]] | None = None  # each token's when it was sampled; 0 for tools' tokens
    finished: list[bool] = field(default_factory=list)
    repeats: list[list[bool]] = field(default_factory=list)  # for each tool call, whether the row has made it before
    tensors: dict[str, Tensor] = field(default_factory=dict)  # (B, P) and (B, T) ids and masks
    passes: dict[str, Tensor | None] = field(default_factory=dict)  # (B, T) each
    rewards_per_func: Tensor = field(default_factory=lambda: torch.empty(0))  # (rows of all processes, F)

    @property
    def is_as_sampled(self) -> bool:
        """
        Return whether each completion has as many of the sampler's log-probs as tokens, and still begins with the
        tokens that were sampled before the first tool call.
        """
        if self.sampler_logprobs is None:
            return False
        lengths = [len(row) for row in self.sampler_logprobs]
        firsts = self.first_completions or [[]] * len(self.completion_ids)
        return lengths == [len(ids) for ids in self.completion_ids] and all(
            ids[: len(first)] == first for ids, first in zip(self.completion_ids, firsts, strict=True)
        )


class RolloutTrainer(GRPOTrainer):
    """
    Generate and score a rollout with GRPO's trainer, and keep what PPO needs of it.

    A turn is what the policy samples until it calls tools or ends; without tools it is the whole completion.

    The methods stand in the order in which a rollout calls them. `_collect` gives the rows to TRL, which sets up the
    environments, then calls `_generate` (which calls `_tool_call_loop`, and `_generate_single_turn` for each turn),
    then `_calculate_rewards`. What TRL computes besides (its own padding, GRPO's advantages) is not used.
    """

    reward_weights: Tensor
    reward_processing_classes: list
    reward_func_names: list[str]
    _collection: Collection  # while a rollout is collected
    _is_built = False  # whether GRPO's constructor, which makes the first environment on all processes, has ended

    # `PPOTrainer` sets these, the first two at the end of its constructor
    metrics: PPOMetrics
    reward_funcs: list  # each a `CheckedReward`
    _vllm_server: ServerGuard | None = None  # with a vLLM server
    _ahead: RolloutsAhead | None = None  # while it trains with `rollouts_ahead`

    def __init__(self, model: Any, *, args: PPOConfig, environment_factory: Any, **kwargs: Any):
        # Of reward functions, environments and vLLM. GRPO's constructor makes environments already
        self._errors = DeferredErrors()
        super().__init__(
            model, args=args, environment_factory=self._guarded(environment_factory, args.tool_timeout), **kwargs
        )
        self._is_built = True
        if self.environment_factories:
            self._reward_steps({type(pool[0]) for pool in self._environment_pool.values()})
        self._passes = Passes(self.accelerator, args)

    def _guarded(self, environment_factory: Any, timeout: float | None) -> Any:
        """Wrap a factory, or each in a dict, so that all processes raise its errors; `timeout` in seconds a call."""

        def guard(factory: Any) -> Any:
            make = guarded(factory, timeout, self._errors)

            def probed() -> Any:
                environment = make()
                if not self._is_built:
                    self._errors.raise_everywhere(0)
                if not (self.reward_funcs or hasattr(environment, "get_reward")):  # else TRL would miss a reward
                    self._reward_steps({type(environment)})
                return environment

            return probed

        if isinstance(environment_factory, dict):
            return {name: guard(factory) for name, factory in environment_factory.items()}
        return environment_factory and guard(environment_factory)

    def _reward_steps(self, kinds: set[type]) -> None:
        """Add a reward function for each environment class that has `_step_reward`, unless it has one already."""
        for kind in sorted(kinds, key=lambda kind: kind.__name__):
            function = step_rewards(lambda: self._collection, kind)
            if hasattr(kind, "_step_reward") and function.__name__ not in self.reward_func_names:
                self.reward_funcs.append(function)
                self.reward_func_names.append(function.__name__)
                self.reward_processing_classes.append(None)
                self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])

    @property
    def _actor_critic(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _collect(self, inputs: list[dict[str, Any]]) -> Rollout:
        """Let TRL generate and score completions of the dataset rows `inputs`; return all that PPO needs of them."""
        self._actor_critic.train_adapters()
        histories = Histories(self.args.local_rollout_forward_batch_size) if self.tools else None
        self._collection = Collection(inputs, ToolCalls(self.args.tool_timeout, self._errors), histories)
        try:
            super()._generate_and_score_completions(inputs)
        finally:
            for function in self.reward_funcs:
                function.drop_started()
        return self._rollout()

    # ---- Completions ----

    def _generate(self, prompts: list) -> tuple:
        """Let TRL sample whole completions, tools' texts included, and keep what PPO needs of them."""
        collection = self._collection
        if self.environments is not None:
            self._errors.raise_everywhere(self.state.global_step)  # of `reset`
        if self.tools:
            for name in ("_sync_tool_dicts", "_async_tool_dicts"):
                setattr(self, name, collection.calls.wrap(getattr(self, name), self.environments))
        output = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *_ = output
        collection.prompt_ids = prompt_ids
        collection.completion_ids = completion_ids
        collection.tool_mask = tool_mask
        collection.sampler_logprobs = logprobs
        collection.finished = [
            ids[-1] in self.eos_token_ids and not (self.tools and (waits_for_tools(completion) or not mask[-1]))
            for ids, mask, completion in zip(
                completion_ids, tool_mask or [[1]] * len(completion_ids), completions, strict=True
            )
        ]
        collection.repeats = list(map(repeated_calls, completions))
        return output

    def _generate_single_turn(
        self, prompt_ids: list, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Sample one turn of each row; keep the tokens of the first turn."""
        collection = self._collection
        collection.calls.turn += 1
        self._check_room(prompt_ids)
        if collection.calls.turn and self._generates_together:
            self._agree_on_rows(len(prompt_ids))
        completion_ids, logprobs = self._generate_completions(prompt_ids, *args, **kwargs)
        if not collection.calls.turn:
            collection.first_completions = list(completion_ids)
        return completion_ids, logprobs

    def _check_room(self, prompt_ids: list[list[int]]) -> None:
        """Raise a `RuntimeError` on all processes if `reset` made a prompt too long for the policy's context."""
        if self.environments is None:
            return
        longest = max(map(len, prompt_ids))
        context = context_of(self._actor_critic.policy)
        if longest >= context:
            error = ValueError("shorten the prompt, or use a policy with a longer context")
            what = f"a prompt with the text that `reset` returned has {longest} tokens, the policy's context {context}"
            self._errors.add(what, error)
        if not self._collection.calls.turn:
            self._errors.raise_everywhere(self.state.global_step)

    def _generate_completions(
        self,
        prompt_ids: list,  # each row's tokens so far: prompt, earlier turns, tools' texts
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Generate one turn; return each row's new tokens, and their log-probs, nats (None if not kept)."""
        generate = super()._generate_single_turn
        padding = [[self._tokenizer.pad_token_id]]
        if self._ahead is not None:
            if self.model.training:
                assert self._vllm_server is not None
                taken = self._ahead.take(prompt_ids, self.state.global_step, self.state.max_steps)
                return self._vllm_server.answered(taken)
            self._ahead.wait_for_all(self.state.global_step)  # TRL may send the server new weights
        with self.metrics.timed("generate"):
            if self.use_vllm:
                # Of all completions TRL gives a process as many as it has prompts, so all processes need equally many
                rows = len(prompt_ids)
                missing = self._collection.most_rows - rows if self._vllm_gathers else 0
                prompt_ids = [*prompt_ids, *padding * missing]
                generated = generate(prompt_ids, *args, **kwargs)
                ids, logprobs = generated if self._vllm_server is None else self._vllm_server.answered(generated)
                return ids[:rows], logprobs and logprobs[:rows]
            recorder = SamplerRecorder() if self._keeps_logprobs else None
            recording = {"sampler_recorder": recorder, "histories": self._collection.histories}
            longest = self._tokens_left(prompt_ids)
            size = self.args.local_rollout_forward_batch_size
            chunks = [prompt_ids[start : start + size] for start in range(0, len(prompt_ids), size)]
            with self._gathered_for_generation():
                limited = temporarily(self.generation_config, max_new_tokens=longest)
                with temporarily(self._actor_critic, **recording), limited:
                    completion_ids = [ids for chunk in chunks for ids in generate(chunk, *args, **kwargs)[0]]
                # Where processes generate together, each calls `generate` as often as the one with most rows
                with temporarily(self.generation_config, max_new_tokens=1):
                    for _ in range(len(chunks), math.ceil(self._collection.most_rows / size)):
                        generate(padding, *args, **kwargs)
            # A row ends where the context does; what `generate` returns beyond it is padding
            context = context_of(self._actor_critic.policy)
            completion_ids = [
                ids[: max(1, min(len(ids), context - len(prompt)))]
                for ids, prompt in zip(completion_ids, prompt_ids, strict=True)
            ]
            return completion_ids, None if recorder is None else recorder.take(completion_ids)

    def _tokens_left(self, prompt_ids: list[list[int]]) -> int:
        """Return how many tokens to generate in this turn: as many as any row may still get."""
        # If a row with less room generates too many tokens, TRL cuts them off
        collection = self._collection
        limit = self.max_completion_length
        if collection.calls.turn == 0:
            collection.longest_prompt = max(map(len, prompt_ids))
        elif collection.longest_prompt:  # else a `rollout_func` has sampled the first turn
            limit -= min(map(len, prompt_ids)) - collection.longest_prompt
        return max(1, min(limit, self.max_completion_length))

    def _gathered_for_generation(self) -> AbstractContextManager:
        """Return a context in which a sharded policy is whole on each process, if a setting asks for it."""
        if not self.args.ds3_gather_for_generation:
            return nullcontext()
        policy = self._actor_critic.policy
        if self._dist.is_zero3:
            return gathered_by_zero3(self.model_wrapped, policy, self.args)
        return kept_by_fsdp2(policy)

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple:
        """Let TRL run the turns after the first; then keep generating until each process has had its last one."""
        # Where processes generate together, each of these turns begins with `_agree_on_rows` on all processes: in
        # `_generate_single_turn` on those that have rows left, and below, with 0, on the others. Then each calls
        # `generate` as often as the one with most rows. If the most is 0, all have ended
        self._collection.calls.turn = 0  # also of a `rollout_func`, which has sampled the first turn by itself
        output = super()._tool_call_loop(*args, **kwargs)
        while self._generates_together and self._agree_on_rows(0):  # other processes have more turns than this one
            with temporarily(self, max_completion_length=1):
                self._generate_completions([[self._tokenizer.pad_token_id]], None, {}, 1)
        return output

    @property
    def _generates_together(self) -> bool:
        """Return whether all processes must call `generate` at the same time."""
        is_sharded = self._dist.is_zero3 or self.is_fsdp_enabled
        return self.accelerator.num_processes > 1 and (is_sharded or self._vllm_gathers)

    @property
    def _vllm_gathers(self) -> bool:
        """Return whether one vLLM gets the prompts of several processes."""
        return self.use_vllm and (self.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1)

    def _agree_on_rows(self, rows: int) -> int:
        """Store and return the maximum over processes of `rows`, a process's number of prompts in this turn."""
        everywhere = self.accelerator.gather(torch.tensor([rows], device=self.accelerator.device))
        self._collection.most_rows = int(everywhere.max())
        return self._collection.most_rows

    @property
    def _keeps_logprobs(self) -> bool:
        """Return whether to keep the sampler's log-probs, which training or metrics need."""
        return self._trusts_sampler or self.args.may_sample_off_policy or self.args.importance_correction != "none"

    @property
    def _trusts_sampler(self) -> bool:
        """Return whether to use the sampler's log-probs instead of computing them by a pass of the policy."""
        args = self.args
        if args.old_logprobs != "auto":
            is_trusted = args.old_logprobs == "sampler"
        else:
            is_plain = not args.may_sample_off_policy and args.importance_correction == "none"
            policy = base_model_of(self._actor_critic.policy)
            is_quantized = getattr(policy.config, "quantization_config", None) is not None
            is_exact = self.accelerator.mixed_precision == "no" and policy.dtype == torch.float32 and not is_quantized
            is_trusted = is_plain and is_exact and args.disable_dropout
        # Greedy decoding scales by no temperature
        return is_trusted and (self.use_vllm or self.generation_config.do_sample)

    # ---- Passes and scores ----

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        """Run the models, then the F reward functions; return the (rows of all processes, F) rewards."""
        collection = self._collection
        given = zip(inputs, collection.prompt_ids, collection.finished, strict=True)
        rows = [{**row, "prompt_ids": prompt_ids, "finished": finished} for row, prompt_ids, finished in given]

        # What TRL's `_calculate_rewards` makes, too, but only once the models have run
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")}
        if self.environments is not None:
            columns["environments"] = self.environments
        columns |= {"prompts": prompts, "completions": completions, "completion_ids": collection.completion_ids}
        for function in self.reward_funcs:  # those that run in the background start before the models
            function.start(self.metrics.timed("score_wait"), **columns, trainer_state=self.state)

        # TRL has padded and masked the same tokens, but its tensors are local to the method that calls this one
        collection.tensors = self._padded(collection)
        collection.passes = self._run_passes(collection.tensors, self._sampler_logprobs(collection))
        collection.rewards_per_func = self._scored(rows, prompts, completions, completion_ids_list)
        return collection.rewards_per_func

    def _padded(self, collection: Collection) -> dict[str, Tensor]:
        """Return ids and masks by their names in [`Rollout`]: prompts padded on the left, completions on the right."""
        pad_id = self._tokenizer.pad_token_id
        completion_ids = collection.completion_ids
        device = self.accelerator.device
        multiple = self.args.pad_to_multiple_of
        tensors = {}
        tensors["prompt_ids"], tensors["prompt_mask"] = padded(collection.prompt_ids, "left", device, pad_id, multiple)
        tensors["completion_ids"], mask = padded(completion_ids, "right", device, pad_id, multiple)
        if self.args.mask_truncated_completions:
            finished = [*self.eos_token_ids, pad_id]
            mask *= torch.tensor([[ids[-1] in finished] for ids in completion_ids], device=device)
        tensors["completion_mask"] = mask
        if collection.tool_mask is not None:
            tensors["tool_mask"], _ = padded(collection.tool_mask, "right", device, 0, multiple)
        return tensors

    def _sampler_logprobs(self, collection: Collection) -> Tensor | None:
        """Return the sampler's (B, T) log-probs, nats; None if that of any token on any process is unknown."""
        mask = collection.tensors["completion_mask"]
        logprobs = None
        if self._keeps_logprobs and collection.is_as_sampled:
            rows = [[math.nan if x is None else x for x in row] for row in collection.sampler_logprobs or []]
            tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
            logprobs = pad(tensors, 0.0, "right", self.args.pad_to_multiple_of).to(mask.device)
            logprobs = logprobs.masked_fill(mask == 0, 0.0)
        is_known = logprobs is not None and logprobs.isfinite().all().item()
        if self.accelerator.gather(mask.new_tensor([is_known])).all():
            return logprobs
        if self.model.training and self.args.needs_sampler_logprobs:
            raise RuntimeError(
                "The sampler's log-probs are missing, or do not belong to the completions' tokens, but "
                f"`importance_sampling_mode={self.args.importance_sampling_mode!r}` and "
                f"`old_logprobs={self.args.old_logprobs!r}` need them. Return them from `rollout_func` as `logprobs`, "
                "and change no completion after it was sampled; or set `importance_sampling_mode='none'` and "
                "`old_logprobs='recompute'` to train without a correction."
            )
        return None

    def _run_passes(self, tensors: dict[str, Tensor], sampler_logprobs: Tensor | None) -> dict[str, Tensor | None]:
        """Run policy, critic and reference; return their fields of [`Rollout`], given what `_padded` returned."""
        # `sampler_logprobs` are (B, T), nats; None if they are not known
        args = self.args
        mask = tensors["completion_mask"]
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        counts = token_counts_of(tensors["prompt_mask"], mask)
        width = mask.size(1)
        is_trusted = sampler_logprobs is not None and self._trusts_sampler
        asked = {"with_logprobs": not is_trusted, "with_values": self.model.training and args.baseline != "mean"}
        run = functools.partial(
            self._passes, ids=ids, token_counts=counts, width=width, size=args.local_rollout_forward_batch_size
        )
        found: dict[str, Tensor] = {}
        without_checkpointing = disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs)
        with torch.no_grad(), without_checkpointing, self.metrics.timed("logprobs"):
            if any(asked.values()):
                found |= run(self.model, **asked)
            if args.use_ref_model:
                found["ref_logprobs"] = self._run_reference(run)
        return {
            "logprobs": sampler_logprobs if is_trusted else found["logprobs"],
            "ref_logprobs": found.get("ref_logprobs"),
            "values": found.get("values"),
            "sampler_logprobs": None if is_trusted else sampler_logprobs,
        }

    def _run_reference(self, run: Any) -> Tensor:
        """Return the reference's (B, T) log-probs, nats; `run(model)` runs a model on the rollout."""
        if self.ref_model is not None:
            return run(self.ref_model)["logprobs"]
        # Else it is the policy with its adapter `REFERENCE`, or if there is none, with all adapters off
        names = [REFERENCE] if REFERENCE in self._actor_critic.peft_config else []
        with self._actor_critic.adapters.use(*names), evaluating(self.model):
            return run(self.model)["logprobs"]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        return None, None, None  # GRPO asks for log-probs where it may need them; our passes compute them

    def _scored(self, rows: list, prompts: list, completions: list, completion_ids: list) -> Tensor:
        """Call the F reward functions; return the (rows of all processes, F) rewards, or raise on all processes."""
        # Those in the background are called last: they already run in threads, and a call waits for their scores
        order = sorted(range(len(self.reward_funcs)), key=lambda place: self.reward_funcs[place].in_background)
        functions = [self.reward_funcs[i] for i in order]
        names = [self.reward_func_names[i] for i in order]
        with self.metrics.timed("score"), temporarily(self, reward_funcs=functions, reward_func_names=names):
            rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        self._errors.raise_everywhere(self.state.global_step)
        return rewards[:, torch.tensor(order).argsort().to(rewards.device)]

    def _local(self, gathered: Tensor) -> Tensor:
        """Select this process's rows from the tensor `gathered`, which holds the rows of all processes."""
        size = len(gathered) // self.accelerator.num_processes
        return gathered[self.accelerator.process_index * size :][:size]

    def _rollout(self) -> Rollout:
        """Make a [`Rollout`] from what was collected."""
        collection = self._collection
        args = self.args
        mask = collection.tensors["completion_mask"]
        tool_mask = collection.tensors.get("tool_mask")
        device = mask.device
        weights = self.reward_weights
        finished = torch.tensor(collection.finished, device=device)
        # If the last token of a cut-off row happens to be a PAD that the policy sampled, TRL takes it for finished
        takes_part = mask.any(1) & (finished | (not args.mask_truncated_completions))
        for function, weight in zip(self.reward_funcs, weights, strict=True):
            if weight != 0:  # without the score that is missing, the sum might lack a penalty
                takes_part &= ~torch.tensor(function.failed, device=device)
        rewards = self._local(collection.rewards_per_func)
        scores = sequence_scores(rewards, weights, finished, args.missing_eos_score, args.missing_eos_penalty)
        by_token = [function.token_scores for function in self.reward_funcs]
        token_scores = summed_token_scores(by_token, weights, finished, mask.size(1), args.missing_eos_score)
        if token_scores is not None and tool_mask is not None:
            token_scores = onto_policy_tokens(token_scores, tool_mask)
        lengths = torch.tensor([len(ids) for ids in collection.completion_ids], device=device, dtype=torch.float32)
        of_policy = lengths
        if collection.tool_mask is not None:
            of_policy = torch.tensor([sum(row) for row in collection.tool_mask], device=device, dtype=torch.float32)
        return Rollout(
            **collection.tensors,
            **collection.passes,  # type: ignore[arg-type]
            rewards_per_func=rewards,
            scores=scores.masked_fill(~takes_part, torch.nan),
            token_scores=token_scores,
            finished=finished,
            environments=self._played(collection.rows, device),
            lengths=of_policy,
            tool_lengths=lengths - of_policy,
            repeats=pad([torch.tensor(row, dtype=torch.float32) for row in collection.repeats], math.nan).to(device),
        )

    def _played(self, rows: list[dict[str, Any]], device: Any) -> dict[str, Tensor]:
        """Return for each environment's name a (B,) mask of its rows; all processes get the same names."""
        if self.environments is None:
            return {}
        if None in self.environment_factories:  # TRL's name for the environment, if there is only one
            return {type(self.environments[0]).__name__: torch.ones(len(rows), dtype=torch.bool, device=device)}
        names = [row["environment"] for row in rows]
        return {
            each: torch.tensor([name == each for name in names], device=device) for each in self.environment_factories
        }


def waits_for_tools(completion: Any) -> bool:
    """Return whether `completion`, text or messages, was cut off after tool calls, which no tool has answered."""
    return isinstance(completion, list) and bool(completion) and bool(completion[-1].get("tool_calls"))
