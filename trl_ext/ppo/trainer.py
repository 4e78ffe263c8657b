"""PPO on TRL's `RLOOTrainer`: prompt → rollout → score → token rewards → advantages → loss → step → metrics."""

import copy
import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..control import AgreedControl
from ..functional import (
    approx_kl,
    gae,
    kl_estimate,
    masked_sum,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)
from ..models.actor_critic import LogprobForward, SamplerRecorder, disable_dropout
from ..models.adapter_guard import AdapterGuard
from ..models.adapter_switch import base_model_of
from ..models.sharding import gathered_by_zero3, kept_by_fsdp2
from ..temporarily import temporarily
from ..upstream import RepeatSampler, get_config_model_id, is_conversational
from .base import PPOTrainerBase
from .config import PPOConfig
from .evaluation import EvaluationMixin
from .inputs import check_inputs, migrate
from .kl_controller import KLController
from .metrics import Metrics, global_moments
from .reporting import ReportingMixin
from .resume import ResumeMixin
from .reward_normalizer import RewardNormalizer
from .roles import RolesMixin


class PPOTrainer(AgreedControl, EvaluationMixin, ResumeMixin, ReportingMixin, RolesMixin, PPOTrainerBase):
    """
    Proximal Policy Optimization (1707.06347) for language models, with a critic, GAE and per-token KL rewards
    (1909.08593), on TRL's maintained on-policy trainer.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy: a path or an object.
        reward_funcs (`str`, model, callable, or list of them):
            As in TRL: sequence classifiers with one label (path or object), and functions or async functions
            `(prompts, completions, completion_ids, **columns) -> list[float | None]`.
        args ([`PPOConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset ([`~datasets.Dataset`], the latter also a `dict` of them):
            Rows with `prompt` (text or messages), or with `input_ids`: prompt tokens that are used verbatim. With
            both, the text is for the reward functions only.
        processing_class, reward_processing_classes:
            Tokenizers of the policy and of each reward model.
        value_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Critic: a sequence classifier with one label and the policy's vocabulary. If not given, a copy of the first
            reward model that fits, else the policy's backbone with a zero head; for a policy with an adapter, see
            `peft_config`. The folder of a critic that was saved as an adapter becomes an adapter again.
        ref_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Reference. If not given, a frozen copy of the weights passed in as `model`.
        callbacks, optimizers, quantization_config:
            As in TRL.
        peft_config ([`~peft.LoraConfig`], *optional*):
            Trains an adapter. Its frozen base is the reference, and with another adapter and a value head the critic,
            unless `value_model` is given. If `model` is a [`~peft.PeftModel`], its adapter `default` is trained on
            from where it is, and a frozen copy of that is the reference.
        critic_peft_config ([`~peft.LoraConfig`], *optional*):
            The critic's adapter. If not given, a copy of the policy's config.
        reward_model, data_collator:
            TRL 1.12's names: a reward model that reads the policy's tokens; and nothing, prompts are padded here.
    """

    # The loss is already divided by the token count of the whole optimizer step
    loss_is_scaled_for_ga = True

    _tag_names = ["trl", "ppo", "trl-ext"]
    _name = "PPO"
    _paper = {
        "title": "Fine-Tuning Language Models from Human Preferences",
        "id": "1909.08593",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{ziegler2019fine-tuning,
                title        = {{Fine-Tuning Language Models from Human Preferences}},
                author       = {Daniel M. Ziegler and Nisan Stiennon and Jeffrey Wu and Tom B. Brown and
                                Alec Radford and Dario Amodei and Paul F. Christiano and Geoffrey Irving},
                year         = 2019,
                eprint       = {arXiv:1909.08593}
            }"""),
    }

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        value_model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        critic_peft_config: Any = None,
        *,
        reward_model: Any = None,
        data_collator: Any = None,
    ):
        model, reward_funcs, reward_processing_classes = migrate(
            model, reward_funcs, reward_processing_classes, args, processing_class, reward_model, data_collator
        )
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = PPOConfig(f"{name.split('/')[-1] or 'model'}-PPO")
        check_inputs(model, args, train_dataset, eval_dataset, processing_class, value_model, ref_model, reward_funcs)
        if optimizers[0] is not None and args.critic_learning_rate is not None:
            raise ValueError(
                "`critic_learning_rate` cannot be applied to an optimizer that was passed in `optimizers`: give the "
                "critic its own parameter group there, or drop `critic_learning_rate`."
            )

        self._policy_path = model if isinstance(model, str) else None
        reward_funcs = self._check_roles(model, args, reward_funcs, value_model, peft_config, critic_peft_config)

        with _as_rloo_reads(args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=copy.deepcopy(peft_config),  # PEFT writes into it
            )
        names = [name or f"reward_model_{i}" for i, name in enumerate(self.reward_func_names)]
        # Metrics are kept by name: two lambdas, or two models from folders of one name, would be merged
        self.reward_func_names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
        self.epsilon_low = args.cliprange
        self.epsilon_high = args.cliprange if args.epsilon_high is None else args.epsilon_high
        if args.stop_token_id is not None:
            self.eos_token_ids = [*self.eos_token_ids, args.stop_token_id]
            if self.use_vllm:
                vllm = self.vllm_generation
                vllm.generation_kwargs = {**vllm.generation_kwargs, "stop_token_ids": self.eos_token_ids}
            else:
                self.generation_config.eos_token_id = self.eos_token_ids
        policy = self.model
        self._is_peft = isinstance(policy, PeftModel)
        if base_model_of(policy).config.get_text_config().vocab_size < len(self._tokenizer):
            raise ValueError(
                f"The tokenizer has {len(self._tokenizer)} tokens, the policy's vocabulary only "
                f"{base_model_of(policy).config.get_text_config().vocab_size}: pass the policy's own tokenizer as "
                "`processing_class`."
            )

        is_moe = hasattr(policy.config.get_text_config(), "output_router_logits")
        if args.ddp_find_unused_parameters is None and self.accelerator.ddp_handler is not None and not is_moe:
            # Every parameter takes part in every step, but for experts that no token is routed to
            self.accelerator.ddp_handler.find_unused_parameters = False
        if self.is_deepspeed_enabled and (args.critic_warmup_rollouts or args.max_approx_kl is not None):
            raise ValueError(
                "`critic_warmup_rollouts` and `max_approx_kl` leave steps out, but DeepSpeed's engine makes its step "
                "inside `backward`: use DDP or FSDP, or drop them."
            )

        self._prepare_reference(policy, ref_model)
        actor_critic = self._make_actor_critic(policy, value_model, critic_peft_config)
        if args.disable_dropout:
            for module in (actor_critic, *(f for f in self.reward_funcs if isinstance(f, nn.Module))):
                disable_dropout(module)
        if self.place_model_on_device:
            actor_critic.critic.to(args.device)
        self.model = self.model_wrapped = self.callback_handler.model = actor_critic
        if self._is_peft:
            self.add_callback(AdapterGuard())
        if args.allow_off_policy_sampling and not self.use_vllm:
            self.model.sampler_recorder = SamplerRecorder()

        self._mistakes: list[tuple[str, Exception | None]] = []
        self._prepare_rewards()
        self.kl_controller = KLController(args)
        self.reward_normalizer = RewardNormalizer(args.reward_normalization)

        self._stats = {"train": Metrics(), "eval": Metrics()}
        self._passes: list[tuple[Tensor, Tensor | None]] | None = None  # log-probs and values of a rollout's forwards
        self._rollout: dict[str, Tensor] | None = None  # the current rollout, rows in the order of generation
        self._skip_until = 0  # `_step` at which updates go on after `max_approx_kl`
        self._episodes = self._episodes_at_start = 0
        self._verbatim_ids: list[list[int]] | None = None  # prompt tokens of rows with `input_ids`
        self._clock: dict[str, float] = defaultdict(float)  # seconds spent in each phase since the last log
        self._inner_seconds = 0.0
        self._eval_rows: tuple[int, int] | None = None  # rows seen and rows in all, while evaluating
        self._check_prompt_lengths()
        self._print_schedule()

    # ---- Data ----

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        for column in ("input_ids", "attention_mask", self.args.reward_group_column):
            if column is not None and column not in self._signature_columns:
                self._signature_columns.append(column)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RepeatSampler:
        sampler = super()._get_train_sampler(dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        # RepeatSampler draws on from one generator, so a resumed run would replay epoch 0's order
        sampler.__class__ = _EpochSeededSampler
        sampler.epoch_seed = lambda: seed + int(self.state.epoch or 0)
        return sampler

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], Any, dict]:
        if self._verbatim_ids is not None:
            return self._verbatim_ids, None, {}
        return super()._tokenize_prompts(prompts)

    def _with_prompts(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with `prompt`; those that have only token ids get their text, for reward functions to read."""
        self._verbatim_ids = None
        if "input_ids" not in inputs[0]:
            return inputs
        ids = [
            [
                int(i)
                for i, real in zip(
                    row["input_ids"], row.get("attention_mask") or [1] * len(row["input_ids"]), strict=True
                )
                if real
            ]
            for row in inputs
        ]
        self._verbatim_ids = ids
        if "prompt" in inputs[0]:
            return inputs
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [{**row, "prompt": text} for row, text in zip(inputs, texts, strict=True)]

    def _check_prompt_lengths(self) -> None:
        context = getattr(base_model_of(self.model.policy).config.get_text_config(), "max_position_embeddings", None)
        datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **datasets}.items():
            if dataset is None:
                continue
            columns = [c for c in ("prompt", "input_ids", "attention_mask") if c in dataset.column_names]
            batches = dataset.select_columns(columns).iter(1000)
            lengths = [length for rows in batches for length in self._measure_prompts(rows)]
            if 0 in lengths:
                raise ValueError(
                    f"{lengths.count(0)} of {len(lengths)} prompts in the {name} dataset are empty (the first is row "
                    f"{lengths.index(0)}): the policy needs a token to start from. Filter them out."
                )
            longest = max(lengths)
            too_long = sum(length + self.max_completion_length > (context or math.inf) for length in lengths)
            if too_long:
                raise ValueError(
                    f"{too_long} of {len(lengths)} prompts in the {name} dataset leave no room for "
                    f"`max_completion_length={self.max_completion_length}` in the policy's context of {context} "
                    f"tokens (longest prompt: {longest}): filter them out, or lower `max_completion_length`."
                )

    def _measure_prompts(self, rows: dict[str, list]) -> list[int]:
        inputs = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        inputs = self._with_prompts(inputs)
        prompt_ids = self._tokenize_prompts([row["prompt"] for row in inputs])[0]
        self._verbatim_ids = None
        return [len(ids) for ids in prompt_ids]

    # ---- Rollout ----

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        epoch, position = divmod(self._step % self._steps_per_rollout, self.args.steps_per_generation)
        if position == 0:
            self._buffered_inputs = self._permuted(epoch)
        return self._buffered_inputs[position]

    @property
    def _steps_per_rollout(self) -> int:
        """Micro-batches (forward and backward passes) per process in a rollout."""
        return self.args.steps_per_generation * self.num_iterations

    def _permuted(self, epoch: int) -> list[dict[str, Tensor]]:
        """The rollout's micro-batches in the order of PPO epoch `epoch`, each with the token count of its step."""
        rollout = self._rollout
        assert rollout is not None
        seed = (self.args.seed * 1_000_003 + self._step // self._steps_per_rollout) * 1_009 + epoch
        generator = torch.Generator().manual_seed(seed % 2**63)
        rows = torch.randperm(len(rollout["loss_mask"]), generator=generator).to(rollout["loss_mask"].device)
        tokens = rollout["loss_mask"].sum(1)[rows].view(self.args.num_mini_batches, -1).sum(1)
        tokens = self.accelerator.reduce(tokens, reduction="sum")
        return [
            {
                **{name: values[chunk] for name, values in rollout.items()},
                "step_tokens": tokens[i // self.args.gradient_accumulation_steps],
            }
            for i, chunk in enumerate(rows.chunk(self.args.steps_per_generation))
        ]

    def _generate_single_turn(self, prompt_ids: list, images: Any, multimodal_fields: dict) -> list[list[int]]:
        with self._timed("generate"):
            if self.use_vllm:
                return super()._generate_single_turn(prompt_ids, images, multimodal_fields)
            size = self.args.local_rollout_forward_batch_size
            with self._gathered_for_generation():
                return [
                    ids
                    for start in range(0, len(prompt_ids), size)
                    for ids in super(PPOTrainer, self)._generate_single_turn(
                        prompt_ids[start : start + size], images, multimodal_fields
                    )
                ]

    def _gathered_for_generation(self) -> AbstractContextManager:
        if not self.args.ds3_gather_for_generation:
            return nullcontext()
        policy = self.accelerator.unwrap_model(self.model).policy
        if self._dist.is_zero3:
            return gathered_by_zero3(self.model_wrapped, policy, self.args)
        return kept_by_fsdp2(policy)

    def _generate(self, prompts: list) -> tuple[list, list, list]:
        self._prompt_ids, self._completion_ids, completions = super()._generate(prompts)
        return self._prompt_ids, self._completion_ids, completions

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size=None, **kwargs
    ):
        if self._passes is None:  # a training step, with its own LogprobForward
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        # In a rollout the first pass is the policy's, the second the reference's
        forward = LogprobForward(model, with_values=self.model.training and not self._passes)
        with self._timed("logprobs"):
            result = super()._get_per_token_logps_and_entropies(
                forward,
                input_ids,
                attention_mask,
                logits_to_keep,
                self.args.local_rollout_forward_batch_size,
                **kwargs,
            )
        self._passes.append((result[0], forward.values(logits_to_keep) if forward.with_values else None))
        return result

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        with self._timed("score"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._raise_mistakes()
        self._rewards_per_func = rewards
        return rewards

    def _raise_mistakes(self) -> None:
        """Raise what reward functions did wrong on any process, on all of them."""
        mine = [f"process {self.accelerator.process_index}: {message}" for message, _ in self._mistakes]
        everyones = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if not everyones:
            return
        cause = self._mistakes[0][1] if self._mistakes else None
        self._mistakes.clear()
        raise RuntimeError(f"At step {self.state.global_step}, {'; '.join(everyones)}") from cause

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = self._with_prompts(inputs)
        self._train_adapters()
        if self.model.training:
            self.kl_controller.consume_scale(self.control)
        self._passes = []
        try:
            output = super()._generate_and_score_completions(inputs)
            passes = self._passes
        finally:
            self._passes = None
        if len(passes) != 1 + self._has_reference:
            raise RuntimeError(
                f"TRL made {len(passes)} log-prob passes in a rollout, {1 + self._has_reference} were expected: this "
                "version of TRL is not supported."
            )
        (logprobs, values), *reference = passes
        k1 = logprobs - reference[0][0] if reference else torch.zeros_like(logprobs)

        mode = "train" if self.model.training else "eval"
        scores, ended = self._scores(output["completion_mask"])
        valid = ~scores.isnan()
        mask = output["completion_mask"] * valid[:, None]
        self._record_rollout(mode, logprobs, k1, scores, ended, mask)
        if mode == "eval":
            return output

        assert values is not None
        shaped = self._shape_scores(scores, inputs)
        kl = kl_estimate(logprobs, logprobs - k1, self.args.kl_estimator)
        rewards = token_rewards(shaped, kl, mask, self.kl_controller.kl_coef)
        self._record_objective(shaped, kl, rewards, mask)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, global_moments(self.accelerator, rewards, mask), shift_mean=False)
        advantages = gae(rewards, values, mask, self.args.gamma, self.args.lam)
        lam_value = self.args.lam if self.args.lam_value is None else self.args.lam_value
        returns = values + (
            advantages if lam_value == self.args.lam else gae(rewards, values, mask, self.args.gamma, lam_value)
        )
        if self.args.normalize_advantages:
            advantages = whiten(advantages, mask, global_moments(self.accelerator, advantages, mask))

        stats = self._stats["train"]
        stats.add("_residuals", returns - values, mask)
        stats.add("_returns", returns, mask)
        self._log_advantages(advantages, mask)
        self._rollout = {
            **{name: output[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
            "loss_mask": mask,
            "old_logprobs": logprobs,
            "old_values": values,
            "advantages": advantages,
            "returns": returns,
        }
        return self._rollout

    def _local(self, gathered: Tensor | list) -> Any:
        """This process's rows of something gathered over all."""
        size = len(gathered) // self.accelerator.num_processes
        return gathered[self.accelerator.process_index * size : (self.accelerator.process_index + 1) * size]

    def _scores(self, completion_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) scores after the EOS rule, NaN for rows that take no part; and (B,) whether the row ended by EOS."""
        rewards = self._local(self._rewards_per_func)
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        scores[rewards.isnan().all(1) | ~completion_mask.any(1)] = torch.nan
        ended = torch.tensor([ids[-1] in self.eos_token_ids for ids in self._completion_ids], device=scores.device)
        if self.args.missing_eos_score is not None:
            scores = torch.where(ended | scores.isnan(), scores, self.args.missing_eos_score)
        if self.args.missing_eos_penalty is not None:
            scores = torch.where(ended, scores, scores - self.args.missing_eos_penalty)
        return scores, ended

    def _shape_scores(self, scores: Tensor, inputs: list[dict[str, Any]]) -> Tensor:
        """Normalise and clip: (B,) as it enters the token rewards."""
        groups = None
        column = self.args.reward_group_column
        if self.args.reward_normalization == "group" and column is not None:
            groups = gather_object([str(row[column]) for row in inputs])
        if self.args.reward_normalization == "reference" and self.reward_normalizer.reference_mean is None:
            self.reward_normalizer.reference_mean = self._mean_reference_score()
        everyones = self.accelerator.gather(scores).cpu()
        shaped = self._local(self.reward_normalizer(everyones, groups)).to(scores)
        return shaped.clamp(*self.reward_clip_range) if self.reward_clip_range else shaped

    def _mean_reference_score(self) -> float:
        """Mean score of the demonstrations in the training set, each scored once, finished by EOS."""
        stats, dataset, accelerator = Metrics(), self.train_dataset, self.accelerator
        size = self.args.local_rollout_forward_batch_size
        saved = self._prompt_ids, self._completion_ids, self._rewards_per_func
        for start in range(0, len(dataset), size * accelerator.num_processes):
            first = start + size * accelerator.process_index
            rows = torch.arange(first, first + size)
            inputs = self._with_prompts([dataset[int(i)] for i in rows % len(dataset)])
            texts = [row[self.args.reward_reference_column] for row in inputs]
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in texts]
            ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            self._completion_ids = [[*row, self._tokenizer.eos_token_id] for row in ids]
            prompts = [row["prompt"] for row in inputs]
            self._prompt_ids = self._tokenize_prompts(prompts)[0]
            chat = is_conversational(inputs[0])
            completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
            self._calculate_rewards(inputs, prompts, completions, self._completion_ids)
            scores, _ = self._scores(torch.ones(len(rows), 1, device=accelerator.device))
            stats.add("scores", scores, (rows < len(dataset)).to(scores.device) & ~scores.isnan())
        self._prompt_ids, self._completion_ids, self._rewards_per_func = saved
        self._pending_metrics.clear()
        self._pending_extra_logs.clear()
        return stats.pop(accelerator)["scores"][1].item()

    # ---- Loss ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._train_adapters()
        if self._step < self._skip_until:
            self._step += 1
        else:
            with self._timed("update"):
                loss = super().training_step(model, inputs, num_items_in_batch)
            if self._step > self._skip_until:
                return loss
        model.zero_grad(set_to_none=True)
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._stats["train"].add("policy/skipped_steps", 1.0)
        return torch.zeros((), device=self.args.device)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        args, mask = self.args, inputs["loss_mask"]
        completion_ids = inputs["completion_ids"]
        forward = LogprobForward(model, with_values=True)
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            forward,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        values = forward.values(completion_ids.size(1))
        if self._goes_too_far(logprobs, inputs):
            self._skip_until = (self._step // self._steps_per_rollout + 1) * self._steps_per_rollout
            # A forward without its backward would leave DDP to reduce the next rollout's first micro-batch on its own
            return 0.0 * (logprobs.sum() + entropies.sum() + values.sum())

        policy, policy_clipped = policy_loss(
            logprobs, inputs["old_logprobs"], inputs["advantages"], self.epsilon_low, self.epsilon_high, args.dual_clip
        )
        value, value_clipped = value_loss(values, inputs["old_values"], inputs["returns"], args.cliprange_value)
        self._record_loss(logprobs, entropies, policy, policy_clipped, value, value_clipped, inputs)

        # Gradients are averaged over processes and summed over micro-batches
        scale = self.accelerator.num_processes / inputs["step_tokens"].clamp(min=1)
        actor_loss = masked_sum(policy, mask) * scale
        if args.entropy_coef:  # a gradient of zeros would cost the LM head's backward a pass and memory
            actor_loss = actor_loss - args.entropy_coef * masked_sum(entropies, mask) * scale
        if self.aux_loss_enabled:
            actor_loss = actor_loss + self.router_aux_loss_coef * aux_loss / args.gradient_accumulation_steps
        if self._critic_only:
            actor_loss = 0.0 * actor_loss  # in the graph for DDP; `_before_step` drops its gradients
        return actor_loss + args.vf_coef * masked_sum(value, mask) * scale

    @property
    def _critic_only(self) -> bool:
        return self._step // self._steps_per_rollout < self.args.critic_warmup_rollouts

    def _goes_too_far(self, logprobs: Tensor, inputs: dict[str, Tensor]) -> bool:
        """Whether the approximate KL of the minibatch so far, of all processes, exceeds `max_approx_kl`."""
        if self.args.max_approx_kl is None:
            return False
        mask = inputs["loss_mask"]
        with torch.no_grad():
            kl = torch.stack([masked_sum(approx_kl(logprobs, inputs["old_logprobs"]), mask), mask.sum().to(logprobs)])
            if self._step % self.args.gradient_accumulation_steps == 0:
                self._step_kl = torch.zeros_like(kl)
            self._step_kl += self.accelerator.reduce(kl, reduction="sum")
            return bool(self._step_kl[0] > self.args.max_approx_kl * self._step_kl[1])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._before_step()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # `max_grad_norm=0`: nothing was clipped
            self._before_step()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # DeepSpeed makes its step within `backward`, and calls a norm that is not finite -1
        if self.is_deepspeed_enabled and not (norm is None or 0 <= norm < math.inf or self.args.fp16):
            self._raise_not_finite(
                "policy or the critic", "The last finite weights are those of the newest checkpoint."
            )
        return norm

    def _before_step(self) -> None:
        """Gradients are complete: drop the policy's in warm-up, record their norms, stop if they are not finite."""
        if self.is_deepspeed_enabled:
            return  # the engine owns the gradients
        actor_critic = self.accelerator.unwrap_model(self.model)
        if self._critic_only_step:
            for parameter in actor_critic.parameters_of("policy"):
                parameter.grad = None
        scaler = getattr(self.accelerator, "scaler", None)
        for role in ("policy", "critic"):
            grads = [p.grad for p in actor_critic.parameters_of(role) if p.grad is not None]
            if not grads:
                continue
            norm = torch.nn.utils.get_total_norm(grads)
            norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) / (
                scaler.get_scale() if scaler else 1
            )
            if not norm.isfinite() and scaler is None:
                self._stop_not_finite(role)
            self._stats["train"].add(f"grad_norm/{role}", norm)

    @property
    def _critic_only_step(self) -> bool:
        """As `_critic_only`, at the end of an optimizer step, when `_step` already counts it."""
        return (self._step - 1) // self._steps_per_rollout < self.args.critic_warmup_rollouts

    def _stop_not_finite(self, role: str) -> None:
        folder = os.path.join(self.args.output_dir, "last-good")
        self.save_model(folder, _internal_call=True)
        self.accelerator.wait_for_everyone()  # a process that raises while another still writes would cut it off
        self._raise_not_finite(
            role,
            f"The weights before this step, finite but not good if earlier steps went astray, are in {folder}.",
        )

    def _raise_not_finite(self, whose: str, what_is_left: str) -> None:
        terms = sorted(set(gather_object(self._stats["train"].not_finite())))
        cause = (
            f"first seen in {', '.join(terms)}" if terms else "every logged term is finite, so it arose in backward"
        )
        raise FloatingPointError(
            f"The gradient of the {whose} is not finite at step {self.state.global_step + 1} ({cause}). "
            f"{what_is_left} Usual causes: a learning rate that is too high, fp16, or rewards of very different scale "
            "(see `reward_normalization`, `reward_clip_range`)."
        )


class _EpochSeededSampler(RepeatSampler):
    epoch_seed: Callable[[], int]

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.epoch_seed())
        yield from super().__iter__()


def _as_rloo_reads(args: PPOConfig):
    """RLOO's names for our settings; without `beta` it loads no reference of its own, which would come from a path."""
    return temporarily(
        args, beta=0.0, sync_ref_model=False, num_iterations=args.num_ppo_epochs, epsilon=args.cliprange
    )
