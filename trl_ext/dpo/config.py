"""Configuration of [`DPOTrainer`]: TRL's `DPOConfig`, whose fields keep their meaning, and further settings."""

from dataclasses import dataclass
from typing import Literal

import trl

from ..runs.redaction import HidesCredentials
from ..runs.settings import (
    AnswersSettings,
    RunSettings,
    check_settings,
    documented,
    resolve_for_device,
    setting,
)
from ..upstream.statements import refuse

WITHOUT_BETA = {"sft"}
# Losses that depend on β and the pair's log-ratio margin Δ by their product alone
OF_BETA_TIMES_MARGIN = {"sigmoid", "hinge", "exo_pair", "robust", "discopop"}
READS_LABEL_SMOOTHING = {"robust", "exo_pair", "aot", "aot_unpaired"}


@documented
@dataclass
class DPOConfig(HidesCredentials, AnswersSettings, RunSettings, trl.DPOConfig):
    """
    Configuration of [`DPOTrainer`].

    It has every field of [`trl.DPOConfig`], with the same meaning. One default differs: `bf16` is off on a CPU.

    An optimizer step's loss is the mean over the step's rows (for `sft`: over its tokens); in TRL it is the mean over
    the micro-batches. With the fields below at their defaults, micro-batches of equal size, and no `sft`, the loss
    equals TRL's to the last bit.

    In the fields' descriptions, the log-ratio of a completion is its log-prob under the policy minus its log-prob
    under the reference, nats. A pair's margin Δ is the log-ratio of the chosen completion minus that of the rejected
    completion.
    """

    # How β moves
    beta_controller: Literal["fixed", "drift"] = setting(
        "fixed",
        "How β changes: `fixed` not at all, `drift` so that `logps/drift` stays at `drift_target`. "
        "`drift` steers `logps/drift`, the mean of ½(|chosen log-ratio| + |rejected log-ratio|), to `drift_target`: "
        "after each optimizer step of n pairs, β ← β·(1 + e·n/`drift_horizon`) with e = clip(drift/target − 1, ±0.2).",
    )
    beta_min: float = setting(
        1e-3, "Lower bound of the β that a controller sets.", range="> 0", only_with=("beta_controller", "drift")
    )
    beta_max: float | None = setting(
        None, "Upper bound of the β that a controller sets.", range="> 0", only_with=("beta_controller", "drift")
    )
    drift_target: float | None = setting(
        None,
        "Target of `logps/drift`, nats per sequence. `beta_controller='drift'` needs it.",
        range="> 0 nats per sequence",
        only_with=("beta_controller", "drift"),
    )
    drift_horizon: float | None = setting(
        None,
        "Number of pairs over which β can change by about a fifth; if unset, the pairs of one epoch.",
        range="> 0 pairs",
        only_with=("beta_controller", "drift"),
    )

    # How margins are normalised
    margin_normalization: Literal["none", "source"] = setting(
        "none",
        "Whether each value of the dataset's column `source` has a β of its own, so that all margins are on one "
        "scale. With `source`, a source's β is `beta`·σ̄/σ, so that long-winded sources do not dominate the gradient. "
        "σ is the standard deviation of the source's margins so far, and σ̄ makes the mean factor σ̄/σ over all pairs "
        "1. Factors are clamped to [¼, 4].",
    )
    margin_warmup_pairs: int = setting(
        64,
        "A source's factor stays 1 until this many of its pairs were seen.",
        range=">= 2",
        only_with=("margin_normalization", "source"),
    )

    # What the loss reads about a pair, beside its completions
    use_margin: bool = setting(
        False,
        "Use a margin: by how much, in logits, the chosen completion must win (ODPO, 2402.10571). It is read from the "
        "dataset's column `margin`, or is `score_chosen` − `score_rejected`.",
    )
    margin_scale: float = setting(
        1.0, "Factor that multiplies the margin that `use_margin` reads.", range="> 0", only_with=("use_margin", True)
    )
    use_confidence: bool = setting(
        False,
        "Read how sure each label is, such as the annotators' agreement, from the column `confidence`, in [0.5, 1]. "
        "It is cDPO's label smoothing, pair by pair.",
    )
    use_weight: bool = setting(
        False,
        "Multiply each pair's preference loss by the column `weight`, at least 0. The loss is still divided by the "
        "number of pairs, not by the sum of weights.",
    )
    dpop_lambda: float = setting(
        0.0,
        "Weight λ of DPOP's penalty on chosen completions that become less likely (2402.13228). "
        "It replaces Δ by Δ − λ·max(0, −chosen log-ratio).",
        range=">= 0",
    )

    # What is reported
    log_displacement: bool = setting(
        False,
        "Log `logps/chosen_delta`, `logps/displacement_rate` and `logps/drift`. Any setting that changes β or TRL's "
        "sigmoid loss also turns this on.",
    )

    def __post_init__(self):
        resolve_for_device(self)
        super().__post_init__()
        check_settings(self, {"beta": "> 0 and finite"})
        losses = set(self.loss_type)
        is_sigmoid = "sigmoid" in losses and losses <= {"sigmoid", "sft"} and self.f_divergence_type == "reverse_kl"
        others = losses - OF_BETA_TIMES_MARGIN - WITHOUT_BETA or self.f_divergence_type != "reverse_kl"
        refuse(
            (
                self.beta_max is not None and self.beta_min > self.beta_max,
                f"`beta_min={self.beta_min}` is above `beta_max={self.beta_max}`. Swap them.",
            ),
            (
                self.beta_controller == "drift" and self.drift_target is None,
                "`beta_controller='drift'` needs `drift_target`, in nats per sequence. Run once with "
                "`log_displacement=True`, and choose a value below the last `logps/drift` of that run.",
            ),
            (
                self.label_smoothing and not losses & READS_LABEL_SMOOTHING,
                f"`label_smoothing` has no effect on `loss_type={self.loss_type}`. For cDPO set `use_confidence=True` "
                "and give the dataset a column `confidence`, or use `loss_type='robust'`.",
            ),
            (
                self.margin_normalization != "none" and others,
                f"`margin_normalization='source'` does not work with `loss_type={self.loss_type}` and "
                f"`f_divergence_type={self.f_divergence_type!r}`. It needs a loss that depends only on β times the "
                f"margin: {sorted(OF_BETA_TIMES_MARGIN)}, each also with 'sft', and `f_divergence_type='reverse_kl'`.",
            ),
            (
                self.replaces_sigmoid and (not is_sigmoid or self.use_weighting),
                "`use_margin`, `use_confidence`, `use_weight` and `dpop_lambda` need `loss_type` 'sigmoid', or "
                "'sigmoid' and 'sft', with `f_divergence_type='reverse_kl'` and `use_weighting=False`, "
                f"got {self.loss_type}, {self.f_divergence_type!r} and {self.use_weighting}.",
            ),
        )

    @property
    def replaces_sigmoid(self) -> bool:
        """Return whether a setting needs [`preference_loss`] in place of TRL's sigmoid loss."""
        return bool(self.use_margin or self.use_confidence or self.use_weight or self.dpop_lambda)

    @property
    def reads_log_probs(self) -> bool:
        """Return whether any setting needs the log-probs that TRL's loss computes."""
        controls = self.beta_controller != "fixed" or self.margin_normalization != "none"
        return controls or self.replaces_sigmoid or self.log_displacement
