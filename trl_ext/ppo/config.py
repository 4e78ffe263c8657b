"""Configuration of [`PPOTrainer`]: TRL's `GRPOConfig` plus what PPO needs, under TRL 1.12's `PPOConfig` names."""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from transformers.utils import logging
from trl import GRPOConfig

from ..functional import KL_ESTIMATORS
from ..runs.redaction import HidesCredentials
from ..runs.settings import (
    RunSettings,
    check_settings,
    documented,
    resolve_for_device,
    setting,
)
from ..upstream.statements import refuse

logger = logging.get_logger(__name__)

# Inherited settings that would do nothing in PPO, or do harm: another value than the default raises with the reason
REFUSED = {
    name: reason
    for reason, names in {
        "it is a setting of GRPO's loss, which PPO does not use": """
            delta entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target importance_sampling_level
            loss_type multi_objective_aggregation off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos
            scale_rewards top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos
            vespo_lambda_neg vespo_lambda_pos""",
        "PPO's names are `kl_coef`, `cliprange` and `num_ppo_epochs`": "beta epsilon num_iterations",
        "PPO's names are `importance_sampling_mode`, `importance_sampling_clip_min` and `…_max`": """
            vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
            vllm_importance_sampling_correction vllm_importance_sampling_mode""",
        "it would change the weights or the log-probs that PPO trains": """
            bf16_full_eval cast_lm_head_to_fp32 fp16_full_eval neftune_noise_alpha
            use_transformers_continuous_batching use_transformers_paged""",
        "it has not been tested with the actor-critic": """
            log_multimodal torch_compile torch_compile_backend torch_compile_mode use_liger_kernel""",
        "a resumed run must continue with the prompts that it has not trained on": "ignore_data_skip",
        "PPO measures the KL from a reference that stays fixed": """
            ref_model_mixup_alpha ref_model_sync_steps sync_ref_model""",
        "PPO has no labels, samples its prompts in a seeded order, and evaluates generated completions": """
            average_tokens_across_devices batch_eval_metrics dataloader_drop_last eval_accumulation_steps
            eval_do_concat_batches eval_use_gather_object label_names label_smoothing_factor length_column_name
            prediction_loss_only train_sampling_strategy""",
    }.items()
    for name in names.split()
}

_OF_CRITIC = {"critic_learning_rate", "cliprange_value", "lam", "lam_alpha", "lam_value", "vf_coef"}

# Of `generation_kwargs`, these leave the distribution of each token as the policy has it …
NEUTRAL_GENERATION_KWARGS = set(
    """cache_config cache_implementation detokenize max_cache_len max_time prefill_chunk_size seed skip_special_tokens
    use_cache""".split()
)
# … and these decide where a completion ends, or how many there are, which PPO must know
REFUSED_GENERATION_KWARGS = set(
    """compile_config disable_compile eos_token_id include_stop_str_in_output logprobs max_length max_new_tokens
    max_tokens n num_return_sequences prompt_logprobs stop stop_strings stop_token_ids""".split()
)


@dataclass
class ReturnSettings:
    """
    Declare settings that PPO shares with the training of a critic before PPO: most of those that decide the scale of
    the returns, and `padding_free`.
    """

    gamma: float = setting(1.0, "Discount factor per token.", range="in [0, 1]")
    reward_weights: list[float] | None = setting(
        None,
        "Weight of each reward function; 1 if unset.",
        range=(
            "a list of numbers, not all 0 (nothing would be trained)",
            any,
        ),
    )
    reward_group_column: str | None = setting(
        None, "Dataset column that names each row's group.", only_with=("reward_normalization", "group")
    )
    missing_eos_score: float | None = setting(
        None,
        "Score that replaces the rewards of a completion that does not end by EOS. It is the EOS trick of the N+ "
        "details (2403.17031), which uses −1.",
    )
    missing_eos_penalty: float | None = setting(
        None, "Subtracted from the score of a completion that does not end by EOS.", range="> 0 (it is subtracted)"
    )
    whiten_rewards: bool = setting(
        False, "Divide token rewards by their standard deviation over all processes, keeping their mean."
    )
    padding_free: bool = setting(
        True,
        "Pack rows into one long sequence for a forward pass instead of padding them. This is done where it is less "
        "work than padding each row to the longest. A state-space model, which would carry state from one packed row "
        "into the next, gets padded rows.",
    )


def check_score_settings(config: Any) -> None:
    """Raise a `ValueError` if the settings of scores, or those of completions without EOS, contradict each other."""
    score = config.missing_eos_score
    penalty = config.missing_eos_penalty
    bounds = config.reward_clip_range
    refuse(
        (
            [score is not None, penalty is not None, config.mask_truncated_completions].count(True) > 1,
            f"A completion without EOS gets a fixed score (`missing_eos_score`, here {score}), a lower score "
            f"(`missing_eos_penalty`, here {penalty}) or is left out (`mask_truncated_completions`, here "
            f"{config.mask_truncated_completions}). Set only one of the three.",
        ),
        (
            bool(bounds) and not bounds[0] < bounds[1],
            f"`reward_clip_range` must be (min, max) with min < max, got {bounds}.",
        ),
        (
            config.reward_normalization == "group" and not config.reward_group_column,
            "`reward_normalization='group'` needs `reward_group_column`, the dataset column to group by.",
        ),
    )


@documented
@dataclass
class PPOConfig(HidesCredentials, ReturnSettings, RunSettings, GRPOConfig):
    """
    Configuration of [`PPOTrainer`].

    Fields that every TRL on-policy trainer shares keep `GRPOConfig`'s names and meaning (`max_completion_length`,
    `temperature`, `num_generations`, `use_vllm`, …). Settings of GRPO's loss are refused. Settings that come from TRL
    1.12's `PPOConfig`, such as `kl_coef`, have its names; of these, `num_mini_batches`, `lam` and `cliprange` have
    other defaults. `baseline`, which is new, is by default `gated`; in TRL 1.12 the baseline is the critic. The
    learning rate is adapted to the KL of the updates (`step_kl_target`).

    One optimizer step trains on a minibatch of `per_device_train_batch_size × gradient_accumulation_steps × processes`
    episodes. A rollout has `num_mini_batches` minibatches, and is trained on in `num_ppo_epochs` passes.

    > [!NOTE]
    > Defaults that differ from `GRPOConfig`'s: `learning_rate` 3e-6, `adam_epsilon` 1e-5, `disable_dropout` True,
    > `num_generations` 1, `bf16` False on a CPU, `num_completions_to_print` 4.
    """

    if TYPE_CHECKING:  # set here, declared by parents that mypy reads as Any
        generation_batch_size: Any = None
        max_steps: Any = None
        metric_for_best_model: Any = None
        steps_per_generation: Any = None
        top_k: Any = None

    learning_rate: float = setting(
        3e-6,
        "Learning rate that the schedule starts from. PPO multiplies it by a factor, unless `step_kl_target` is 0.",
    )
    adam_epsilon: float = setting(1e-5, "Epsilon of AdamW. TRL's default is 1e-8; N+ uses this one.", range="> 0")
    disable_dropout: bool = setting(True, "Switch dropout off in all models.")

    # The rollout
    num_mini_batches: int = setting(
        8,
        "Minibatches (optimizer steps per pass) in a rollout. Sets `steps_per_generation` to "
        "`num_mini_batches × gradient_accumulation_steps`.",
        range=">= 1",
    )
    num_ppo_epochs: int = setting(4, "Passes over each rollout; its rows are shuffled before each pass.", range=">= 1")
    total_episodes: int | None = setting(
        None,
        "Episodes (completions) to train on, rounded up to full rollouts. Sets `max_steps`; if unset, "
        "`num_train_epochs` says how long to train.",
        range=">= 1",
    )
    local_rollout_forward_batch_size: int = setting(
        64,
        "Rows per process in one forward pass without gradient: lower it if a rollout runs out of memory. It applies "
        "to generation, reward models, reference and critic. Another value gives other samples, since completions "
        "are generated in chunks of this size; the score, log-probs and values of a given completion stay the same.",
        range=">= 1",
    )
    logits_budget_gb: float = setting(
        1.0,
        "GiB that the logits of one log-prob pass may take: lower it to save memory, at a cost in time. The logits "
        "are rows × completion tokens × vocabulary numbers. If they need more than this, TRL's fused LM head computes "
        "them tile by tile, with the same results in more time; with 0 it always does.",
        range=">= 0",
    )
    num_generations: int = setting(1, "Completions per prompt.", range=">= 1")
    num_completions_to_print: int | None = setting(
        4, "Number of completions that `log_completions` prints at each log. `None` prints all."
    )
    allow_off_policy_sampling: bool = setting(
        False,
        "Allow sampling from another distribution than the policy's own. This allows `top_k`, `top_p`, `min_p`, "
        '`repetition_penalty` and other `generation_kwargs` with `importance_sampling_mode="none"`, too. The bias is '
        "then logged as `sampling/logprob_difference`, and not corrected.",
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = setting(
        "auto",
        "Source of the log-probs before the update, which the ratio and the KL use. `sampler` takes the log-probs "
        "that were recorded in sampling, which saves a forward pass of the policy; `recompute` computes them by the "
        "forward pass that training uses. In float32 both agree to 1e-5; otherwise they differ by rounding and "
        "dropout (`sampling/logprob_difference`). `auto` is `sampler` if everything is float32, dropout is off, and "
        "neither vLLM nor `generation_kwargs` may change the log-probs; else `recompute`. Where another policy "
        "samples, `sampler` compares the policy with that sampler in PPO's ratio.",
    )
    importance_sampling_mode: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = setting(
        "auto",
        "How the policy's loss is weighted where another policy has sampled. The weight is the policy's probability "
        "before the update divided by the sampler's, of each token (`token_…`) or of the whole completion "
        "(`sequence_…`). A weight beyond a bound becomes the bound (`…_truncate`) or 0 (`…_mask`). `auto` is "
        "`token_truncate` where another policy may sample, else `none`. Formulas, sources and costs are in "
        "docs/off_policy.md.",
    )
    importance_sampling_clip_min: float | None = setting(
        None,
        "Lower bound of the importance weight. A correction needs a lower or an upper bound.",
        range="in [0, 1] (on-policy weights are 1), or None",
    )
    importance_sampling_clip_max: float | None = setting(
        3.0, "Upper bound of the importance weight.", range=">= 1 (on-policy weights are 1), or None"
    )
    rollouts_ahead: int = setting(
        0,
        "How many rollouts a vLLM server generates ahead: with 1 it generates the next rollout while this one is "
        "trained on; see docs/vllm.md.",
        range="in [0, 1]",
    )
    stop_token_id: int | None = setting(None, "Id of another token that ends a completion, besides EOS.")

    # The reward
    kl_coef: float = setting(
        0.05,
        "Coefficient of the per-token KL penalty: the score that a nat of KL costs. The adaptive controller starts "
        "from this value. With 0 there is no penalty, but the KL to the reference is still logged.",
        range="finite and >= 0",
    )
    kl_estimator: str = setting(
        "k1",
        "KL estimator of the penalty. It is a name in `trl_ext.functional.KL_ESTIMATORS`, such as k1, k2 or k3. "
        "`objective/kl` and the controller always use the summed k1.",
        range=(f"one of {[*KL_ESTIMATORS]}", KL_ESTIMATORS.__contains__),
    )
    kl_controller: Literal["fixed", "adaptive"] = setting(
        "fixed",
        "Whether `kl_coef` is fixed, or adapted so that `objective/kl` stays at `kl_target` (Ziegler et al., "
        "1909.08593).",
    )
    kl_target: float = setting(
        6.0,
        "Target of `objective/kl`, in nats summed over a completion.",
        range="> 0 nats per completion",
        only_with=("kl_controller", "adaptive"),
    )
    kl_horizon: float = setting(
        10000,
        "Episodes over which the adaptive coefficient can change by about a fifth.",
        range="> 0 episodes",
        only_with=("kl_controller", "adaptive"),
    )
    kl_coef_min: float = setting(
        0.0, "Lower bound of the adaptive coefficient.", range=">= 0", only_with=("kl_controller", "adaptive")
    )
    kl_coef_max: float | None = setting(
        None, "Upper bound of the adaptive coefficient.", range=">= 0", only_with=("kl_controller", "adaptive")
    )
    use_ref_model: bool = setting(
        True,
        "Keep a frozen reference model and log the KL to it. `False` trains without a reference: no KL penalty, no "
        "`objective/kl`. `False` needs `kl_coef=0`.",
    )
    watch: Literal["off", "warn", "stop", "raise_kl"] = setting(
        "warn",
        "What `HackWatch` does when the reward rises as in a hack: warn once, end training with a checkpoint, or "
        "double `kl_coef`. `off` attaches neither `HackWatch` nor `ScoreFallCallback`.",
    )
    reward_normalization: Literal["none", "running", "batch", "group", "reference"] = setting(
        "none",
        "How scores are standardised, before `reward_clip_range`. `running` uses the mean and standard deviation of "
        "all scores so far, `batch` those of this rollout, `group` those of all scores so far in the row's group. "
        "`reference` subtracts the mean score of the demonstrations in the dataset's column `completion`.",
    )
    reward_clip_range: tuple[float, float] | None = setting(None, "Bounds of the standardised score, as (min, max).")
    share_reward_base: bool = setting(
        True,
        "Let a reward model that was saved as an adapter use the base of a LoRA policy, which must be the base that "
        "the adapter was trained on. If False, or in full fine-tuning, the reward model loads a base of its own.",
    )

    # The loss
    lam: float | None = setting(
        None,
        "λ of GAE. If unset, 0.95 where a reward function or an environment scores tokens or turns, and 1 where each "
        "completion has one score: with 0.95 the first of 100 tokens receives 0.006 of a score at the end.",
        range="in [0, 1]",
        only_with=("lam_alpha", None),
    )
    lam_value: float | None = setting(
        None,
        "λ of the critic's target; the advantages' λ if unset. VC-PPO (2503.01491) uses different values for the two.",
        range="in [0, 1]",
    )
    lam_alpha: float | None = setting(
        None,
        "α of a λ that replaces `lam` and depends on each completion: λ = 1 − 1/(α·length), or 0 where α·length ≤ 1. "
        "The length is in tokens (with `gae_level: turn`, in turns). VAPO (2504.05118) uses 0.05, SAO (2607.07508) "
        "1.5. The critic's target then uses `lam_value`, by default 1.",
        range="> 0 and finite",
    )
    baseline: Literal["critic", "gated", "mean"] = setting(
        "gated",
        "What a return is compared with: the critic's value, the mean return, or both. `mean` is the mean return of "
        "the other completions at the same token (as in REINFORCE), with `num_generations` above 1 only of those "
        "of the same prompt (as in RLOO); there is no critic. `gated` is a weighted mean of both. The critic's "
        "weight, in [0, 1], is logged as `val/baseline_weight`. With this weight the returns of the last rollouts "
        "varied least around the baseline, computed with values from before the critic was trained on them (compare "
        "EVPO, 2604.19485).",
    )
    normalize_advantages: bool = setting(
        True, "Give the advantages mean 0 and variance 1, over the real tokens of all processes."
    )
    cliprange: float | None = setting(
        None,
        "Clip range of the ratio. If unset, 0.4 where `kl_coef` is 0 and `epsilon_high` is unset, else 0.2. Its upper "
        "side is `epsilon_high` if that is set.",
        range="> 0",
        only_with=("ratio_band", None),
    )
    dual_clip: float | None = setting(
        None,
        "Bound c > 1 of the loss where the advantage A is negative: the loss is at most −c·A (1912.09729).",
        range="> 1",
        only_with=("ratio_band", None),
    )
    ratio_band: list[float] | None = setting(
        None,
        "Lowest and highest ratio, such as `[0.7, 6.0]`. Replaces clipping: a token with a ratio outside has no "
        "gradient, but still counts in the mean (2602.15763, 2607.07508). `policy/clipfrac_avg` is the share of such "
        "tokens.",
        range=(
            "[low, high] with 0 <= low < 1 < high",
            lambda x: len(x) == 2 and 0 <= x[0] < 1 < x[1] < math.inf,
        ),
    )
    cliprange_value: float | None = setting(
        0.2, "Clip range of the value function.", range="> 0, or None for no clipping"
    )
    vf_coef: float = setting(0.1, "Weight of the value loss.", range=">= 0")
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", range=">= 0")
    step_kl_target: float = setting(
        0.1,
        "How far the updates on a rollout are to move the policy, in nats per choice, as `policy/step_kl` measures "
        "it. If the policy is certain of a token, that is no choice. With n < 64 episodes in a rollout, whose "
        "gradient is noisier, the target is multiplied by n/64; with n > 128 by n/128, but at most by 2. With "
        "`kl_controller: adaptive` a rollout moves the policy by at most 2.5 · `step_kl_target` · `kl_target` nats "
        "per completion, a quarter of `kl_target` by default. To reach the target, the learning rates of policy and "
        "critic are multiplied by a factor, `learning_rate/factor`. 0 leaves the rates as they are.",
        range=">= 0 nats per choice",
    )
    critic_learning_rate: float | None = setting(
        None, "Learning rate of the critic, often higher than the policy's; `learning_rate` if unset.", range=">= 0"
    )
    critic_warmup_rollouts: int = setting(0, "First rollouts in which only the critic is trained.", range=">= 0")

    # Agents
    tool_timeout: float | None = setting(
        60.0,
        "Seconds that a call of a tool, or an environment's `reset`, `get_reward` or `_step_reward`, may take; None "
        "for no limit. A longer call of a tool fails, and the model reads that it failed.",
        range="> 0",
    )
    gae_level: Literal["token", "turn"] = setting(
        "token",
        "Whether one action is a token or a whole turn, in advantages and in the ratio of the policy's loss. The "
        "tokens of a turn share one advantage, and their log-probs are added up. `gamma` and `lam` are then per turn.",
    )

    def __post_init__(self):
        self.top_k = self.top_k or 0  # transformers would make 50 of None
        self.watch = self.watch or "off"  # YAML reads `off` as false
        resolve_for_device(self)
        for each in fields(self):
            if each.name in REFUSED and getattr(self, each.name) not in (each.default, None):
                raise ValueError(
                    f"`{each.name}={getattr(self, each.name)}` is not supported: {REFUSED[each.name]}. Leave it out."
                )
        check_settings(self, only_with={"epsilon_high": ("ratio_band", None)})
        check_score_settings(self)
        if self.metric_for_best_model in ("reward", "eval_reward"):  # GRPO's name for it
            self.metric_for_best_model = "eval_objective/scores"
        if self.metric_for_best_model is None and (self.load_best_model_at_end or str(self.save_strategy) == "best"):
            self.metric_for_best_model = "eval_objective/scores"
            self.greater_is_better = True
        given = self.steps_per_generation, self.generation_batch_size  # both, if this is a copy of a finished config
        self.steps_per_generation = self.num_mini_batches * self.gradient_accumulation_steps
        self.generation_batch_size = None
        try:
            super().__post_init__()
        except ValueError as error:
            # GRPO compares completions of one prompt, PPO need not. What GRPO checks after this, PPO refuses
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        steps = math.ceil((self.total_episodes or 0) / self.batch_size) * self.steps_per_rollout
        self._check(given, steps)
        if self.total_episodes is not None:
            self.max_steps = steps
        if None not in given and given != (self.steps_per_generation, self.generation_batch_size):
            logger.warning_once(
                f"`steps_per_generation={given[0]}` and `generation_batch_size={given[1]}` are not used in PPO: with "
                f"`num_mini_batches={self.num_mini_batches}` a rollout has {self.generation_batch_size} completions."
            )
        without = [
            each.name for each in fields(self) if each.name in _OF_CRITIC and getattr(self, each.name) != each.default
        ]
        if self.baseline == "mean" and without:
            logger.warning_once(f"`baseline='mean'` has no critic, so {without} have no effect.")

    def _check(self, given: tuple[int | None, int | None], steps: int) -> None:
        """Raise a `ValueError` if settings contradict each other: one would be ignored, or would train wrongly."""
        # `given` are the user's `steps_per_generation` and `generation_batch_size`; `steps` those of `total_episodes`
        kwargs = self.generation_kwargs or {}
        changed = self._changes_to_sampler
        refused = sorted(REFUSED_GENERATION_KWARGS & kwargs.keys())
        is_greedy = kwargs.get("do_sample", True) is False
        is_corrected = self.importance_correction != "none"
        rollout = (self.steps_per_generation, self.generation_batch_size)
        refuse(
            (
                given.count(None) == 1 and all(value != now for value, now in zip(given, rollout, strict=True)),
                f"`steps_per_generation={given[0]}`, `generation_batch_size={given[1]}` cannot be set in PPO: leave "
                "both out, and set `num_mini_batches`, the number of optimizer steps on a rollout in one pass.",
            ),
            (
                self.total_episodes is not None and self.max_steps not in (-1, steps),
                f"`total_episodes={self.total_episodes}` makes {steps} optimizer steps, but "
                f"`max_steps={self.max_steps}`: set only one of them.",
            ),
            (
                self.kl_coef == 0 and (self.kl_controller != "fixed" or self.watch == "raise_kl"),
                "`kl_controller='adaptive'` and `watch='raise_kl'` multiply `kl_coef`, so they cannot change "
                "`kl_coef=0`. Set a positive `kl_coef`, such as 0.05.",
            ),
            (
                self.kl_coef_max is not None and self.kl_coef_min > self.kl_coef_max,
                f"`kl_coef_min={self.kl_coef_min}` is above `kl_coef_max={self.kl_coef_max}`. Swap them.",
            ),
            (
                not self.use_ref_model and self.kl_coef != 0,
                f"`use_ref_model=False` loads no reference, but `kl_coef={self.kl_coef}` needs one. Set `kl_coef=0`, "
                "or leave `use_ref_model` out.",
            ),
            (
                self.rollouts_ahead and not (self.use_vllm and self.vllm_mode == "server"),
                "`rollouts_ahead=1` needs a vLLM server: set `use_vllm=True` and `vllm_mode='server'`.",
            ),
            (
                bool(refused),
                f"`generation_kwargs` may not hold {refused}: leave these out, or set `stop_token_id`, "
                "`max_completion_length` or `num_generations` instead.",
            ),
            (
                self.num_generations > 1 and kwargs.get("seed") is not None,
                "`seed` in `generation_kwargs` would give all completions to a prompt the same text. Leave it out.",
            ),
            (
                changed and not (is_corrected or self.old_logprobs == "sampler" or self.allow_off_policy_sampling),
                f"The settings {changed} change what is sampled but not the log-probs that are trained, and no "
                "importance weight corrects this bias. Remove them, set `importance_sampling_mode='auto'`, or set "
                "`allow_off_policy_sampling=True` and watch `sampling/logprob_difference`.",
            ),
            (
                is_corrected
                and self.importance_sampling_clip_min is None
                and self.importance_sampling_clip_max is None,
                "An importance correction needs a bound: set `importance_sampling_clip_max`, such as 3.0, or "
                "`importance_sampling_clip_min`.",
            ),
            (
                is_greedy and self.needs_sampler_logprobs,
                "`do_sample: False` in `generation_kwargs` decodes greedily, so there are no probabilities to correct "
                "the loss with. Leave it out, or set `importance_sampling_mode='none'`, `old_logprobs='recompute'` "
                "and `allow_off_policy_sampling=True`.",
            ),
            (
                self.old_logprobs == "sampler" and is_corrected,
                f"`importance_sampling_mode={self.importance_sampling_mode!r}` has no effect with "
                "`old_logprobs='sampler'`: PPO's own ratio already compares the policy with the sampler. Leave one of "
                "the two settings out.",
            ),
        )

    @property
    def resolved_cliprange(self) -> float:
        """
        Return `cliprange`. If it is unset, return 0.4 where `kl_coef` is 0 and `epsilon_high` is unset, else 0.2.
        """
        if self.cliprange is not None:
            return self.cliprange
        return 0.4 if self.kl_coef == 0 and self.epsilon_high is None else 0.2

    @property
    def may_sample_off_policy(self) -> bool:
        """
        Return whether completions may be sampled from another distribution than that of the policy before the update.
        """
        is_allowed = self.use_vllm or self.allow_off_policy_sampling
        return bool(is_allowed or self._changes_to_sampler)

    @property
    def _changes_to_sampler(self) -> dict[str, Any]:
        """Return the settings, with values, that let the sampler use another distribution than the policy's."""
        kwargs = self.generation_kwargs or {}
        changes = {name: value for name, value in kwargs.items() if name not in NEUTRAL_GENERATION_KWARGS}
        neutral = {"top_p": (1.0, None), "top_k": (0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
        for name, values in neutral.items():
            value = getattr(self, name)
            if value not in values:
                changes[name] = value
        if "quantized" in (kwargs.get("cache_implementation"), self.cache_implementation):  # it rounds what is read
            changes["cache_implementation"] = "quantized"
        return changes

    @property
    def importance_correction(
        self,
    ) -> Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]:
        """Return `importance_sampling_mode`, with `"auto"` replaced by the mode that it stands for in this run."""
        if self.importance_sampling_mode != "auto":
            return self.importance_sampling_mode
        return "token_truncate" if self.may_sample_off_policy and self.old_logprobs != "sampler" else "none"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Return whether training needs the log-probs under which the completions were sampled."""
        return self.importance_correction != "none" or (self.old_logprobs == "sampler" and self.may_sample_off_policy)

    @property
    def steps_per_rollout(self) -> int:
        """Return the number of optimizer steps on each rollout."""
        return self.num_mini_batches * self.num_ppo_epochs

    @property
    def batch_size(self) -> int:
        """Return the number of episodes in a rollout, over all processes (TRL 1.12's name)."""
        return self.mini_batch_size * self.num_mini_batches

    @property
    def mini_batch_size(self) -> int:
        """Return the number of episodes in one optimizer step, over all processes (TRL 1.12's name)."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
