"""Configuration of [`PPOTrainer`]: TRL's `RLOOConfig` plus what PPO needs, under TRL 1.12's `PPOConfig` names."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from trl import RLOOConfig

from ..functional import KL_ESTIMATORS, LAM_SCHEDULES
from ..runs.nearest import did_you_mean
from ..runs.redaction import HidesCredentials
from ..runs.settings import SavingSettings, check_score_settings, check_settings, resolve_bf16, resolve_checkpointing

# One thing, two names: the alias (RLOO's or TRL 1.12's) sets the name on the right and is None otherwise.
ALIASES = {
    "beta": "kl_coef",
    "epsilon": "cliprange",
    "num_iterations": "num_ppo_epochs",
    "response_length": "max_completion_length",
}

# Fields that would do nothing here, or harm: any value but the default raises with the reason.
REFUSED = {
    "average_tokens_across_devices": "token counts are always taken over all processes",
    "batch_eval_metrics": "evaluation scores generated answers; there is no `compute_metrics`",
    "bf16_full_eval": "it would cast the weights that are trained; use `bf16`",
    "dataloader_drop_last": "evaluation counts each prompt once, and training rollouts are always full",
    "eval_accumulation_steps": "evaluation keeps sums, not predictions",
    "eval_do_concat_batches": "evaluation keeps sums, not predictions",
    "eval_use_gather_object": "evaluation keeps sums, not predictions",
    "ignore_data_skip": "a resumed run must see the prompts it would have seen",
    "fp16_full_eval": "it would cast the weights that are trained; use `fp16`",
    "include_for_metrics": "evaluation scores generated answers; there is no `compute_metrics`",
    "include_num_input_tokens_seen": "a batch is a list of prompts; tokens are logged as `num_tokens` anyway",
    "label_names": "there are no labels",
    "label_smoothing_factor": "there are no labels",
    "length_column_name": "prompts are drawn in a seeded random order",
    "liger_kernel_config": 'use `model_init_kwargs={"use_kernels": True}`',
    "log_multimodal": "vision-language models are not supported",
    "model_adapter_name": "the trained adapter is the one of `peft_config`",
    "neftune_noise_alpha": "noise on the embeddings makes log-probs of one text differ between two forward passes",
    "prediction_loss_only": "evaluation scores generated answers and computes no loss",
    "ref_adapter_name": "with `peft_config` the reference is the model with its adapter switched off",
    "torch_compile": "it has not been run with the actor-critic wrapper",
    "torch_compile_backend": "it has not been run with the actor-critic wrapper",
    "torch_compile_mode": "it has not been run with the actor-critic wrapper",
    "train_sampling_strategy": "prompts are drawn in a seeded random order",
    "transformers_continuous_batching_config": "see `use_transformers_continuous_batching`",
    "use_liger_kernel": 'use `model_init_kwargs={"use_kernels": True}`',
    "use_transformers_continuous_batching": "TRL casts the trained weights to the generation dtype for good; use vLLM",
    "use_transformers_paged": "see `use_transformers_continuous_batching`",
}

# What `generation_kwargs` may hold without vLLM. These leave the distribution of each token as the policy has it …
ON_POLICY_GENERATION_KWARGS = {
    "cache_config",
    "cache_implementation",
    "max_cache_len",
    "max_time",
    "prefill_chunk_size",
    "use_cache",
}
# … and these do not
OFF_POLICY_GENERATION_KWARGS = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "do_sample",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
    "temperature",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "watermarking_config",
}
# vLLM refuses what it does not know by itself; of the rest, these leave the distribution alone
ON_POLICY_VLLM_KWARGS = {"detokenize", "seed", "skip_special_tokens"}

_ENDS = (
    "a response ends where the policy draws an EOS, so that its score lands there: set `stop_token_id`, or give the "
    "model's `generation_config.eos_token_id` a list"
)
REFUSED_GENERATION_KWARGS = {
    **dict.fromkeys(("eos_token_id", "include_stop_str_in_output", "stop", "stop_strings", "stop_token_ids"), _ENDS),
    **dict.fromkeys(("max_length", "max_new_tokens", "max_tokens"), "set `max_completion_length`"),
    **dict.fromkeys(("n", "num_return_sequences"), "set `num_generations`"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "the log-prob of each sampled token is kept, and no others"),
    **dict.fromkeys(("detokenize", "seed", "skip_special_tokens"), "only vLLM reads it"),
    **dict.fromkeys(("compile_config", "disable_compile"), "TRL switches compilation off in rollouts"),
}

_RANGES = {  # name: (rule in words, test of a value that is not None)
    "adam_epsilon": ("> 0", lambda x: x > 0),
    "cliprange": ("> 0", lambda x: x > 0),
    "cliprange_value": ("> 0, or None for no clipping", lambda x: x > 0),
    "critic_learning_rate": (">= 0", lambda x: x >= 0),
    "critic_steps": (">= 1", lambda x: x >= 1),
    "critic_warmup_rollouts": (">= 0", lambda x: x >= 0),
    "dual_clip": ("> 1", lambda x: x > 1),
    "entropy_coef": (">= 0", lambda x: x >= 0),
    "epsilon_high": ("> 0", lambda x: x > 0),
    "gamma": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "gradient_accumulation_steps": (">= 1", lambda x: x >= 1),
    "importance_sampling_clip_max": (">= 1, the weight on-policy, or None", lambda x: x >= 1),
    "importance_sampling_clip_min": ("in [0, 1], 1 being the weight on-policy, or None", lambda x: 0 <= x <= 1),
    "kl_coef": ("finite and >= 0", lambda x: 0 <= x < math.inf),
    "kl_coef_max": (">= 0", lambda x: x >= 0),
    "kl_coef_min": (">= 0", lambda x: x >= 0),
    "kl_horizon": ("> 0 episodes", lambda x: x > 0),
    "kl_target": ("> 0 nats per response", lambda x: x > 0),
    "lam": ("in [0, 1]", lambda x: 0 <= x <= 1),
    **dict.fromkeys(LAM_SCHEDULES, ("> 0", lambda x: 0 < x < math.inf)),
    "lam_value": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "local_rollout_forward_batch_size": (">= 1", lambda x: x >= 1),
    "logits_budget_gb": (">= 0", lambda x: x >= 0),
    "max_approx_kl": ("> 0", lambda x: x > 0),
    "max_completion_length": (">= 1", lambda x: x >= 1),
    "missing_eos_penalty": ("> 0 (it is subtracted)", lambda x: x > 0),
    "num_generations": (">= 1", lambda x: x >= 1),
    "num_mini_batches": (">= 1", lambda x: x >= 1),
    "num_ppo_epochs": (">= 1", lambda x: x >= 1),
    "per_device_eval_batch_size": (">= 1", lambda x: x >= 1),
    "per_device_train_batch_size": (">= 1", lambda x: x >= 1),
    "ratio_band": (
        "[low, high] with 0 <= low < 1 < high",
        lambda x: len(x) == 2 and 0 <= x[0] < 1 < x[1] < math.inf,
    ),
    "reward_weights": (
        "a list of finite numbers, not all 0 (nothing would be trained)",
        lambda x: all(isinstance(weight, (int, float)) and abs(weight) < math.inf for weight in x) and any(x),
    ),
    "rollouts_ahead": (">= 0", lambda x: x >= 0),
    "temperature": ("> 0", lambda x: x > 0),
    "total_episodes": (">= 1", lambda x: x >= 1),
    "vf_coef": (">= 0", lambda x: x >= 0),
}

_ONLY_WITH = {  # name: (the setting without which it does nothing, its value)
    **dict.fromkeys(("kl_target", "kl_horizon", "kl_coef_min", "kl_coef_max"), ("kl_controller", "adaptive")),
    **dict.fromkeys(("cliprange", "epsilon_high", "dual_clip"), ("ratio_band", None)),
    "lam": ("lam_alpha", None),
    "reward_group_column": ("reward_normalization", "group"),
    "reward_reference_column": ("reward_normalization", "reference"),
}


@dataclass
class PPOConfig(HidesCredentials, SavingSettings, RLOOConfig):
    r"""
    Configuration of [`PPOTrainer`].

    Fields that every TRL on-policy trainer shares keep `RLOOConfig`'s names and meaning (`max_completion_length`,
    `temperature`, `num_generations`, `reward_weights`, `reward_clip_range`, `use_vllm`, …). PPO's own settings carry
    the names and defaults of TRL 1.12's `PPOConfig`. One optimizer step is one minibatch of
    `per_device_train_batch_size × gradient_accumulation_steps × processes` episodes; a rollout is `num_mini_batches`
    of them and is passed over `num_ppo_epochs` times.

    Parameters:
        > Parameters that control the rollout

        num_mini_batches (`int`, defaults to `1`):
            Minibatches (optimizer steps per pass) in a rollout. Sets RLOO's `steps_per_generation` to
            `num_mini_batches × gradient_accumulation_steps`.
        num_ppo_epochs (`int`, defaults to `4`):
            Passes over each rollout, re-permuted before each. Alias: `num_iterations`.
        total_episodes (`int`, *optional*):
            Episodes (responses) to train on; rounded up to full rollouts, and sets `max_steps`.
        local_rollout_forward_batch_size (`int`, defaults to `64`):
            Rows per process in one forward pass without gradient: generation, reward models, reference, values. What
            is computed of answers does not depend on it; which ones are drawn does, since each chunk draws in turn.
        logits_budget_gb (`float`, defaults to `1.0`):
            GiB that the logits of one log-prob pass may take: rows × response tokens × vocabulary numbers. Beyond,
            and with `0` always, TRL's fused LM head makes them tile by tile, in less memory and more time. The results
            are the same. What is faster on a GPU, where TRL's head is a Triton kernel, has not been measured.
        num_generations (`int`, defaults to `1`):
            Responses per prompt.
        allow_off_policy_sampling (`bool`, defaults to `False`):
            Allow `top_k`, `top_p`, `min_p`, `repetition_penalty` and other `generation_kwargs` that make the sampler
            differ from the policy, with `importance_sampling_mode="none"`, too: what they bias is then logged as
            `sampling/logprob_difference`, and not corrected. A name in `generation_kwargs` that would do nothing in a
            rollout is refused, and so are stop strings: a response ends where the policy draws an EOS.
        old_logprobs (`Literal["auto", "sampler", "recompute"]`, defaults to `"auto"`):
            Where the log-probs before the update, and those of the KL, come from: noted while the response is drawn,
            which saves a forward of the policy, or computed again by the forward that is trained. Where the policy
            samples, in float32 both are the same to 1e-5, else they differ by rounding (and with dropout by more),
            which is logged as `sampling/logprob_difference`. `"auto"` trusts the sampler if all is float32 and nothing
            in `generation_kwargs` or vLLM may differ. Where another one samples, `"sampler"` makes PPO's ratio that of
            the policy to the sampler.
        importance_sampling_mode (`str`, defaults to `"auto"`):
            How the policy's loss is weighted where the sampler's distribution μ is not that of the policy π before the
            update: by w = π/μ of each token (`"token_…"`) or of the whole response (`"sequence_…"`), moved to the
            nearer of [`importance_sampling_clip_min`, `importance_sampling_clip_max`] (`"…_truncate"`) or set to 0
            outside of them (`"…_mask"`). `"auto"` is `"token_truncate"` with vLLM, `allow_off_policy_sampling`,
            `rollouts_ahead`, or settings that change the sampler, and else `"none"`. The names are those of
            `GRPOConfig.vllm_importance_sampling_mode`; formulas, sources and what they cost are in
            docs/off_policy.md.
        importance_sampling_clip_min (`float`, *optional*), importance_sampling_clip_max (`float`, defaults to `3.0`):
            Bounds of w, around 1; at least one of them.
        rollouts_ahead (`int`, defaults to `0`):
            k: while a rollout is trained on, the k next ones are drawn, by a second process with a copy of the policy
            or (k = 1) by a vLLM server. Rollout n is drawn from the policy that rollout n − 1 − k has trained, the
            first k + 1 from the initial one. A process holds k + 1 copies of the weights in memory for it.
        rollout_device (`str`, *optional*):
            Device of the second process, such as `cuda:1`; with several processes one for all, or as many as there are
            on a machine, with commas between. By default the CPU where the run is on one, and else it must be said.
        padding_free (`bool`, defaults to `True`):
            Put rows behind each other in a forward, where that is less work than padding each to the longest. A model
            that does not keep such rows apart (a state-space model) is found out, and padded.
        missing_eos_score (`float`, *optional*):
            Score of a response that does not end by EOS, in place of its own (N+ detail "EOS trick"; −1 there).
        missing_eos_penalty (`float`, *optional*):
            Subtracted from the score of a response that does not end by EOS (TRL 1.12).
        stop_token (`Literal["eos"]`, *optional*), stop_token_id (`int`, *optional*):
            TRL 1.12's names. Responses always stop at EOS here; `stop_token_id` is one more id that ends them.
        response_length (`int`, *optional*):
            TRL 1.12's name of `max_completion_length`.

        > Parameters that control the reward

        kl_coef (`float`, defaults to `0.05`):
            Coefficient of the per-token KL penalty; where the adaptive controller starts. `0` keeps the reference and
            logs the KL. Alias: `beta`.
        kl_estimator (`str`, defaults to `"k1"`):
            Estimator that shapes the reward, a name in `trl_ext.functional.KL_ESTIMATORS`. `objective/kl` and the
            controller always use the summed k1.
        kl_controller (`Literal["fixed", "adaptive"]`, defaults to `"fixed"`):
            `"adaptive"` moves `kl_coef` so that `objective/kl` stays at `kl_target` (Ziegler et al., 1909.08593).
        kl_target (`float`, defaults to `6.0`):
            Target of `objective/kl`, in nats summed over a response.
        kl_horizon (`float`, defaults to `10000`):
            Episodes over which the coefficient can change by about 20 %.
        kl_coef_min, kl_coef_max (`float`, default to `0.0` and no limit):
            Bounds of the adaptive coefficient.
        use_ref_model (`bool`, defaults to `True`):
            `False` trains without a reference: no KL penalty, no `objective/kl`. Needs `kl_coef=0`.
        reward_normalization (`Literal["none", "running", "batch", "group", "reference"]`, defaults to `"none"`):
            What the score is standardised by, before `reward_clip_range`: moments of all scores so far, of this
            rollout, of all scores so far in the row's group, or (mean only) of the demonstrations in the dataset.
        reward_group_column (`str`, *optional*):
            Dataset column that names the row's group, for `"group"`.
        reward_reference_column (`str`, defaults to `"completion"`):
            Dataset column with the demonstration, for `"reference"`.
        share_reward_base (`Literal["auto", "never", "always"]`, defaults to `"auto"`):
            Whether a reward model that was saved as a LoRA adapter becomes a third adapter on the policy's base,
            instead of being loaded with a base of its own. `"auto"` does so if that gives the same scores: the weights
            and the quantisation of the base are those that it was trained on. `"always"` raises where they are not.
        whiten_rewards (`bool`, defaults to `False`):
            Divide token rewards by their standard deviation over all processes (the mean is kept).

        > Parameters that control the loss

        gamma (`float`, defaults to `1.0`), lam (`float`, defaults to `0.95`):
            Discount and λ of GAE.
        lam_value (`float`, *optional*):
            λ of the critic's target, if it is to differ from `lam` (VC-PPO, 2503.01491).
        lam_alpha (`float`, *optional*):
            α of a λ that depends on the length of each response in tokens, λ = 1 − 1/(α·length), 0 where α·length ≤ 1,
            in place of `lam` (VAPO, 2504.05118, with 0.05; SAO, 2607.07508, with 1.5). The critic's target then takes
            `lam_value`, by default 1.
        normalize_advantages (`bool`, defaults to `True`):
            Whiten advantages over the real tokens of all processes.
        cliprange (`float`, defaults to `0.2`), epsilon_high (`float`, *optional*):
            Clip range of the ratio, and its upper side if that differs. Alias: `epsilon`.
        dual_clip (`float`, *optional*):
            Bound c > 1 of the loss where the advantage is negative (1912.09729).
        ratio_band (`list[float]`, *optional*):
            Two numbers, such as `[0.7, 6.0]`: in place of clipping, tokens whose ratio lies outside have no gradient
            (2602.15763, 2607.07508). They still count in the mean over tokens. `policy/clipfrac_avg` is their share.
        cliprange_value (`float` or `None`, defaults to `0.2`), vf_coef (`float`, defaults to `0.1`):
            Clip range and weight of the value loss.
        entropy_coef (`float`, defaults to `0.0`):
            Weight of the entropy bonus.
        max_approx_kl (`float`, *optional*):
            Stop updating on a rollout once a minibatch's `policy/approxkl_avg` exceeds this.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic; `learning_rate` if not set.
        critic_steps (`int`, defaults to `1`):
            Updates of the critic for each update of the policy: each of the `num_ppo_epochs` passes over a rollout is
            made so many times, and all but the last of them train the critic alone. Every one of them is an optimizer
            step, for `max_steps`, `save_steps` and the learning-rate schedule.
        critic_trains (`Literal["all", "mlp"]`, defaults to `"all"`):
            Which of the critic's weights are trained: all (of a critic that is an adapter: those of the adapter and
            its head), or of these only those in MLPs, experts included, and the head.
        critic_warmup_rollouts (`int`, defaults to `0`):
            First rollouts in which only the critic is trained.

        > Parameters that control evaluation and loading

        eval_greedy (`bool`, defaults to `True`):
            Evaluate with greedy decoding, too (`eval_greedy/…`).
        resume_anyway (`bool`, defaults to `False`):
            Go on from a checkpoint though the settings of the run that wrote it differ.
        save_in_background (`bool`, defaults to `False`):
            Write checkpoints while training goes on, from a copy in memory that is kept for the next one. At most one
            is being written, and `train` returns when the last one is complete.
        on_save_failure (`Literal["stop", "continue"]`, defaults to `"stop"`):
            What follows if a checkpoint could not be written, for want of space, say: the run ends with one sentence,
            or says it and goes on. What was written of it is removed.
        record_run (`bool`, defaults to `True`):
            Write what the run logs (`metrics.rank0.jsonl`), some completions of each rollout, and the page
            `report.html` when it ends, into `output_dir`. The main process alone writes; what cannot be written is a
            warning.
        dataset_num_proc (`int`, *optional*):
            TRL 1.12's name, accepted and not needed: prompts are tokenised in the rollout.
        sft_model_path, reward_model_path (`str`, *optional*):
            TRL 1.12's names for the trainer's `model` and `reward_funcs`, used where those are not given.
        num_sample_generations (`int`, *optional*):
            TRL 1.12's name: anything above 0 sets `log_completions`.
        model_adapter_name, ref_adapter_name (`str`, *optional*):
            TRL 1.12's names, refused: with `peft_config` the reference is the model without its adapter.

    > [!NOTE]
    > Defaults that differ from `RLOOConfig`'s: `learning_rate` 3e-6, `adam_epsilon` 1e-5, `disable_dropout` True,
    > `num_generations` 1, `normalize_advantages` True, `bf16` False on a CPU, `num_completions_to_print` 4.
    """

    if TYPE_CHECKING:  # set here, declared by parents that mypy reads as Any
        generation_batch_size: Any = None
        max_steps: Any = None
        metric_for_best_model: Any = None
        steps_per_generation: Any = None
        top_k: Any = None

    learning_rate: float = field(default=3e-6, metadata={"help": "The initial learning rate for AdamW."})
    adam_epsilon: float = field(default=1e-5, metadata={"help": "Epsilon of AdamW (N+ details)."})
    disable_dropout: bool = field(default=True, metadata={"help": "Switch dropout off in all models."})
    num_generations: int | None = field(default=1, metadata={"help": "Responses per prompt."})
    normalize_advantages: bool = field(
        default=True, metadata={"help": "Whiten advantages over the real tokens of all processes."}
    )
    beta: float | None = field(default=None, metadata={"help": "Alias of `kl_coef`."})
    epsilon: float | None = field(default=None, metadata={"help": "Alias of `cliprange`."})
    num_iterations: int | None = field(default=None, metadata={"help": "Alias of `num_ppo_epochs`."})

    # The rollout
    num_mini_batches: int = field(default=1, metadata={"help": "Minibatches (optimizer steps per pass) in a rollout."})
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout."})
    total_episodes: int | None = field(default=None, metadata={"help": "Episodes to train on; sets `max_steps`."})
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Rows per process in one forward pass without gradient."}
    )
    logits_budget_gb: float = field(
        default=1.0, metadata={"help": "GiB that the logits of one pass may take; beyond, they are made in tiles."}
    )
    allow_off_policy_sampling: bool = field(
        default=False, metadata={"help": "Allow sampling from another distribution than the policy's own."}
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = field(
        default="auto", metadata={"help": "Where the log-probs before the update come from."}
    )
    importance_sampling_mode: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = field(default="auto", metadata={"help": "How the loss is weighted where another policy has sampled."})
    importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower bound of the importance weight."}
    )
    importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper bound of the importance weight."}
    )
    rollouts_ahead: int = field(
        default=0, metadata={"help": "Rollouts that are generated while an earlier one is trained on."}
    )
    rollout_device: str | None = field(
        default=None, metadata={"help": "Device of the process that generates rollouts ahead."}
    )
    padding_free: bool = field(default=True, metadata={"help": "Pack rows in a forward instead of padding them."})
    missing_eos_score: float | None = field(
        default=None, metadata={"help": "Score of a response without EOS, in place of its own."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a response without EOS."}
    )
    response_length: int | None = field(default=None, metadata={"help": "Alias of `max_completion_length`."})
    stop_token: Literal["eos"] | None = field(
        default=None, metadata={"help": "TRL 1.12's name. Responses always stop at EOS."}
    )
    stop_token_id: int | None = field(default=None, metadata={"help": "One more token id that ends a response."})

    # The reward
    kl_coef: float = field(default=0.05, metadata={"help": "Coefficient of the per-token KL penalty."})
    kl_estimator: Literal[tuple(KL_ESTIMATORS)] = field(  # type: ignore[valid-type]
        default="k1", metadata={"help": "KL estimator that shapes the reward."}
    )
    kl_controller: Literal["fixed", "adaptive"] = field(
        default="fixed", metadata={"help": "Whether `kl_coef` is moved to hold `kl_target`."}
    )
    kl_target: float = field(default=6.0, metadata={"help": "Target of `objective/kl`, nats per response."})
    kl_horizon: float = field(default=10000, metadata={"help": "Horizon of the adaptive controller, episodes."})
    kl_coef_min: float = field(default=0.0, metadata={"help": "Lower bound of the adaptive coefficient."})
    kl_coef_max: float | None = field(default=None, metadata={"help": "Upper bound of the adaptive coefficient."})
    use_ref_model: bool = field(default=True, metadata={"help": "Keep a frozen reference model and log the KL to it."})
    reward_normalization: Literal["none", "running", "batch", "group", "reference"] = field(
        default="none", metadata={"help": "What scores are standardised by."}
    )
    reward_group_column: str | None = field(
        default=None, metadata={"help": "Dataset column with the group, for `reward_normalization: group`."}
    )
    reward_reference_column: str = field(
        default="completion", metadata={"help": "Dataset column with the demonstration, for `reference`."}
    )
    share_reward_base: Literal["auto", "never", "always"] = field(
        default="auto", metadata={"help": "Whether a reward model saved as an adapter uses the policy's base."}
    )
    whiten_rewards: bool = field(default=False, metadata={"help": "Whiten token rewards, keeping their mean."})

    # The loss
    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of GAE."})
    lam_value: float | None = field(default=None, metadata={"help": "Lambda of the critic's target; `lam` if unset."})
    lam_alpha: float | None = field(
        default=None, metadata={"help": "Alpha of the length-adaptive lambda 1 - 1/(alpha * length)."}
    )
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the ratio."})
    dual_clip: float | None = field(default=None, metadata={"help": "Bound of the loss for negative advantages."})
    ratio_band: list[float] | None = field(
        default=None, metadata={"help": "Lowest and highest ratio; tokens outside take no part."}
    )
    cliprange_value: float | None = field(default=0.2, metadata={"help": "Clip range of the value function."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    max_approx_kl: float | None = field(
        default=None, metadata={"help": "Stop updating on a rollout once a minibatch's approximate KL exceeds this."}
    )
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the critic; `learning_rate` if unset."}
    )
    critic_steps: int = field(default=1, metadata={"help": "Updates of the critic for each one of the policy."})
    critic_trains: Literal["all", "mlp"] = field(
        default="all", metadata={"help": "Which of the critic's weights are trained."}
    )
    critic_warmup_rollouts: int = field(default=0, metadata={"help": "First rollouts that train the critic alone."})

    num_completions_to_print: int | None = field(
        default=4, metadata={"help": "Completions that `log_completions` prints at a log; `None` prints all."}
    )

    # Evaluation and loading
    eval_greedy: bool = field(default=True, metadata={"help": "Evaluate with greedy decoding, too."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "TRL 1.12's name; not needed."})
    sft_model_path: str | None = field(default=None, metadata={"help": "TRL 1.12's name for the trainer's `model`."})
    reward_model_path: str | None = field(
        default=None, metadata={"help": "TRL 1.12's name for a reward model among `reward_funcs`."}
    )
    num_sample_generations: int | None = field(
        default=None, metadata={"help": "TRL 1.12's name: above 0 sets `log_completions`."}
    )
    resume_anyway: bool = field(
        default=False, metadata={"help": "Go on from a checkpoint though the settings differ."}
    )
    model_adapter_name: str | None = field(default=None, metadata={"help": "Refused, see `peft_config`."})
    ref_adapter_name: str | None = field(default=None, metadata={"help": "Refused, see `peft_config`."})

    def __post_init__(self):
        self.num_generations = 1 if self.num_generations is None else self.num_generations
        self.top_k = self.top_k or 0  # transformers would make 50 of None
        resolve_bf16(self)
        resolve_checkpointing(self)
        self._resolve_aliases()
        self._refuse()
        self._check_values()
        if self.num_sample_generations:
            self.log_completions = True
        if self.metric_for_best_model is None and (self.load_best_model_at_end or str(self.save_strategy) == "best"):
            self.metric_for_best_model, self.greater_is_better = "eval_objective/scores", True
        try:
            super().__post_init__()
        except ValueError as error:
            if str(error).startswith("generation_batch_size ("):
                raise ValueError(
                    f"{error} A rollout is `per_device_train_batch_size` {self.per_device_train_batch_size} × "
                    f"`gradient_accumulation_steps` {self.gradient_accumulation_steps} × `num_mini_batches` "
                    f"{self.num_mini_batches} × {self.world_size} process(es): change one of them, or "
                    f"`num_generations` {self.num_generations}."
                ) from None
            # RLOO needs two generations for its baseline and says so in its last check; PPO has a critic
            if self.num_generations != 1 or "at least 2 generations" not in str(error):
                raise
        self._check_sampling()
        self._resolve_num_mini_batches()
        self._resolve_max_steps()

    def _resolve_aliases(self):
        defaults = {f.name: f.default for f in fields(self)}
        for alias, name in ALIASES.items():
            value, named = getattr(self, alias), getattr(self, name)
            if value is None:
                continue
            if named not in (defaults[name], value):
                raise ValueError(
                    f"`{alias}={value}` and `{name}={named}` are two names of one setting: set one of them."
                )
            setattr(self, name, value)
            setattr(self, alias, None)

        # RLOO fills in both of these, so both at once come from a copy of a finished config (`dataclasses.replace`);
        # a single one is the user's alias of `num_mini_batches`, which needs the number of processes, so RLOO reads it
        both = (self.steps_per_generation, self.generation_batch_size)
        if None not in both and self.num_mini_batches == 1 and both[0] != self.gradient_accumulation_steps:
            raise ValueError(
                f"`steps_per_generation={both[0]}` and `generation_batch_size={both[1]}` are two names of one "
                "setting: set `num_mini_batches` only."
            )
        if (self.steps_per_generation is None) == (self.generation_batch_size is None):
            self.steps_per_generation = self.num_mini_batches * self.gradient_accumulation_steps
            self.generation_batch_size = None

    def _resolve_num_mini_batches(self):
        mini_batches, remainder = divmod(self.steps_per_generation, self.gradient_accumulation_steps)
        if remainder or self.num_mini_batches not in (1, mini_batches):
            raise ValueError(
                f"`steps_per_generation={self.steps_per_generation}` (`generation_batch_size="
                f"{self.generation_batch_size}`) must be `num_mini_batches` × `gradient_accumulation_steps` = "
                f"{self.num_mini_batches} × {self.gradient_accumulation_steps}: set `num_mini_batches` only."
            )
        self.num_mini_batches = mini_batches

    def _refuse(self):
        for f in fields(self):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            # The CLI parser reads the default "no" of `include_num_input_tokens_seen` as False
            unset = (default, None, False) if default == "no" else (default, None)
            if f.name in REFUSED and getattr(self, f.name) not in unset:
                raise ValueError(f"`{f.name}={getattr(self, f.name)}` is not supported: {REFUSED[f.name]}.")

    def _check_values(self):
        check_settings(self, _RANGES, _ONLY_WITH)
        if self.max_completion_length is None:  # transformers would make 20 tokens, prompt included, of it
            raise ValueError("`max_completion_length` must be a number of tokens, got None.")
        check_score_settings(self)
        if self.stop_token and self.stop_token_id is not None:
            raise ValueError("`stop_token` and `stop_token_id` are two names of one setting: set one of them.")
        if self.kl_controller != "fixed":
            if self.kl_coef == 0:
                raise ValueError(
                    f"`kl_controller={self.kl_controller!r}` multiplies `kl_coef`, so it can never leave "
                    "`kl_coef=0`: start from a positive value such as 0.05."
                )
            if not self.kl_coef_min <= self.kl_coef <= (math.inf if self.kl_coef_max is None else self.kl_coef_max):
                raise ValueError(
                    f"`kl_coef={self.kl_coef}` must lie within [`kl_coef_min`, `kl_coef_max`] = [{self.kl_coef_min}, "
                    f"{self.kl_coef_max}]."
                )
        if self.fp16 and self.max_approx_kl is not None:
            raise ValueError(
                "`max_approx_kl` skips optimizer steps, which fp16's loss scaler does not allow: use `bf16`, or drop "
                "it."
            )
        if not self.use_ref_model and (self.kl_coef != 0 or self.sync_ref_model):
            raise ValueError(
                f"`use_ref_model=False` drops the reference, but `kl_coef={self.kl_coef}`, `sync_ref_model="
                f"{self.sync_ref_model}` need one: set `kl_coef=0` and `sync_ref_model=False`."
            )
        self._check_ahead()
        if self.reward_normalization == "group" and not self.reward_group_column:
            raise ValueError(
                "`reward_normalization='group'` needs `reward_group_column`, the dataset column to group by."
            )

    def _check_ahead(self):
        k = self.rollouts_ahead
        if not isinstance(self.rollout_device, (str, type(None))):  # YAML reads `1` as a number
            raise ValueError(
                f"`rollout_device={self.rollout_device!r}` is no name of a device: give one such as 'cuda:1', or "
                "several with commas between."
            )
        if self.rollout_device is not None and (k == 0 or self.use_vllm):
            who = "vLLM's server draws" if self.use_vllm else "`rollouts_ahead=0` starts none"
            raise ValueError(
                f"`rollout_device={self.rollout_device}` is for the second process that draws rollouts ahead, but "
                f"{who}: leave it out."
            )
        if self.use_vllm and k and self.vllm_mode != "server":
            raise ValueError(
                f"`rollouts_ahead={k}` needs who generates while this process trains, but vLLM runs within it "
                f"(`vllm_mode={self.vllm_mode!r}`): set `vllm_mode='server'`, or `rollouts_ahead=0`."
            )
        if self.use_vllm and k > 1:
            raise ValueError(
                f"`rollouts_ahead={k}` with vLLM: the weights of a server cannot change under a generation, so it is "
                "at most one ahead: set 1, or draw in a second process (`use_vllm=False`)."
            )

    def _check_sampling(self):
        kwargs: dict[str, Any] = self.generation_kwargs or {}
        on_policy = ON_POLICY_VLLM_KWARGS if self.use_vllm else ON_POLICY_GENERATION_KWARGS
        for name, value in kwargs.items():
            if name in on_policy or (name in OFF_POLICY_GENERATION_KWARGS and not self.use_vllm):
                continue
            if name in REFUSED_GENERATION_KWARGS or not self.use_vllm:
                reason = REFUSED_GENERATION_KWARGS.get(name, "it would do nothing in a rollout, or break it")
                known = "" if self.use_vllm else did_you_mean(name, [*on_policy, *OFF_POLICY_GENERATION_KWARGS])
                raise ValueError(f"`generation_kwargs={{{name!r}: {value!r}}}` is not supported: {reason}{known}.")
        if self.use_vllm and self.temperature > 2:
            raise ValueError(f"`temperature={self.temperature}` is above 2, which vLLM refuses: lower it.")
        if (self.num_generations or 1) > 1 and kwargs.get("seed") is not None:
            raise ValueError(
                f"`generation_kwargs={{'seed': {kwargs['seed']}}}` would give the {self.num_generations} answers to a "
                "prompt (`num_generations`) one seed, and so one text: leave it out, `seed` decides what is drawn."
            )
        self._check_correction()

    def _check_correction(self):
        changed, correction = self._changes_to_sampler, self.importance_correction
        mode = self.importance_sampling_mode
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if changed and correction == "none" and self.old_logprobs != "sampler" and not self.allow_off_policy_sampling:
            raise ValueError(
                f"{changed} change the sampler but not the log-probs that are trained, which biases the ratio and the "
                f"KL (it can turn negative), and `importance_sampling_mode={mode!r}` does not correct for it. Remove "
                "them, correct for it by 'auto', or set `allow_off_policy_sampling=True` and watch "
                "`sampling/logprob_difference`."
            )
        if self.old_logprobs == "sampler" and mode not in ("auto", "none"):
            raise ValueError(
                f"`importance_sampling_mode={mode!r}` cannot act: with `old_logprobs='sampler'` PPO's own ratio is "
                "that of the policy to the sampler. Leave one of them at 'auto'."
            )
        if changed.get("do_sample", True) in (False, None) and self.needs_sampler_logprobs:
            raise ValueError(
                "`generation_kwargs={'do_sample': False}` draws nothing, so that there is no probability to correct "
                "by: leave it out, or set `importance_sampling_mode='none'`, `old_logprobs='recompute'` and "
                "`allow_off_policy_sampling=True`."
            )
        if correction == "none" and (low, high) != (None, 3.0):
            raise ValueError(
                f"`importance_sampling_clip_min={low}` and `importance_sampling_clip_max={high}` bound weights, but "
                f"`importance_sampling_mode={mode!r}` gives none here: set a mode such as 'token_truncate', or leave "
                "them out."
            )
        if correction != "none" and low is None and high is None:
            raise ValueError(
                f"`importance_sampling_mode={mode!r}` needs a bound, got `importance_sampling_clip_min=None` and "
                "`importance_sampling_clip_max=None`: a weight without one may be of any size."
            )
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"`importance_sampling_clip_min={low}` must be below `importance_sampling_clip_max={high}`."
            )

    def _resolve_max_steps(self):
        if self.total_episodes is None:
            return
        steps = math.ceil(self.total_episodes / self.batch_size) * self.steps_per_rollout
        if self.max_steps not in (-1, steps):
            raise ValueError(
                f"`total_episodes={self.total_episodes}` makes {steps} optimizer steps (rollouts of {self.batch_size} "
                f"episodes × {self.num_mini_batches} minibatches × {self.num_ppo_epochs} epochs"
                f"{f' × {self.critic_steps} critic steps' if self.critic_steps > 1 else ''}), but `max_steps="
                f"{self.max_steps}`: set one of them."
            )
        self.max_steps = steps

    @property
    def another_samples(self) -> bool:
        """Whether answers may be drawn from another distribution than that of the policy before the update."""
        is_allowed = self.use_vllm or self.allow_off_policy_sampling or self.rollouts_ahead > 0
        return bool(is_allowed or self._changes_to_sampler)

    @property
    def _changes_to_sampler(self) -> dict[str, Any]:
        on_policy = ON_POLICY_VLLM_KWARGS if self.use_vllm else ON_POLICY_GENERATION_KWARGS
        changes = {name: value for name, value in (self.generation_kwargs or {}).items() if name not in on_policy}
        neutral = {"top_p": (1.0, None), "top_k": (0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
        return changes | {name: getattr(self, name) for name in neutral if getattr(self, name) not in neutral[name]}

    @property
    def importance_correction(
        self,
    ) -> Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]:
        """What `importance_sampling_mode` stands for: a mode, or `"none"`."""
        if self.importance_sampling_mode != "auto":
            return self.importance_sampling_mode
        return "token_truncate" if self.another_samples and self.old_logprobs != "sampler" else "none"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether training without the log-probs of who has drawn would be wrong."""
        return self.importance_correction != "none" or (self.old_logprobs == "sampler" and self.another_samples)

    @property
    def passes(self) -> int:
        """Passes over a rollout: those of the policy, and those between them that train the critic alone."""
        return self.num_ppo_epochs * self.critic_steps

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on a rollout, those of the critic alone included."""
        return self.num_mini_batches * self.passes

    @property
    def leaves_steps_out(self) -> bool:
        """Whether there are optimizer steps that do not move the policy, or none of the models."""
        return self.critic_warmup_rollouts > 0 or self.critic_steps > 1 or self.max_approx_kl is not None

    @property
    def batch_size(self) -> int:
        """Episodes in a rollout, over all processes (TRL 1.12's name)."""
        return self.mini_batch_size * self.num_mini_batches

    @property
    def mini_batch_size(self) -> int:
        """Episodes in one optimizer step, over all processes (TRL 1.12's name)."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def local_mini_batch_size(self) -> int:
        """Episodes in one optimizer step on this process (TRL 1.12's name)."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def local_batch_size(self) -> int:
        """Episodes of a rollout on this process (TRL 1.12's name)."""
        return self.local_mini_batch_size * self.num_mini_batches
