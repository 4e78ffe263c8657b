"""Configuration of [`PPOTrainer`]: TRL's `RLOOConfig` plus what PPO needs, under TRL 1.12's `PPOConfig` names."""

import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from trl import RLOOConfig

from ..functional import KL_ESTIMATORS, LAM_SCHEDULES
from ..runs.nearest import did_you_mean
from ..runs.redaction import HidesCredentials
from ..runs.settings import (
    SavingSettings,
    check_score_settings,
    check_settings,
    documented,
    resolve_bf16,
    resolve_checkpointing,
    setting,
)

# Settings with two names: the alias on the left (RLOO's) sets the name on the right, and is then None.
ALIASES = {
    "beta": "kl_coef",
    "epsilon": "cliprange",
    "num_iterations": "num_ppo_epochs",
}

# Fields that would do nothing in PPO, or do harm: any value but the default raises an error with this reason.
REFUSED = {
    "average_tokens_across_devices": "token counts are always taken over all processes",
    "batch_eval_metrics": "evaluation scores generated answers; there is no `compute_metrics`",
    "bf16_full_eval": "it would cast the weights that are trained; use `bf16`",
    "dataloader_drop_last": "evaluation counts each prompt once, and training rollouts are always full",
    "eval_accumulation_steps": "evaluation keeps sums, not predictions",
    "eval_do_concat_batches": "evaluation keeps sums, not predictions",
    "eval_use_gather_object": "evaluation keeps sums, not predictions",
    "ignore_data_skip": "a resumed run must continue with the prompts that come next",
    "fp16_full_eval": "it would cast the weights that are trained; use `fp16`",
    "include_for_metrics": "evaluation scores generated answers; there is no `compute_metrics`",
    "include_num_input_tokens_seen": "a batch is a list of prompts; tokens are logged as `num_tokens` anyway",
    "label_names": "there are no labels",
    "label_smoothing_factor": "there are no labels",
    "length_column_name": "prompts are drawn in a seeded random order",
    "liger_kernel_config": 'use `model_init_kwargs={"use_kernels": True}`',
    "log_multimodal": "vision-language models are not supported",
    "neftune_noise_alpha": "noise on the embeddings makes log-probs of one text differ between two forward passes",
    "prediction_loss_only": "evaluation scores generated answers and computes no loss",
    "torch_compile": "it has not been run with the actor-critic wrapper",
    "torch_compile_backend": "it has not been run with the actor-critic wrapper",
    "torch_compile_mode": "it has not been run with the actor-critic wrapper",
    "train_sampling_strategy": "prompts are drawn in a seeded random order",
    "transformers_continuous_batching_config": "see `use_transformers_continuous_batching`",
    "use_liger_kernel": 'use `model_init_kwargs={"use_kernels": True}`',
    "use_transformers_continuous_batching": "it casts the trained weights; use `cache_implementation`",
    "use_transformers_paged": "see `use_transformers_continuous_batching`",
}

# What `generation_kwargs` may hold without vLLM. These leave the distribution of each token as the policy has it …
ON_POLICY_GENERATION_KWARGS = set(
    "cache_config cache_implementation max_cache_len max_time prefill_chunk_size use_cache".split()
)
# … and these do not
OFF_POLICY_GENERATION_KWARGS = set(
    """
    bad_words_ids begin_suppress_tokens do_sample encoder_no_repeat_ngram_size encoder_repetition_penalty
    epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_eos_token_id guidance_scale min_length
    min_new_tokens min_p no_repeat_ngram_size remove_invalid_values renormalize_logits repetition_penalty
    sequence_bias suppress_tokens temperature top_h top_k top_p typical_p watermarking_config
    """.split()
)
# vLLM itself refuses settings that it does not know; of those that it knows, these leave the distribution alone
ON_POLICY_VLLM_KWARGS = {"detokenize", "seed", "skip_special_tokens"}

_ENDS = (
    "a response ends where the policy generates an EOS, and its score belongs to that token: set `stop_token_id`, or "
    "give the model's `generation_config.eos_token_id` a list"
)
REFUSED_GENERATION_KWARGS = {
    **dict.fromkeys(("eos_token_id", "include_stop_str_in_output", "stop", "stop_strings", "stop_token_ids"), _ENDS),
    **dict.fromkeys(("max_length", "max_new_tokens", "max_tokens"), "set `max_completion_length`"),
    **dict.fromkeys(("n", "num_return_sequences"), "set `num_generations`"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "only the log-prob of each sampled token is kept"),
    **dict.fromkeys(("detokenize", "seed", "skip_special_tokens"), "only vLLM reads it"),
    **dict.fromkeys(("compile_config", "disable_compile"), "TRL switches compilation off in rollouts"),
}

# What `baseline="mean"` does not read
_OF_THE_CRITIC = (
    *(
        "bootstrap_truncated",
        "cliprange_value",
        "critic_learning_rate",
    ),
    *("critic_warmup_rollouts", "lam", "lam_value", *LAM_SCHEDULES, "vf_coef"),
)

# RLOO's own settings, which have no `setting(range=…)`
INHERITED_RANGES = {
    "epsilon_high": "> 0",
    "gradient_accumulation_steps": ">= 1",
    "max_completion_length": ">= 1",
    "per_device_eval_batch_size": ">= 1",
    "per_device_train_batch_size": ">= 1",
    "temperature": "> 0",
}


@dataclass
class ReturnSettings:
    """
    Declare the settings that decide the scale of the returns, for PPO and for a critic that is trained before PPO.
    """

    gamma: float = setting(1.0, "Discount factor per token.", range="in [0, 1]")
    reward_weights: list[float] | None = setting(
        None,
        "Weight of each reward function; 1 if unset.",
        range=(
            "a list of finite numbers, not all 0 (nothing would be trained)",
            lambda x: all(isinstance(weight, (int, float)) and abs(weight) < math.inf for weight in x) and any(x),
        ),
    )
    reward_group_column: str | None = setting(
        None, "Dataset column that names each row's group.", only_with=("reward_normalization", "group")
    )
    missing_eos_score: float | None = setting(
        None,
        'Score of a response that does not end by EOS, in place of its own. This is the N+ detail "EOS trick", which '
        "uses −1.",
    )
    missing_eos_penalty: float | None = setting(
        None, "Subtracted from the score of a response that does not end by EOS.", range="> 0 (it is subtracted)"
    )
    whiten_rewards: bool = setting(
        False, "Divide token rewards by their standard deviation over all processes, keeping their mean."
    )
    padding_free: bool = setting(
        True,
        "Pack rows into one long sequence for a forward pass instead of padding them. This is done where it is less "
        "work than padding each row to the longest. A state-space model, which would mix packed "
        "rows, gets padded rows.",
    )


@documented
@dataclass
class PPOConfig(HidesCredentials, ReturnSettings, SavingSettings, RLOOConfig):
    """
    Configuration of [`PPOTrainer`].

    Fields that every TRL on-policy trainer shares keep `RLOOConfig`'s names and meaning (`max_completion_length`,
    `temperature`, `num_generations`, `reward_weights`, `reward_clip_range`, `use_vllm`, …). PPO's own settings carry
    the names and defaults of TRL 1.12's `PPOConfig`. One optimizer step is one minibatch of
    `per_device_train_batch_size × gradient_accumulation_steps × processes` episodes. A rollout is `num_mini_batches`
    minibatches, and is passed over `num_ppo_epochs` times.

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

    learning_rate: float = setting(3e-6, "The initial learning rate for AdamW.")
    adam_epsilon: float = setting(1e-5, "Epsilon of AdamW. TRL's default is 1e-8; N+ uses this one.", range="> 0")
    disable_dropout: bool = setting(True, "Switch dropout off in all models.")

    # The rollout
    num_mini_batches: int = setting(
        1,
        "Minibatches (optimizer steps per pass) in a rollout. Sets RLOO's `steps_per_generation` to "
        "`num_mini_batches × gradient_accumulation_steps`.",
        range=">= 1",
    )
    num_ppo_epochs: int = setting(4, "Passes over each rollout, re-permuted before each.", range=">= 1")
    total_episodes: int | None = setting(
        None,
        "Episodes (responses) to train on, rounded up to full rollouts. Sets `max_steps`; if unset, "
        "`num_train_epochs` says how long to train.",
        range=">= 1",
    )
    local_rollout_forward_batch_size: int = setting(
        64,
        "Rows per process in one forward pass without gradient: lower it if a rollout runs out of memory. It is for "
        "generation, reward models, reference and values. Another value gives other samples, since rows are sampled "
        "in chunks of this size; the score, log-probs and values of a given answer stay the same.",
        range=">= 1",
    )
    logits_budget_gb: float = setting(
        1.0,
        "GiB that the logits of one log-prob pass may take: lower it to save memory, at a cost in time. The logits "
        "are rows × response tokens × vocabulary numbers. If they need more, and with 0 always, TRL's fused LM head "
        "computes them tile by tile, with the same results in more time.",
        range=">= 0",
    )
    num_generations: int | None = setting(1, "Responses per prompt.", range=">= 1")
    num_completions_to_print: int | None = setting(
        4, "Completions that `log_completions` prints at a log. `None` prints all."
    )
    allow_off_policy_sampling: bool = setting(
        False,
        "Allow sampling from another distribution than the policy's own. This allows `top_k`, `top_p`, `min_p`, "
        '`repetition_penalty` and other `generation_kwargs` with `importance_sampling_mode="none"`, too. The bias is '
        "then logged as `sampling/logprob_difference`, and not corrected.",
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = setting(
        "auto",
        "Source of the log-probs before the update, which the ratio and the KL use. `sampler` keeps those noted in "
        "sampling, which saves a forward pass of the policy; `recompute` computes them with the forward pass that is "
        "trained. In float32 both agree to 1e-5, else they differ by rounding and dropout "
        "(`sampling/logprob_difference`). `auto` is `sampler` if all is float32 and nothing in `generation_kwargs` or "
        "vLLM may change them. Where another policy samples, `sampler` makes PPO's ratio that of the policy to the "
        "sampler.",
    )
    importance_sampling_mode: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = setting(
        "auto",
        "How the policy's loss is weighted where another policy has sampled. The weight is the policy's probability "
        "before the update divided by the sampler's, of each token or of the whole response (`sequence_…`). A weight "
        "beyond a bound becomes the bound (`…_truncate`) or 0 (`…_mask`). `auto` is `token_truncate` where "
        "another policy may sample, else `none`. Formulas, sources and costs are in docs/off_policy.md.",
    )
    importance_sampling_clip_min: float | None = setting(
        None,
        "Lower bound of the importance weight. At least one of the two bounds is needed.",
        range="in [0, 1], 1 being the weight on-policy, or None",
    )
    importance_sampling_clip_max: float | None = setting(
        3.0, "Upper bound of the importance weight.", range=">= 1, the weight on-policy, or None"
    )
    rollouts_ahead: int = setting(
        0,
        "1: a vLLM server generates the next rollout while this one is trained on; see docs/vllm.md.",
        range="in [0, 1]",
    )
    stop_token_id: int | None = setting(None, "Further token id that ends a response, beside EOS.")

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
    )
    kl_controller: Literal["fixed", "adaptive"] = setting(
        "fixed",
        "Whether `kl_coef` is fixed, or adapted so that `objective/kl` stays at `kl_target` (Ziegler et al., "
        "1909.08593).",
    )
    kl_target: float = setting(
        6.0,
        "Target of `objective/kl`, in nats summed over a response.",
        range="> 0 nats per response",
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
        "What `HackWatch` does when the reward rises as in a hack: say so once, end training with a checkpoint, or "
        "double `kl_coef`. `off` attaches none.",
    )
    reward_normalization: Literal["none", "running", "batch", "group", "reference"] = setting(
        "none",
        "How scores are standardised, before `reward_clip_range`. `running` uses the mean and standard deviation of "
        "all scores so far, `batch` those of this rollout, `group` those of all scores so far in the row's group. "
        "`reference` subtracts the mean score of the dataset's demonstrations.",
    )
    reward_reference_column: str = setting(
        "completion",
        "Dataset column with the demonstration.",
        only_with=("reward_normalization", "reference"),
    )
    share_reward_base: Literal["auto", "never", "always"] = setting(
        "auto",
        "Whether a reward model saved as an adapter uses the policy's base. Otherwise it loads a base of its own. "
        "`auto` shares the base if its weights and quantisation are those that the adapter was trained on, so that "
        "scores stay the same. `always` raises if they are not.",
    )

    # The loss
    lam: float | None = setting(
        None,
        "λ of GAE. If unset, 0.95 where a reward function or an environment scores tokens or turns, and 1 where each "
        "answer has one score: with 0.95 the first of 100 tokens hears 0.6 % of a score at the end.",
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
        "α of a λ that depends on the length of each response in tokens (with `gae_level: turn` in turns), in place "
        "of `lam`: λ = 1 − 1/(α·length), or 0 where α·length ≤ 1 (VAPO, 2504.05118, with 0.05; SAO, 2607.07508, with "
        "1.5). The critic's target then uses `lam_value`, by default 1.",
        range="> 0 and finite",
    )
    baseline: Literal["critic", "gated", "mean"] = setting(
        "gated",
        "What a return is compared with: the critic's value, the mean return, or both. `mean` is the mean return of "
        "the other answers at the same token, as in REINFORCE and RLOO, or with `num_generations` above 1 of those "
        "to the same prompt; the critic is neither run nor trained. `gated` mixes both: the critic has the weight in "
        "[0, 1] that left the least variance in the returns of the last rollouts, measured before it was fitted to "
        "them (`val/baseline_weight`; compare EVPO, 2604.19485).",
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
        "Lowest and highest ratio, such as `[0.7, 6.0]`. In place of clipping, a token with a ratio outside has no "
        "gradient (2602.15763, 2607.07508). They still count in the mean; `policy/clipfrac_avg` is their share.",
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
    max_approx_kl: float | None = setting(
        None,
        "Skip the remaining updates on a rollout once a minibatch's `policy/approxkl_avg` exceeds this.",
        range="> 0",
    )
    critic_learning_rate: float | None = setting(
        None, "Learning rate of the critic, often higher than the policy's; `learning_rate` if unset.", range=">= 0"
    )
    critic_warmup_rollouts: int = setting(0, "First rollouts in which only the critic is trained.", range=">= 0")

    # Evaluation and loading
    eval_greedy: bool = setting(True, "Evaluate with greedy decoding, too (`eval_greedy/…`).")
    resume_anyway: bool = setting(False, "Resume from a checkpoint even if the run that wrote it had other settings.")

    # Agents
    max_tool_calling_iterations: int | None = setting(
        None,
        "Most turns with tool calls in an episode, of `tools` or an environment. None sets no limit but "
        "`max_completion_length`, which counts the tools' answers, too.",
        range=">= 1",
    )
    tool_timeout: float | None = setting(
        60.0,
        "Seconds that a call of a tool, or an environment's `reset` or `get_reward`, may take; None for no limit. A "
        "longer call of a tool fails, and the model reads that it failed.",
        range="> 0",
    )
    gae_level: Literal["token", "turn"] = setting(
        "token",
        "Whether one action is a token or a whole turn, in advantages and in the ratio of the policy's loss. The "
        "tokens of a turn share one advantage, and their log-probs are added up. `gamma` and `lam` are then per turn.",
    )
    bootstrap_truncated: bool = setting(
        False,
        "Whether an episode that was cut off, by length or by `max_tool_calling_iterations`, gets the critic's value "
        "after its last token as its remaining return. Otherwise that return is 0, and `missing_eos_penalty` and "
        "`missing_eos_score` apply.",
    )

    # RLOO's names
    beta: float | None = setting(None, "Alias of `kl_coef`.")
    epsilon: float | None = setting(None, "Alias of `cliprange`.")
    num_iterations: int | None = setting(None, "Alias of `num_ppo_epochs`.")

    def __post_init__(self):
        self.num_generations = 1 if self.num_generations is None else self.num_generations
        self.top_k = self.top_k or 0  # transformers would make 50 of None
        self.watch = self.watch or "off"  # YAML reads `off` as false
        resolve_bf16(self)
        resolve_checkpointing(self)
        self._resolve_aliases()
        self._refuse()
        self._check_values()
        if self.metric_for_best_model in ("reward", "eval_reward"):  # GRPO's name for it
            self.metric_for_best_model = "eval_objective/scores"
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
            # RLOO needs two generations for its baseline and says so in its last check; PPO's baseline needs one
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
                    f"`{alias}={value}` and `{name}={named}` are two names for one setting. Set only one of them."
                )
            setattr(self, name, value)
            setattr(self, alias, None)

        # RLOO fills in both, so if both are set, this is a copy of a finished config (`dataclasses.replace`). If one
        # is set, the user gave it in place of `num_mini_batches`: RLOO reads it, since that needs the process count
        both = (self.steps_per_generation, self.generation_batch_size)
        if None not in both and self.num_mini_batches == 1 and both[0] != self.gradient_accumulation_steps:
            raise ValueError(
                f"`steps_per_generation={both[0]}` and `generation_batch_size={both[1]}` both set the size of a "
                "rollout. Leave both out, and set `num_mini_batches`."
            )
        if (self.steps_per_generation is None) == (self.generation_batch_size is None):
            self.steps_per_generation = self.num_mini_batches * self.gradient_accumulation_steps
            self.generation_batch_size = None

    def _resolve_num_mini_batches(self):
        mini_batches, remainder = divmod(self.steps_per_generation, self.gradient_accumulation_steps)
        if remainder or self.num_mini_batches not in (1, mini_batches):
            raise ValueError(
                f"`steps_per_generation={self.steps_per_generation}` "
                f"(`generation_batch_size={self.generation_batch_size}`) must equal `num_mini_batches` × "
                f"`gradient_accumulation_steps` = {self.num_mini_batches} × {self.gradient_accumulation_steps}. Leave "
                "the first two out, and set `num_mini_batches`."
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
        check_settings(self, INHERITED_RANGES, {"epsilon_high": ("ratio_band", None)})
        if self.max_completion_length is None:  # transformers would make 20 tokens, prompt included, of it
            raise ValueError("`max_completion_length` must be a number of tokens, got None.")
        check_score_settings(self)
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"`kl_estimator` must be one of {[*KL_ESTIMATORS]}, got {self.kl_estimator!r}.")
        if self.kl_controller != "fixed":
            if self.kl_coef == 0:
                raise ValueError(
                    f"`kl_controller={self.kl_controller!r}` multiplies `kl_coef`, so it cannot change `kl_coef=0`. "
                    "Set a positive `kl_coef`, such as 0.05."
                )
            if not self.kl_coef_min <= self.kl_coef <= (math.inf if self.kl_coef_max is None else self.kl_coef_max):
                raise ValueError(
                    f"`kl_coef={self.kl_coef}` must lie within [`kl_coef_min`, `kl_coef_max`] = [{self.kl_coef_min}, "
                    f"{self.kl_coef_max}]."
                )
        if self.watch == "raise_kl" and self.kl_coef == 0:
            raise ValueError(
                "`watch='raise_kl'` multiplies `kl_coef`, so it cannot change `kl_coef=0`. Set a positive `kl_coef`, "
                "such as 0.05, or set `watch='stop'`."
            )
        if self.fp16 and self.max_approx_kl is not None:
            raise ValueError(
                f"`max_approx_kl={self.max_approx_kl}` skips optimizer steps, but `fp16=True` scales the loss and "
                "does not allow that. Use `bf16`, or leave `max_approx_kl` out."
            )
        if not self.use_ref_model and (self.kl_coef != 0 or self.sync_ref_model):
            raise ValueError(
                "`use_ref_model=False` loads no reference, but `kl_coef` above 0 and `sync_ref_model=True` need one; "
                f"got {self.kl_coef} and {self.sync_ref_model}. Set `kl_coef=0` and `sync_ref_model=False`, or "
                "`use_ref_model=True`."
            )
        rules = ("missing_eos_score", "missing_eos_penalty")
        if self.bootstrap_truncated and any(getattr(self, rule) is not None for rule in rules):
            raise ValueError(
                "`bootstrap_truncated=True` lets the critic value answers that were cut off, but "
                f"`missing_eos_score={self.missing_eos_score}` and `missing_eos_penalty={self.missing_eos_penalty}` "
                "set the score of those answers. Set only one of the three."
            )
        defaults = {f.name: f.default for f in fields(self)}
        for name in _OF_THE_CRITIC if self.baseline == "mean" else ():
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` is for the critic and its advantages, but `baseline='mean'` has "
                    f"no critic. Leave `{name}` out, or set `baseline='gated'`."
                )
        if self.rollouts_ahead and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError(
                "`rollouts_ahead=1` needs a vLLM server, which generates while this process trains: set "
                "`use_vllm=True` and `vllm_mode='server'`, or `rollouts_ahead=0`."
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
            raise ValueError(f"`temperature={self.temperature}` is above 2, and vLLM refuses that. Set 2 or less.")
        if (self.num_generations or 1) > 1 and kwargs.get("seed") is not None:
            raise ValueError(
                f"`generation_kwargs={{'seed': {kwargs['seed']}}}` would give all {self.num_generations} answers to a "
                "prompt (`num_generations`) the same text. Leave this seed out: `seed` already seeds sampling."
            )
        self._check_correction()

    def _check_correction(self):
        changed, correction = self._changes_to_sampler, self.importance_correction
        mode = self.importance_sampling_mode
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if changed and correction == "none" and self.old_logprobs != "sampler" and not self.allow_off_policy_sampling:
            raise ValueError(
                f"{changed} change the sampler but not the log-probs that are trained. This biases the ratio and the "
                f"KL (it can turn negative), and `importance_sampling_mode={mode!r}` does not correct the bias. "
                "Remove these settings, set `importance_sampling_mode='auto'`, or set "
                "`allow_off_policy_sampling=True` and watch `sampling/logprob_difference`."
            )
        if self.old_logprobs == "sampler" and mode not in ("auto", "none"):
            raise ValueError(
                f"`importance_sampling_mode={mode!r}` has no effect: with `old_logprobs='sampler'` PPO's own ratio "
                "already compares the policy with the sampler. Set one of the two settings to 'auto'."
            )
        if changed.get("do_sample", True) in (False, None) and self.needs_sampler_logprobs:
            raise ValueError(
                "`generation_kwargs={'do_sample': False}` decodes greedily, so there are no probabilities to correct "
                "the loss with. Leave `do_sample` out, or set `importance_sampling_mode='none'`, "
                "`old_logprobs='recompute'` and `allow_off_policy_sampling=True`."
            )
        if correction == "none" and (low, high) != (None, 3.0):
            raise ValueError(
                f"`importance_sampling_clip_min={low}` and `importance_sampling_clip_max={high}` bound importance "
                f"weights, but `importance_sampling_mode={mode!r}` uses none. Set a mode such as 'token_truncate', or "
                "leave both bounds out."
            )
        if correction != "none" and low is None and high is None:
            raise ValueError(
                f"`importance_sampling_mode={mode!r}` needs a bound, got `importance_sampling_clip_min=None` and "
                "`importance_sampling_clip_max=None`: set one of the two."
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
                f"episodes × {self.num_mini_batches} minibatches × {self.num_ppo_epochs} epochs), but `max_steps="
                f"{self.max_steps}`: set one of them."
            )
        self.max_steps = steps

    @property
    def clip_range(self) -> float:
        """Return `cliprange`; if it is unset, 0.4 where `kl_coef` is 0 and `epsilon_high` is unset, else 0.2."""
        if self.cliprange is not None:
            return self.cliprange
        return 0.4 if self.kl_coef == 0 and self.epsilon_high is None else 0.2

    @property
    def another_samples(self) -> bool:
        """Return whether another distribution than the policy's, before the update, may sample the answers."""
        is_allowed = self.use_vllm or self.allow_off_policy_sampling
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
        """Return `importance_sampling_mode`, with `"auto"` replaced by the mode that it chooses."""
        if self.importance_sampling_mode != "auto":
            return self.importance_sampling_mode
        return "token_truncate" if self.another_samples and self.old_logprobs != "sampler" else "none"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Return whether training needs the log-probs under which the answers were sampled."""
        return self.importance_correction != "none" or (self.old_logprobs == "sampler" and self.another_samples)

    @property
    def steps_per_rollout(self) -> int:
        """Return the number of optimizer steps on a rollout."""
        return self.num_mini_batches * self.num_ppo_epochs

    @property
    def leaves_steps_out(self) -> bool:
        """Return whether some optimizer steps may leave the policy, or both policy and critic, unchanged."""
        return self.critic_warmup_rollouts > 0 or self.max_approx_kl is not None

    @property
    def batch_size(self) -> int:
        """Return the number of episodes in a rollout, over all processes (TRL 1.12's name)."""
        return self.mini_batch_size * self.num_mini_batches

    @property
    def mini_batch_size(self) -> int:
        """Return the number of episodes in one optimizer step, over all processes (TRL 1.12's name)."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def local_mini_batch_size(self) -> int:
        """Return the number of episodes in one optimizer step on this process (TRL 1.12's name)."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def local_batch_size(self) -> int:
        """Return the number of episodes of a rollout on this process (TRL 1.12's name)."""
        return self.local_mini_batch_size * self.num_mini_batches
