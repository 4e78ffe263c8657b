"""Configuration of [`DPOTrainer`]: TRL's `DPOConfig`, of which every field keeps its meaning, plus our options."""

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

import trl

LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
WITHOUT_BETA = {"sft"}
# These see β as β·Δ only, Δ being the log-ratio margin of the pair
OF_BETA_TIMES_MARGIN = {"sigmoid", "hinge", "exo_pair", "robust", "discopop"}
READS_LABEL_SMOOTHING = {"robust", "exo_pair", "aot", "aot_unpaired"}

# What DPOConfig and DPOTrainer of earlier TRL versions took, and what takes its place.
_RUN_TIME = "nothing: a batch is padded to its longest row, by the tokenizer's pad token, and scored by a mask"
OLD_SETTINGS = {
    "base_model_attribute_name": "nothing: the base model is found without it",
    "force_use_ref_model": "`ref_model`, which is used with PEFT, too",
    "generate_during_eval": "a callback such as `trl.LogCompletionsCallback`",
    "is_encoder_decoder": "nothing: only decoder-only models are trained",
    "label_pad_token_id": _RUN_TIME,
    "max_completion_length": "`max_length`, of prompt and completion together",
    "max_prompt_length": "`max_length`, of prompt and completion together; shorten long prompts in the dataset",
    "max_target_length": "`max_length`, of prompt and completion together",
    "model_adapter_name": "a `PeftModel` as `model`: its adapter `default` is trained",
    "padding_value": _RUN_TIME,
    "ref_adapter_name": "a `PeftModel` as `model`: the reference is a copy of its adapter",
    "ref_model_init_kwargs": "`ref_model`, loaded as you like",
    "ref_model_mixin_alpha": "`ref_model_mixup_alpha`",
    "reference_free": "`trl.experimental.cpo.CPOTrainer` with `loss_type='simpo'`, which has no reference",
    "rpo_alpha": "`loss_type=['sigmoid', 'sft']` with `loss_weights=[1.0, rpo_alpha]`",
    "tools": "the dataset's column `tools`",
    "use_liger_loss": "nothing: log-probs are always computed without materialising the logits",
    "use_logits_to_keep": "nothing: log-probs are computed for the completions alone",
    "use_num_logits_to_keep": "nothing: log-probs are computed for the completions alone",
}
# What DPOTrainer took as arguments of its own, and DPOConfig has
MOVED = (
    *("beta", "loss_type", "max_length", "truncation_mode", "label_smoothing", "disable_dropout"),
    *("precompute_ref_log_probs", "dataset_num_proc", "model_init_kwargs", "sync_ref_model"),
)
OLD_LOSSES = {
    "kto_pair": "`trl.KTOTrainer`, or `loss_type='apo_zero'`",
    "cpo": "`trl.experimental.cpo.CPOTrainer`",
    "simpo": "`trl.experimental.cpo.CPOTrainer`",
    "orpo": "`trl.experimental.orpo.ORPOTrainer`",
    "rso": "`loss_type='hinge'`",
}

_RANGES = {  # name: (rule in words, test of a value that is not None)
    "beta": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "beta_dpo_alpha": (">= 0", lambda x: x >= 0),
    "beta_dpo_keep": ("in (0, 1], the share of pairs to keep", lambda x: 0 < x <= 1),
    "beta_dpo_momentum": ("in [0, 1)", lambda x: 0 <= x < 1),
    "beta_max": ("> 0", lambda x: x > 0),
    "beta_min": ("> 0", lambda x: x > 0),
    "distribution_shift_bound": ("in [0, 1], a share of pairs", lambda x: 0 <= x <= 1),
    "distribution_shift_samples": (">= 0", lambda x: x >= 0),
    "dpop_lambda": (">= 0", lambda x: x >= 0),
    "drift_horizon": ("> 0 pairs", lambda x: x > 0),
    "drift_target": ("> 0 nats per sequence", lambda x: x > 0),
    "margin_scale": ("> 0", lambda x: x > 0),
    "margin_warmup_pairs": (">= 2", lambda x: x >= 2),
}


@dataclass
class DPOConfig(trl.DPOConfig):
    r"""
    Configuration of [`DPOTrainer`].

    Every field of [`trl.DPOConfig`] is there and means the same. With the fields below at their defaults, the loss is
    TRL's to the last bit. A log-ratio is a completion's log-prob under the policy minus under the reference, nats; a
    pair's margin Δ is the chosen's log-ratio minus the rejected's.

    Parameters:
        > Parameters that move β

        beta_controller (`Literal["fixed", "beta_dpo", "drift"]`, defaults to `"fixed"`):
            `"beta_dpo"` (2407.08639) sets each batch's β from its margins: β = `beta`·(1 + a·(M̄ − M₀)), M₀ being their
            running mean. A batch is a micro-batch of all processes, so gradient accumulation changes the result.
            `"drift"` steers `logps/drift`, the mean of ½(|chosen log-ratio| + |rejected log-ratio|), to
            `drift_target`: after each optimizer step, β ← β·(1 + e·n/horizon) with e = clip(drift/target − 1, ±0.2)
            and n the step's pairs.
        beta_min (`float`, defaults to `1e-3`), beta_max (`float`, *optional*):
            Bounds of the β that a controller sets.
        beta_dpo_alpha (`float`, defaults to `0.6`), beta_dpo_momentum (`float`, defaults to `0.9`):
            a, and the weight of the past in the running mean M₀ and standard deviation σ, which start at 0 and 1.
        beta_dpo_keep (`float`, defaults to `1.0`):
            Share of each batch to train on, drawn without replacement with weight exp(−½((M − M₀)/σ)²); M̄ is over
            these. `0.8` is the paper's, `1.0` keeps all.
        drift_target (`float`, *optional*):
            Target of `logps/drift`, nats per sequence. `"drift"` needs one.
        drift_horizon (`float`, *optional*):
            Pairs over which β can change by about 20 %. If not set, the pairs of one epoch.

        > Parameters that normalise margins

        margin_normalization (`Literal["none", "source"]`, defaults to `"none"`):
            `"source"` gives each value of the dataset's column `source` a β of its own, `beta`·σ̄/σ_source with σ the
            standard deviation of the source's margins so far, so that long-winded sources do not rule the gradient.
            The factors are clamped to [¼, 4], and σ̄ is what keeps their mean over pairs at 1.
        margin_warmup_pairs (`int`, defaults to `64`):
            A source's factor is 1 until this many of its pairs were seen.

        > Parameters that read what else is known of a pair

        use_margin (`bool`, defaults to `False`):
            Read by how much, in logits, the chosen answer must win (ODPO, 2402.10571): from the dataset's column
            `margin`, or as `score_chosen` − `score_rejected`.
        margin_scale (`float`, defaults to `1.0`):
            Factor of that difference.
        use_confidence (`bool`, defaults to `False`):
            Read from the column `confidence`, in [0.5, 1], how sure each label is, such as the annotators' agreement:
            cDPO's label smoothing, pair by pair.
        use_weight (`bool`, defaults to `False`):
            Multiply each pair's preference loss by the column `weight`, at least 0. The loss is still divided by the
            number of pairs, not by the sum of weights.
        dpop_lambda (`float`, defaults to `0.0`):
            λ of DPOP (2402.13228): Δ − λ·max(0, −chosen log-ratio) takes Δ's place.

        > Parameters that report

        log_displacement (`bool`, defaults to `False`):
            Log `logps/chosen_delta`, `logps/displacement_rate` and `logps/drift`. Any option above logs them, too.
        distribution_shift_samples (`int`, defaults to `0`):
            Before training, compare the log-probs of this many pairs under the reference with those of answers that
            it samples itself. `0` does not.
        distribution_shift_bound (`float`, defaults to `0.1`):
            Warn if more than this share of the chosen answers is less likely than the 1st percentile of the samples.
    """

    beta_controller: Literal["fixed", "beta_dpo", "drift"] = field(
        default="fixed", metadata={"help": "How beta moves: not, with each batch's margins, or to hold a drift."}
    )
    beta_min: float = field(default=1e-3, metadata={"help": "Lower bound of the beta that a controller sets."})
    beta_max: float | None = field(default=None, metadata={"help": "Upper bound of the beta that a controller sets."})
    beta_dpo_alpha: float = field(default=0.6, metadata={"help": "How strongly a batch's margins move its beta."})
    beta_dpo_momentum: float = field(default=0.9, metadata={"help": "Weight of the past in the running moments."})
    beta_dpo_keep: float = field(
        default=1.0, metadata={"help": "Share of each batch to train on, the paper's is 0.8; 1.0 keeps all."}
    )
    drift_target: float | None = field(
        default=None, metadata={"help": "Target of `logps/drift`, nats per sequence, for `beta_controller: drift`."}
    )
    drift_horizon: float | None = field(
        default=None, metadata={"help": "Horizon of the drift controller, pairs; one epoch if unset."}
    )
    margin_normalization: Literal["none", "source"] = field(
        default="none", metadata={"help": "Whether each value of the column `source` has a beta of its own."}
    )
    margin_warmup_pairs: int = field(
        default=64, metadata={"help": "Pairs of a source after which its beta is its own."}
    )
    use_margin: bool = field(
        default=False, metadata={"help": "Read `margin`, or `score_chosen` and `score_rejected`: by how much to win."}
    )
    margin_scale: float = field(default=1.0, metadata={"help": "Factor of that margin or difference of scores."})
    use_confidence: bool = field(
        default=False, metadata={"help": "Read `confidence`, in [0.5, 1]: how sure a pair's label is."}
    )
    use_weight: bool = field(default=False, metadata={"help": "Read `weight`, >= 0: how much a pair counts."})
    dpop_lambda: float = field(default=0.0, metadata={"help": "Weight of DPOP's penalty, inside the margin."})
    log_displacement: bool = field(default=False, metadata={"help": "Log how the chosen answers' own log-probs move."})
    distribution_shift_samples: int = field(
        default=0, metadata={"help": "Pairs to compare with the reference's own samples before training."}
    )
    distribution_shift_bound: float = field(
        default=0.1, metadata={"help": "Share of chosen answers the reference would not write, above which to warn."}
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_values()
        self._check_combinations()

    @property
    def replaces_sigmoid(self) -> bool:
        """Whether the preference term is ours: it depends on the pair by more than its margin."""
        filters = self.beta_controller == "beta_dpo" and self.beta_dpo_keep < 1
        return self.use_margin or self.use_confidence or self.use_weight or self.dpop_lambda > 0 or filters

    @property
    def reads_log_probs(self) -> bool:
        """Whether anything here needs the log-probs that TRL computes."""
        controls = self.beta_controller != "fixed" or self.margin_normalization != "none"
        return controls or self.replaces_sigmoid or self.log_displacement

    def _check_values(self) -> None:
        for name, (rule, is_valid) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise ValueError(f"`{name}` must be {rule}, got {value}.")
        for f in fields(self):
            if get_origin(f.type) is Literal and getattr(self, f.name) not in get_args(f.type):
                raise ValueError(f"`{f.name}` must be one of {list(get_args(f.type))}, got {getattr(self, f.name)!r}.")
        for loss_type in self.loss_type:
            if loss_type in OLD_LOSSES:
                raise ValueError(f"`loss_type={loss_type!r}` is not DPO's any more: use {OLD_LOSSES[loss_type]}.")
            if loss_type not in LOSSES:
                raise ValueError(f"`loss_type` must be among {list(LOSSES)}, got {loss_type!r}.")
        defaults = {f.name: f.default for f in fields(self)}
        for setting, value, names in (
            ("beta_controller", "beta_dpo", ("beta_dpo_alpha", "beta_dpo_momentum", "beta_dpo_keep")),
            ("beta_controller", "drift", ("drift_target", "drift_horizon")),
            ("margin_normalization", "source", ("margin_warmup_pairs",)),
            ("use_margin", True, ("margin_scale",)),
        ):
            for name in names:
                if getattr(self, setting) != value and getattr(self, name) != defaults[name]:
                    raise ValueError(
                        f"`{name}={getattr(self, name)}` is for `{setting}={value!r}`, but `{setting}="
                        f"{getattr(self, setting)!r}`: set that, or leave it out."
                    )
        if self.beta_controller == "drift" and self.drift_target is None:
            raise ValueError(
                "`beta_controller='drift'` needs `drift_target`, nats per sequence: run once with "
                "`log_displacement=True`, and choose a part of the `logps/drift` that it ends with."
            )
        maximum = math.inf if self.beta_max is None else self.beta_max
        if self.beta_controller != "fixed" and not self.beta_min <= self.beta <= maximum:
            raise ValueError(
                f"`beta={self.beta}` must lie within [`beta_min`, `beta_max`] = [{self.beta_min}, {self.beta_max}]."
            )

    def _check_combinations(self) -> None:
        losses = set(self.loss_type)
        if self.label_smoothing and not losses & READS_LABEL_SMOOTHING:
            raise ValueError(
                f"`label_smoothing={self.label_smoothing}` does nothing to `loss_type={self.loss_type}`: for cDPO set "
                "`use_confidence=True` and give the dataset a column `confidence` of "
                f"{1 - self.label_smoothing:g}, or use `loss_type='robust'`."
            )
        if losses <= WITHOUT_BETA:
            for name, neutral in (("beta_controller", "fixed"), ("margin_normalization", "none")):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"`{name}={getattr(self, name)!r}` moves β, but `loss_type={self.loss_type}` has none: add a "
                        f"preference loss, or set `{name}={neutral!r}`."
                    )
        if self.margin_normalization != "none":
            others = sorted(losses - OF_BETA_TIMES_MARGIN - WITHOUT_BETA)
            if others or self.f_divergence_type != "reverse_kl":
                raise ValueError(
                    "`margin_normalization='source'` is for losses that see β as β·Δ only, "
                    f"{sorted(OF_BETA_TIMES_MARGIN)} with `f_divergence_type='reverse_kl'`; got `loss_type="
                    f"{self.loss_type}`, `f_divergence_type={self.f_divergence_type!r}`."
                )
        if self.replaces_sigmoid:
            names = [name for name in ("use_margin", "use_confidence", "use_weight") if getattr(self, name)]
            names += ["dpop_lambda"] * (self.dpop_lambda > 0) + ["beta_dpo_keep"] * (self.beta_dpo_keep < 1)
            if "sigmoid" not in losses or losses - {"sigmoid", "sft"} or self.f_divergence_type != "reverse_kl":
                raise ValueError(
                    f"{', '.join(f'`{name}`' for name in names)} need `loss_type` 'sigmoid', or 'sigmoid' and 'sft', "
                    f"and `f_divergence_type='reverse_kl'`; got {self.loss_type}, {self.f_divergence_type!r}."
                )
            if self.use_weighting:
                raise ValueError(
                    f"{', '.join(f'`{name}`' for name in names)} and `use_weighting=True` both change what a pair's "
                    "sigmoid loss is: set one of them. (`beta_controller` and `margin_normalization` go with it.)"
                )


def refuse_old(names: Any) -> None:
    """Raise for the first of these names that earlier versions of TRL's DPO took."""
    for name in names:
        if name in OLD_SETTINGS:
            raise TypeError(f"`{name}` is a setting of an earlier TRL. In its place: {OLD_SETTINGS[name]}.")


def refuse_old_arguments(old: dict[str, Any]) -> None:
    """Raise for keyword arguments that DPOTrainer does not have, or no longer has."""
    if "tokenizer" in old:
        raise TypeError("`tokenizer` is an argument of an earlier TRL. In its place: `processing_class`.")
    for name in old:
        if name in MOVED:
            raise TypeError(f"`{name}` is an argument of an earlier TRL. In its place: `args=DPOConfig({name}=…)`.")
    refuse_old(old)
    if old:
        raise TypeError(f"DPOTrainer has no argument `{next(iter(old))}`.")


def _refuse_old_settings(init):
    @functools.wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any):
        refuse_old(kwargs)
        init(self, *args, **kwargs)

    return wrapped


DPOConfig.__init__ = _refuse_old_settings(DPOConfig.__init__)  # type: ignore[method-assign]
