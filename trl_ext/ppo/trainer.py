"""PPO on TRL's `GRPOTrainer`: prompt → rollout → scores → token rewards → advantages → loss → step → metrics."""

import copy
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object, set_seed
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler
from transformers import PreTrainedModel

from ..callbacks.console import ConsoleCallback
from ..callbacks.monitor import trackio_is_open
from ..functional import (
    advantages_and_returns,
    choose_lam,
    critic_products,
    masked_sum,
    mean_baselines,
    policy_loss,
    step_kl_sums,
    token_rewards,
    turn_starts,
    turn_sums,
    value_loss,
    whiten,
)
from ..models.adapters import (
    POLICY,
    REFERENCE,
    copy_adapter,
)
from ..models.generation import check_savable, warn_of_turn_end
from ..models.lm_head import add_dense_lm_head
from ..models.loading import Loader, is_adapter, load_to_train
from ..models.weights import (
    base_model_of,
    check_tokenizer,
    disable_dropout,
    evaluating,
    keep_4bit_layout,
    weights_identity,
)
from ..runs.control import take_kl_scale, take_rate_scale
from ..upstream.names import RepeatSampler, check_contract, get_config_model_id, is_conversational
from ..upstream.statements import temporarily
from . import gradients
from .checkpoints import PPOCheckpoints
from .checks import (
    check,
    check_arguments,
    check_evaluation_batch,
    check_prompt_lengths,
    rewards_and_tokenizers,
)
from .config import PPOConfig
from .controllers import (
    BaselineGate,
    KLController,
    RewardNormalizer,
    mean_demonstration_score,
)
from .environments import load_states, states_of
from .evaluation_pass import EvaluationRows, sampling_seed, untouched_rng
from .metrics import GRPO_ONLY_METRICS, Accumulator, PPOMetrics, global_moments
from .roles import (
    Rewards,
    check_base,
    load_reward_models,
    make_actor_critic,
    make_reference,
    pin_reference,
    prepare_adapters,
)
from .rollout import Rollout, joined, permuted, token_counts_of
from .step_size import LearningRateController, StepSums
from .vllm import ServerGuard, check_loadable, check_logprobs


class PPOTrainer(PPOCheckpoints):
    """
    Train with Proximal Policy Optimization (1707.06347): a critic, GAE and per-token KL rewards (1909.08593).

    TRL's `GRPOTrainer` loads, generates, scores and logs. The algorithm is in `_generate_and_score_completions` (from
    prompts to advantages) and `_compute_loss`; `RolloutTrainer` collects the rollout, and `PPOCheckpoints` saves and
    resumes. To change the algorithm, override `token_rewards` or `advantages`; to log more, `rollout_metrics`. They
    get a [`Rollout`]. The other public methods are hooks that TRL and transformers call.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy: a path or an object. The path of a saved adapter loads the base that the adapter names, and trains
            the adapter further.
        reward_funcs (`str`, model, callable, or list of them):
            As in TRL: sequence classifiers with one label (path or object), and functions or async functions
            `(prompts, completions, completion_ids, **columns) -> list[float | None]`. Besides the dataset's columns
            they are given `prompt_ids`, the tokens of each prompt, and `finished`, whether the completion ended by EOS
            and no tool call waits. In place of a row's float they may give a list with a float for each completion
            token.
        args ([`PPOConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset ([`~datasets.Dataset`], the latter also a `dict` of them):
            Rows with `prompt` (text or messages).
        processing_class, reward_processing_classes:
            Tokenizers of the policy and of each reward model.
        value_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Critic: a sequence classifier with one label and the policy's tokenizer, of any size. The default, unless
            the policy has an adapter (see `peft_config`), is the first of these that exists:

            - a copy of a reward model (no PeftModel) with a weight other than 0, the policy's tokenizer, and an
              embedding with as many rows as the policy's;
            - a copy of the policy's backbone with a head of zeros.

            A critic that you pass needs an embedding for each of the tokenizer's tokens. It reads ids beyond its
            embedding, which only the policy has, as its last id.
        ref_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Reference. The default is a frozen copy of the weights passed in as `model`. Its embedding needs at least
            as many rows as the policy's.
        callbacks, optimizers, quantization_config:
            As in TRL.
        peft_config ([`~peft.LoraConfig`], *optional*):
            Trains an adapter on a frozen base. The reference is then the base alone. The critic, unless `value_model`
            is a whole model, is the base with a second adapter and a value head. Adapter and head are the first of
            these that exist:

            - the adapter at the path `value_model`;
            - a copy of the adapter and head of a reward model on this base, with a weight other than 0, the policy's
              tokenizer, and the new adapter's rank, α and modules;
            - a new adapter and a head of zeros.

            If `model` is a [`~peft.PeftModel`], its adapter `default` is trained further, and the reference is the
            base with a frozen copy of that adapter.
        critic_peft_config ([`~peft.LoraConfig`], *optional*):
            Configuration of the critic's adapter. The default is that of the policy's adapter.
        tools, environment_factory, rollout_func:
            As in `trl.GRPOTrainer`. Besides `get_reward`, which gives a reward at the end of the episode, an
            environment may have `_step_reward`, which is asked for a reward after each tool call.
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

    args: PPOConfig
    model: Any  # ActorCritic; FSDP and DeepSpeed wrap it
    eos_token_ids: list[int]
    _buffered_inputs: Any  # TRL's: the micro-batches of the rollout that is trained on
    _last_loaded_step: int  # TRL's: the step whose weights vLLM has
    _step: int  # TRL's: micro-batches trained on by this process

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
        tools: Any = None,
        environment_factory: Any = None,
        rollout_func: Any = None,
    ):
        check_contract(PPOTrainer)
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = PPOConfig(f"{name.split('/')[-1] or 'model'}-PPO")
        reward_funcs, reward_processing_classes = rewards_and_tokenizers(
            reward_funcs, reward_processing_classes, processing_class
        )
        evals = {"eval": eval_dataset}
        if isinstance(eval_dataset, dict):
            evals = {f"eval_{name}": data for name, data in eval_dataset.items()}  # one may be named "train"
        datasets = [(name, data) for name, data in {"train": train_dataset, **evals}.items() if data is not None]
        agent_arguments = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
        check(
            args,
            {"model": model, "value_model": value_model, "ref_model": ref_model}
            | {f"reward {i}": reward for i, reward in enumerate(reward_funcs)},
            datasets,
            [name for name, argument in agent_arguments.items() if argument],
            optimizers[0],
        )
        if rollout_func is None:
            check_arguments(reward_funcs, datasets)
        elif not args.may_sample_off_policy:
            args = copy.copy(args)  # the caller's `args` stay unchanged
            args.allow_off_policy_sampling = True  # who samples is not known here
        if is_saved_adapter := is_adapter(model, (args.model_init_kwargs or {}).get("revision")):
            ref_model = None if ref_model == model else ref_model  # a copy of the policy is the same reference
            model, processing_class = load_to_train(model, args, processing_class, peft_config, quantization_config)
            peft_config = quantization_config = None
        prepare_adapters(model, value_model, peft_config, critic_peft_config)
        load_reward_models(reward_funcs, reward_processing_classes, args)
        if isinstance(model, PeftModel) and args.use_ref_model and ref_model is None:
            model.add_adapter(REFERENCE, model.peft_config[POLICY])
            copy_adapter(model, POLICY, REFERENCE)

        # `model_init_kwargs` have been used, but TRL would warn that they are ignored
        with temporarily(args, model_init_kwargs=None) if is_saved_adapter else nullcontext():
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
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        policy = self.model
        check_savable(policy)
        self._is_peft = isinstance(policy, PeftModel)
        self._adapt_grpo(policy)
        add_dense_lm_head(base_model_of(policy), args.temperature, args.logits_budget_gb)

        # Models
        path = model if isinstance(model, str) else None
        self._loader = Loader(policy, path, args.model_init_kwargs or {}, args.trust_remote_code, self.accelerator)
        self._reference_identity: str | None = None  # of what was passed in
        rewards = Rewards(
            self.reward_funcs,
            self.reward_processing_classes,
            self.reward_func_names,
            self._tokenizer,
            self.reward_weights.tolist(),
        )
        self.reward_func_names = rewards.names
        self.reward_processing_classes = rewards.tokenizers
        if args.use_ref_model and not (self._is_peft and ref_model is None):  # else the adapter is switched off
            self._set_reference(ref_model)
        if self._is_peft:
            check_base(policy, self.accelerator, self.use_vllm)
            pin_reference(policy, self.use_vllm)
        heads = rewards.load_adapters(self._loader, args.share_reward_base)
        actor_critic, self._critic_origin = make_actor_critic(
            self._loader, rewards, heads, value_model, critic_peft_config, has_critic=args.baseline != "mean"
        )
        for trained_or_run in (actor_critic, self.ref_model, *rewards.functions):
            if isinstance(trained_or_run, nn.Module):
                keep_4bit_layout(trained_or_run)
        if args.disable_dropout:
            disable_dropout(actor_critic)
            rewards.disable_dropout()
        if self.place_model_on_device and actor_critic.critic is not None:
            actor_critic.critic.to(args.device)
        self.model = self.model_wrapped = self.callback_handler.model = actor_critic
        self.metrics = PPOMetrics(self.accelerator, self.reward_func_names)
        self.reward_funcs = rewards.checked_functions(
            actor_critic, args, self.eos_token_ids, self._errors, self._score_on_base, self._own_random_state
        )

        # What is PPO's own
        self.kl_controller = KLController(args)
        self.reward_normalizer = RewardNormalizer(args.reward_normalization)
        self.baseline_gate = BaselineGate()
        self._evaluation: EvaluationRows | None = None  # while evaluating
        self._eval_pool: dict | None = None  # environments of evaluations; None before the first evaluation
        # A quarter of the KL target at the default; half of `step_kl_target` is half a step for long completions, too
        kl_limit = 2.5 * args.step_kl_target * args.kl_target if args.kl_controller == "adaptive" else math.inf
        self.learning_rate_controller = LearningRateController(
            args.step_kl_target, args.batch_size, kl_limit, args.num_mini_batches
        )
        self._step_sums: list[Tensor] = []  # of the minibatch's micro-batches
        self._unscored = 0  # rollouts in a row without a score

        if environment_factory is None:  # else what `reset` says is known in the rollout only
            readers = {"policy": self._loader.policy}
            if actor_critic.has_own_critic:
                readers["critic"] = actor_critic.critic
            for i in rewards.critic_candidates():  # those with the policy's tokenizer
                if isinstance(rewards.functions[i], nn.Module):
                    readers[f"reward model {rewards.names[i]}"] = rewards.functions[i]
            check_prompt_lengths(self._tokenize_prompts, readers, self.max_completion_length, datasets)
        ConsoleCallback.replace(self)

    def _adapt_grpo(self, policy: Any) -> None:
        """Replace attributes that GRPO's constructor has set, but that PPO cannot use as they are."""
        args = self.args
        self.num_iterations = args.num_ppo_epochs
        self.vllm_importance_sampling_correction = False  # ours is `importance_sampling_mode`
        self.epsilon_low = args.resolved_cliprange
        self.epsilon_high = args.resolved_cliprange if args.epsilon_high is None else args.epsilon_high
        if args.stop_token_id is not None:
            self.eos_token_ids = [*self.eos_token_ids, args.stop_token_id]
        if self.use_vllm:
            vllm = self.vllm_generation
            vllm.generation_kwargs = {**vllm.generation_kwargs, "stop_token_ids": self.eos_token_ids}
            check_loadable(vllm)
            check_logprobs(vllm)
            if args.vllm_mode == "server":
                self._vllm_server = ServerGuard(vllm)
            set_seed(sampling_seed(args, self.accelerator.process_index))  # vLLM in this process has set its own seed
        else:
            self.generation_config.eos_token_id = self.eos_token_ids
            if args.cache_implementation == "static":  # it is fast only if compiled, and TRL switches that off
                self.generation_config.disable_compile = False
        check_tokenizer(policy, self._tokenizer)
        if self._tokenizer.chat_template and is_conversational(self.train_dataset[0]):
            warn_of_turn_end(self._tokenizer, self.eos_token_ids, "stop_token_id: {id}")
        is_moe = hasattr(policy.config.get_text_config(), "output_router_logits")
        if args.ddp_find_unused_parameters is None and self.accelerator.ddp_handler is not None and not is_moe:
            # Every parameter takes part in every step, but for experts that no token is routed to
            self.accelerator.ddp_handler.find_unused_parameters = False
        if self.is_deepspeed_enabled and args.critic_warmup_rollouts:
            raise ValueError(
                "`critic_warmup_rollouts` skips updates of the policy, but DeepSpeed updates all weights inside "
                "`backward`. Use DDP or FSDP, or leave `critic_warmup_rollouts` out."
            )

    def _set_reference(self, ref_model: str | PreTrainedModel | None) -> None:
        """Make the frozen reference, `ref_model` or a copy of the policy, and place it on the device."""
        reference = make_reference(self._loader, ref_model, self.args, self._tokenizer)
        if ref_model is not None:
            path = ref_model if isinstance(ref_model, str) else None
            self._reference_identity = weights_identity(reference, path)
        self.ref_model = self._loader.placed(reference)

    def _score_on_base(self, name: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the (B,) scores of right-padded rows, (B, L), by the reward model `name` on the policy's base."""
        with evaluating(self.model):
            return self.model(input_ids, attention_mask, reward=name)

    def _own_random_state(self) -> AbstractContextManager:
        """Return a context with a separate random state, seeded by the run's seed and the step."""
        batch = self._evaluation.seen if self._evaluation is not None else 0
        return untouched_rng(self.accelerator, self.args, self.state.global_step + batch)

    # ---- The algorithm ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Generate and score this process's rollout, B completions of up to T tokens; return the rows to train on."""
        args = self.args
        if self.model.training:
            self.kl_controller.scale(take_kl_scale(self.state))
            self.learning_rate_controller.scale(take_rate_scale(self.state))
        rollout = self._collect(inputs)
        if not self.model.training:  # there is nothing to train on
            return self._observe_evaluation(rollout)
        scores, token_scores = self._normalize(rollout, inputs)  # (B,), and (B, T) if functions scored tokens
        rollout = replace(rollout, token_scores=token_scores)
        kl = rollout.k1 if args.kl_estimator == "k1" else rollout.kl(args.kl_estimator)  # (B, T)
        kl_coef = self.kl_controller.kl_coef
        rewards = self.token_rewards(rollout, scores, kl)  # (B, T)
        values = torch.zeros_like(rewards) if rollout.values is None else rollout.values  # (B, T)
        advantages, returns = self.advantages(rollout, rewards, values)  # (B, T) each
        if args.use_ref_model and not self._warms_up(self._step):
            of_rows = (rollout.k1 * rollout.mask).sum(1)
            episodes, mean_kl, *_ = global_moments(self.accelerator, of_rows, rollout.valid).tolist()
            if episodes:
                self.kl_controller.update(mean_kl, int(episodes))
        self.metrics.add_rollout(rollout, scores, kl, rewards, returns, kl_coef)
        self.metrics.add_custom(self.rollout_metrics(rollout, rewards, advantages, returns))
        self._log_advantages(advantages, rollout.mask)
        weights = rollout.importance_weights(args)
        if weights is None:
            return rollout.rows_for_training(advantages, returns)
        self.metrics.add_importance_weights(rollout, *weights, self._actions(rollout.mask))
        return rollout.rows_for_training(advantages, returns, weights[0])

    def token_rewards(self, rollout: Rollout, scores: Tensor, kl: Tensor) -> Tensor:
        """
        Return the reward of each token. Override this to reward tokens in another way.

        By default each token is rewarded with the score that reward functions gave to it (0 if they gave none), minus
        `self.kl_controller.kl_coef` · `kl`. The last token also gets the rest of the completion's score.

        Args:
            rollout: the completions and what models and reward functions computed for them.
            scores: (B,), normalised and clipped; NaN for rows that are masked out.
            kl: (B, T), nats, by `kl_estimator`; 0 without a reference.

        Returns:
            (B, T), score units; 0 where `rollout.mask` is 0.
        """
        return token_rewards(scores, kl, rollout.mask, self.kl_controller.kl_coef, rollout.token_scores)

    def advantages(self, rollout: Rollout, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return the advantages that weigh the policy's loss, and the returns, the critic's target. Override this for
        another estimator.

        The default depends on the setting `baseline`. Let A be the GAE over the critic's values, G the return, and b
        the leave-one-out mean: the mean return of the other completions.

        - `critic`: A
        - `mean`: G − b
        - `gated`: w · A + (1 − w) · (G − b), where w in [0, 1] is the critic's weight

        The default first applies `whiten_rewards` to the rewards, and last `normalize_advantages` to the advantages.

        Args:
            rollout: the completions and what models and reward functions computed for them.
            rewards: (B, T), score units, as `token_rewards` returned them.
            values: (B, T), score units, the critic's `rollout.values`; 0 without a critic.

        Returns:
            Advantages and returns, (B, T) each. Where `rollout.mask` is 0, they have no effect, but must be finite.
        """
        args = self.args
        mask = rollout.mask
        if args.whiten_rewards:
            rewards = whiten(rewards, mask, global_moments(self.accelerator, rewards, mask), shift_mean=False)
        actions = self._actions(mask)
        lam, lam_value = choose_lam(actions, self._lam(rollout), args.lam_value, args.lam_alpha)
        advantages, returns = advantages_and_returns(rewards, values, mask, args.gamma, lam, lam_value, args.gae_level)
        if args.baseline != "critic":
            means, weight = self._mean_baselines(rewards, values, mask)
            # λ below 1 would take the mean of other completions for a value of this one's states
            over_means, _ = advantages_and_returns(rewards, means, mask, args.gamma, 1.0, level=args.gae_level)
            advantages = torch.lerp(over_means, advantages.to(over_means), weight)
        if args.normalize_advantages:
            advantages = whiten(advantages, mask, global_moments(self.accelerator, advantages, actions))
        return advantages, returns

    def _lam(self, rollout: Rollout) -> float:
        """Return `lam`; if unset, 0.95 where any process has scores of single tokens, else 1."""
        if self.args.lam is not None:
            return self.args.lam
        is_by_token = torch.tensor([rollout.token_scores is not None], device=rollout.mask.device)
        return 0.95 if self.accelerator.gather(is_by_token).any() else 1.0

    def _mean_baselines(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, float]:
        """Return the (B, T) leave-one-out means of the returns, and the critic's weight in the baseline."""
        args = self.args
        actions = self._actions(mask)
        zeros = torch.zeros_like(values)
        returns, _ = advantages_and_returns(rewards, zeros, mask, args.gamma, 1.0, level=args.gae_level)
        group = self.num_generations if self.num_generations > 1 else None
        # `long`: padding turns booleans into numbers, but only on the processes that pad
        padded = self.accelerator.pad_across_processes((returns, values, actions.long()), dim=1)
        returns, everyones_values, actions = self.accelerator.gather(padded)
        means = self._local(mean_baselines(returns, actions, group))[:, : mask.size(1)]
        if args.baseline == "mean":
            return means, 0.0
        weight = self.baseline_gate.update(critic_products(returns, everyones_values, actions, group))
        self.metrics.train.add("val/baseline_weight", weight)
        return means, weight

    def rollout_metrics(
        self, rollout: Rollout, rewards: Tensor, advantages: Tensor, returns: Tensor
    ) -> dict[str, float]:
        """
        Return further metrics of a rollout to log, by default none. Override this to log your own.

        Each metric is logged as its mean over the processes and over the rollouts since the last log.

        Args:
            rollout: the completions and what models and reward functions computed for them.
            rewards: (B, T), score units, as `token_rewards` returned them.
            advantages, returns: (B, T), as `advantages` returned them.

        Returns:
            A dict from each metric's name to a number.
        """
        return {}

    def _actions(self, mask: Tensor) -> Tensor:
        """Return the (B, T) mask of tokens that start an action: all, or with `gae_level: turn` each turn's first."""
        return mask if self.args.gae_level == "token" else turn_starts(mask)

    def _by_action(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T) values per token unchanged, or with `gae_level: turn` their sums over each turn."""
        return values if self.args.gae_level == "token" else turn_sums(values, mask)

    def _normalize(self, rollout: Rollout, inputs: list[dict[str, Any]]) -> tuple[Tensor, Tensor | None]:
        """Standardise and clip the rollout's (B,) scores, and scale its (B, T) token scores, if any, like them."""
        normalizer = self.reward_normalizer
        groups = None
        if normalizer.kind == "group":
            groups = gather_object([str(row[str(self.args.reward_group_column)]) for row in inputs])
        if normalizer.kind == "reference" and normalizer.reference_mean is None:
            normalizer.reference_mean = mean_demonstration_score(self)
        everyones = self.accelerator.gather(rollout.scores).cpu()
        self._unscored = self._unscored + 1 if everyones.isnan().all() else 0
        if self._unscored == 3:
            raise ValueError(
                "In three rollouts in a row no completion got a score, so nothing is trained: each was cut off, and "
                "`mask_truncated_completions=True` leaves it out, or the reward functions "
                f"({', '.join(self.reward_func_names)}) failed or returned None for it. Raise "
                "`max_completion_length`, or check the functions."
            )
        scores, scales = (self._local(each).to(rollout.scores) for each in normalizer(everyones, groups))
        if self.args.reward_clip_range:
            scores = scores.clamp(*self.args.reward_clip_range)
        return scores, None if rollout.token_scores is None else rollout.token_scores * scales[:, None]

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return a micro-batch's part of the optimizer step's loss."""
        # clipped policy loss + vf_coef · clipped value loss − entropy_coef · entropy (+ the experts' auxiliary loss):
        # each term but the last is a mean over the step's tokens, or with `gae_level: turn` the first over its turns
        args = self.args
        mask = inputs["loss_mask"]
        warms_up = self._warms_up(self._step)
        critic_loss = None
        if warms_up or self._trains_apart:
            is_ddp = isinstance(model, DistributedDataParallel)  # DDP waits for a gradient of every weight
            found = self._run_models(model, inputs, with_values=True, with_logprobs=False, touch_policy=is_ddp)
            critic_loss = self._value_loss(found["values"], inputs)
            if warms_up:
                return critic_loss
            self.accelerator.backward(critic_loss)  # so the critic's activations are freed before the policy runs
        routers = {"output_router_logits": True} if self.aux_loss_enabled else {}
        with_values = args.baseline != "mean" and critic_loss is None
        found = self._run_models(model, inputs, with_values=with_values, with_entropies=True, **routers)
        logprobs, entropies = found["logprobs"], found["entropies"]  # (B, T) each

        new = self._by_action(logprobs, mask)  # (B, T)
        old = self._by_action(inputs["old_logprobs"], mask)
        actions = self._actions(mask)
        losses, is_clipped = policy_loss(
            new,
            old,
            inputs["advantages"],
            self.epsilon_low,
            self.epsilon_high,
            args.dual_clip,
            args.ratio_band,
        )
        if "importance_weights" in inputs:  # (B, T) or (B, 1): of the policy's loss alone, see docs/off_policy.md
            losses = losses * inputs["importance_weights"]
        self.metrics.add_update(logprobs, entropies, (losses, is_clipped), new - old, actions, inputs)
        taken = self._step // args.gradient_accumulation_steps % args.steps_per_rollout
        self._follow_step_kl(new, old, entropies, inputs, self._step, taken)
        if self._trusts_sampler and self._step % self._micro_steps_per_rollout < args.gradient_accumulation_steps:
            # The policy has not moved since it sampled
            self.metrics.add_sampling(self.metrics.train, inputs["old_logprobs"], logprobs, mask)

        # Gradients are averaged over processes and summed over micro-batches
        scale = self.accelerator.num_processes / inputs["step_tokens"].clamp(min=1)
        count = inputs["step_tokens" if args.gae_level == "token" else "step_turns"].clamp(min=1)
        actor_loss = masked_sum(losses, actions) * (self.accelerator.num_processes / count)
        if args.entropy_coef:  # a gradient of zeros would cost the LM head's backward a pass and memory
            actor_loss = actor_loss - args.entropy_coef * masked_sum(entropies, mask) * scale
        if self.aux_loss_enabled:
            actor_loss = actor_loss + self.router_aux_loss_coef * found["aux_loss"] / args.gradient_accumulation_steps
        if critic_loss is not None:  # its backward pass has run; it only counts in the logged loss
            return actor_loss + critic_loss.detach()
        return actor_loss + self._value_loss(found["values"], inputs) if with_values else actor_loss

    @torch.no_grad()
    def _follow_step_kl(
        self,
        new: Tensor,  # (B, T) log-probs of the actions under the policy now, nats
        old: Tensor,  # the same under the policy that the rollout began with
        entropies: Tensor,  # (B, T), nats, of single tokens
        inputs: Any,
        micro_step: int,  # minibatches begin at multiples of `gradient_accumulation_steps`
        taken: int,  # optimizer steps on the rollout so far
    ) -> None:
        """Record a micro-batch's KL; after a minibatch's last micro-batch, choose the next step's learning rate."""
        mask = inputs["loss_mask"]
        accumulates = self.args.gradient_accumulation_steps
        if micro_step % accumulates == 0:
            self._step_sums = []
        actions = self._actions(mask)
        entropies = self._by_action(entropies, mask)
        counts = torch.stack([masked_sum(inputs["advantages"].abs(), actions), actions.any(1).sum()])
        self._step_sums.append(torch.cat([step_kl_sums(new, old, entropies, actions), counts]))
        if (micro_step + 1) % accumulates:
            return
        sums = self.accelerator.reduce(torch.stack(self._step_sums).sum(0), reduction="sum")
        kl = self.learning_rate_controller.observe(StepSums(*sums.tolist()), taken, self.args.steps_per_rollout)
        if taken == max(self.args.steps_per_rollout - 1, 1):
            self.metrics.train.add("policy/step_kl", kl)
            if target := self.learning_rate_controller.present_target:
                self.metrics.train.add("policy/step_kl_target", target * taken / self.args.steps_per_rollout)
        if taken < self.args.steps_per_rollout:  # a step follows
            self.metrics.train.add("learning_rate/factor", self.learning_rate_controller.factor_in_use)
            self.metrics.train.add("policy/undone_steps", float(bool(self.learning_rate_controller.scaler.undone)))

    @torch.no_grad()
    def _measure_single_step(self) -> None:
        """After a rollout's only step, measure by a further forward pass how far this step moved the policy."""
        for micro_step, inputs in enumerate(self._buffered_inputs):
            found = self._run_models(self.model_wrapped, inputs, with_entropies=True)
            mask = inputs["loss_mask"]
            new = self._by_action(found["logprobs"], mask)
            old = self._by_action(inputs["old_logprobs"], mask)
            self._follow_step_kl(new, old, found["entropies"], inputs, micro_step, 1)

    @property
    def _trains_apart(self) -> bool:
        """Return whether policy and critic have separate backward passes, which takes less memory."""
        # DDP, FSDP and DeepSpeed expect a single backward pass through all weights
        return self.args.baseline != "mean" and self.accelerator.distributed_type == DistributedType.NO

    def _value_loss(self, values: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return a micro-batch's part of vf_coef · clipped value loss, given its (B, T) values."""
        args = self.args
        mask = inputs["loss_mask"]
        losses, is_clipped = value_loss(values, inputs["old_values"], inputs["returns"], args.cliprange_value)
        self.metrics.add_critic_update((losses, is_clipped), mask)
        scale = self.accelerator.num_processes / inputs["step_tokens"].clamp(min=1)
        return args.vf_coef * masked_sum(losses, mask) * scale

    def _run_models(self, model: nn.Module, inputs: dict[str, Any], **asked: Any) -> dict[str, Tensor]:
        """Run the models that are `asked` for on a micro-batch; return what [`Passes`] returns."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        width = inputs["completion_ids"].size(1)
        return self._passes(model, ids, inputs["token_counts"], width, **asked)

    def _warms_up(self, micro_step: int) -> bool:
        """Return whether the critic alone is trained at micro-batch `micro_step` (`critic_warmup_rollouts`)."""
        return micro_step // self._micro_steps_per_rollout < self.args.critic_warmup_rollouts

    # ---- Prompts ----

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        column = self.args.reward_group_column
        if column is not None and column not in self._signature_columns:
            self._signature_columns.append(column)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> "_EpochSeeded":
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return _EpochSeeded(super()._get_train_sampler(dataset), seed, lambda: int(self.state.epoch or 0))

    def _prompts_of(self, number: int) -> list[list[int]]:
        """Return the prompt token ids of this process's rows of rollout `number`."""
        size = self.args.generation_batch_size
        local = size // self.accelerator.num_processes
        epoch, place = divmod(number, len(self.train_dataset) // (size // self.num_generations))
        begin = place * size + self.accelerator.process_index * local
        rows = self._get_train_sampler().rollouts_of(epoch)[begin:][:local]
        return self._tokenize_prompts([self.train_dataset[row]["prompt"] for row in rows])[0]

    # ---- Rollout ----

    def _sync_weights(self) -> None:
        """Send vLLM the weights, as TRL does before it generates."""
        self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Let TRL make a rollout if one is due; return the next micro-batch of the present pass."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        epoch, position = divmod(self._step % self._micro_steps_per_rollout, self.args.steps_per_generation)
        if position == 0:
            # TRL has shuffled the rollout once and cut it up. `joined` undoes both, so that each pass has an order of
            # its own, which depends on the seed alone
            self._buffered_inputs = self._micro_batches(joined(self._buffered_inputs), epoch)
        return self._buffered_inputs[position]

    @property
    def _micro_steps_per_rollout(self) -> int:
        """Return the number of micro-batches that a process trains on per rollout, summed over the passes."""
        return self.args.steps_per_generation * self.num_iterations

    def _micro_batches(self, rollout: dict[str, Tensor], epoch: int) -> list[dict[str, Any]]:
        """Cut the [`Rollout.rows_for_training`] into the micro-batches of PPO epoch `epoch`, and add token counts."""
        args = self.args
        number = self._step // self._micro_steps_per_rollout
        token_counts = token_counts_of(rollout["prompt_mask"], rollout["completion_mask"])
        seed = (args.seed * 1_000_003 + number) * 1_009 + epoch
        order = permuted([sum(row) for row in token_counts], args.num_mini_batches, seed)
        rollout = {name: values[order] for name, values in rollout.items()}
        counts = {"step_tokens": rollout["loss_mask"]}  # of the whole optimizer step, over all processes
        if args.gae_level == "turn":
            counts["step_turns"] = turn_starts(rollout["loss_mask"])
        for name, each in counts.items():
            count = each.sum(1).view(args.num_mini_batches, -1).sum(1)
            counts[name] = self.accelerator.reduce(count, reduction="sum")
        chunks = zip(*(values.chunk(args.steps_per_generation) for values in rollout.values()), strict=True)
        size = args.per_device_train_batch_size
        return [
            {
                **dict(zip(rollout, chunk, strict=True)),
                **{name: each[i // args.gradient_accumulation_steps] for name, each in counts.items()},
                # For each row its numbers of prompt and completion tokens
                "token_counts": [token_counts[row] for row in order[i * size : (i + 1) * size]],
            }
            for i, chunk in enumerate(chunks)
        ]

    def _log_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        """Put each row's mean advantage into the completions table, in place of GRPO's advantage."""
        local = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        means = self.accelerator.gather(local).tolist()
        for _ in range(min(len(means), len(self._logs["advantages"]))):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(means)

    # ---- Step ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._actor_critic.train_adapters()
            self.learning_rate_controller.scaler.attach(self.optimizer)
            self.learning_rate_controller.is_on = not self._warms_up(self._step)
        with self.metrics.timed("update"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._finish_gradients()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # `max_grad_norm=0`: nothing was clipped
            self._finish_gradients()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # DeepSpeed makes its step within `backward`, and returns -1 for a norm that is not finite
        if self.is_deepspeed_enabled and not (norm is None or 0 <= norm < math.inf or self.args.fp16):
            left = "If there is a checkpoint, the newest has finite weights."
            gradients.raise_not_finite("policy or the critic", self.metrics.train, self.state.global_step + 1, left)
        return norm

    def _finish_gradients(self) -> None:
        """Drop gradients that are not trained, log the norms of the others, and raise if one is not finite."""
        if self.is_deepspeed_enabled:
            return  # the engine owns the gradients
        actor_critic = self._actor_critic
        scaler = getattr(self.accelerator, "scaler", None)
        if self._warms_up(self._step - 1):  # `_step` already counts the micro-batch that completed the gradients
            gradients.drop(actor_critic.parameters_of("policy"))
        for role in ("policy", "critic"):
            norm = gradients.norm_of(actor_critic.parameters_of(role), scaler.get_scale() if scaler else 1.0)
            if norm is None:
                continue
            if not norm.isfinite() and scaler is None:  # else fp16's loss scaler skips the step
                folder = os.path.join(self.args.output_dir, "last-good")
                self.save_model(folder, _internal_call=True)
                self.accelerator.wait_for_everyone()  # raising on one process may end another that is still writing
                left = f"The weights from before this step are in {folder}, but earlier steps may have damaged them."
                gradients.raise_not_finite(role, self.metrics.train, self.state.global_step + 1, left)
            self.metrics.train.add(f"grad_norm/{role}", norm)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        actor_critic = self.accelerator.unwrap_model(model or self.model)
        gradients.check_all_optimized(optimizer, actor_critic)
        if is_new and actor_critic.critic is not None:
            gradients.set_critic_rate(optimizer, actor_critic, self.args.critic_learning_rate)
        return optimizer

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_new, self._seen_step = self._step != self._seen_step, self._step  # at an epoch's end it is called twice
        looks_back = self.args.steps_per_rollout == 1 and self.args.step_kl_target
        if is_new and looks_back and not self._warms_up(self._step - 1):
            self._measure_single_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # ---- Evaluation ----

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        self._prepare_inputs(inputs)  # generates, scores and records; there is no loss to evaluate
        return None, None, None

    def _observe_evaluation(self, rollout: Rollout) -> dict[str, Tensor]:
        """Add an evaluation batch to the metrics; return nothing to train on."""
        rows = self._evaluation or EvaluationRows(len(rollout.scores) * self.accelerator.num_processes)
        self.metrics.add_evaluation(rollout, rows.next_are_real(len(rollout.scores), self.accelerator))
        return {}

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """
        Evaluate `num_generations_eval` sampled completions of each prompt.

        This does not change the state of training. The arguments and the output are transformers'.
        """
        check_evaluation_batch(self.args)
        total = len(dataloader.dataset) * self.num_generations_eval
        self._metrics["eval"].clear()  # an evaluation that raised may have left entries in both
        self.metrics.eval = Accumulator()
        with (
            untouched_rng(self.accelerator, self.args),
            self.metrics.untimed(),
            self._evaluation_state(EvaluationRows(total)),
        ):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        logged = {name: np.array(values, float) for name, values in self._metrics["eval"].items()}
        self._metrics["eval"].clear()  # else TRL's `log` would add them once more
        metrics = {
            name: float(np.nanmean(values))
            for name, values in logged.items()
            if name not in (*GRPO_ONLY_METRICS, "num_tokens") and not np.isnan(values).all()
        }
        metrics |= self.metrics.means("eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    @contextmanager
    def _evaluation_state(self, rows: EvaluationRows) -> Iterator[None]:
        """Within the `with` block, count rows by `rows`, and use environments of the evaluation's own."""
        self._evaluation = rows
        # TRL's profiling writes to Trackio, which transformers has closed by the evaluation after training
        trackers = [name for name in self.args.report_to if name != "trackio" or trackio_is_open()]
        try:
            with self._own_environments(), temporarily(self.args, report_to=trackers):
                yield
        finally:
            self._evaluation = None

    # ---- Environments ----

    def _own_environments(self) -> AbstractContextManager:
        """Return a context with separate environments, so that evaluation does not change those of training."""
        if self.environment_factories is None:
            return nullcontext()
        if self._eval_pool is None:
            self._eval_pool = {name: [factory()] for name, factory in self.environment_factories.items()}
        return temporarily(self, _environment_pool=self._eval_pool)

    def _environment_states(self) -> dict[str, dict[str, list[Any]]]:
        """Return [`states_of`] the environments of training and of evaluation, by `train` and `eval`."""
        if self.environment_factories is None:
            return {}
        pools = {"train": self._environment_pool, "eval": self._eval_pool or {}}
        return {name: states for name, pool in pools.items() if (states := states_of(pool))}

    def _load_environments(self, states: dict[str, dict[str, list[Any]]]) -> None:
        if self.environment_factories is None:
            return
        load_states(self._environment_pool, self.environment_factories, states.get("train", {}))
        if states.get("eval"):
            with self._own_environments():
                load_states(self._environment_pool, self.environment_factories, states["eval"])

    # ---- Logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_loss" in logs:
            # An evaluation after the last step leaves the model in evaluation mode, and the steps since the last log
            # unlogged; and the Trainer divides the loss of the whole run by the steps since the run was resumed
            self.model.train()
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        if self.model.training:
            for name in GRPO_ONLY_METRICS:
                self._metrics["train"].pop(name, None)
            if "learning_rate" in logs:
                logs["learning_rate"] *= self.learning_rate_controller.scaler.last_factor
            report = self.metrics.report(start_time)
            self._metrics["train"].update({name: [number] for name, number in report.items()})
        # As JSON: a policy may call a tool with any value, but a table needs one type for each column
        logged = ("prompt", "completion") if self.log_completions and self.tools else ()
        shown = {
            name: [json.dumps(each, ensure_ascii=False, default=str) for each in self._logs[name]] for name in logged
        }
        with temporarily(self, _logs={**self._logs, **shown}):
            super().log(logs, start_time)


class _EpochSeeded(Sampler):
    """Reseed TRL's RepeatSampler before each epoch, with `seed` plus the epoch's number, which `epoch()` returns."""

    # TRL shuffles all epochs with one generator, so a resumed run would replay epoch 0

    def __init__(self, sampler: RepeatSampler, seed: int, epoch: Callable[[], int]):
        self.sampler = sampler
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return self._rows_of(self.epoch())

    def rollouts_of(self, epoch: int) -> list[int]:
        """Return an epoch's dataset indices, one for each completion of all processes, in the order of rollouts."""
        with temporarily(self.sampler, repeat_count=1):
            return list(self._rows_of(epoch))

    def _rows_of(self, epoch: int) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.seed + epoch)
        return iter(self.sampler)
