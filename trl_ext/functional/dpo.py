"""Compute DPO's logits and losses for each pair, and adapt β.

A log-ratio r is a completion's log-prob under the policy minus its log-prob under the reference. The margin Δ of a
pair is the chosen completion's log-ratio r_c minus the rejected completion's log-ratio r_r.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .masking import check_shapes


def sequence_logprobs(logprobs: Tensor, mask: Tensor, ld_alpha: float | None = None) -> Tensor:
    """Sum each completion's log-probs, with weight ld_alpha on tokens beyond its pair's shorter length.

    sum_{t <= l} logp_t + ld_alpha sum_{t > l} logp_t with l = min of the pair's lengths; LD-DPO, Liu et al. 2024,
    arXiv:2409.06411.

    Args:
        logprobs: (2B, T), nats, the B chosen completions first.
        mask: (2B, T), 1 = token of the completion.
        ld_alpha: weight of the tokens beyond the common length l; None or 1 for the plain sum.

    Returns:
        (2B,), nats.
    """
    check_shapes(logprobs=logprobs, mask=mask)
    logprobs = torch.where(mask.bool(), logprobs, 0.0)
    if ld_alpha is None:
        return logprobs.sum(dim=1)
    lengths = mask.sum(dim=1)
    common = torch.minimum(*lengths.chunk(2)).repeat(2).unsqueeze(1)
    return torch.where(mask.cumsum(dim=1) <= common, logprobs, ld_alpha * logprobs).sum(dim=1)


def preference_logits(
    chosen_logratios: Tensor,
    rejected_logratios: Tensor,
    beta: Tensor | float,
    offset: Tensor | None = None,
    dpop_lambda: float = 0.0,
) -> Tensor:
    """Compute the logit of "chosen beats rejected": z = beta (r_c - r_r - lambda max(0, -r_c)) - offset.

    DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7. The offset is ODPO's, Amini et al. 2024, arXiv:2402.10571.
    DPOP's lambda penalises chosen completions that become less likely, Pal et al. 2024, arXiv:2402.13228.

    Args:
        chosen_logratios, rejected_logratios: (B,), r_c and r_r, nats.
        beta: scalar or (B,), 1 / nats.
        offset: (B,), margin in logits that the chosen completion must win by; None for 0.
        dpop_lambda: lambda, dimensionless; 0 for no penalty.

    Returns:
        (B,), logits.
    """
    check_shapes(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    delta = chosen_logratios - rejected_logratios
    if dpop_lambda:
        delta = delta - dpop_lambda * torch.relu(-chosen_logratios)
    logits = beta * delta
    if offset is not None:
        check_shapes(chosen_logratios=chosen_logratios, offset=offset)
        logits = logits - offset
    return logits


def preference_loss(logits: Tensor, confidence: Tensor | None = None) -> Tensor:
    """Compute -c log sigma(z) - (1 - c) log sigma(-z), the cross-entropy to a label that is right with probability c.

    This is conservative DPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf) with a c for each pair. c = 1 gives
    DPO's loss. For c < 1 the loss is least at z = log(c / (1 - c)).

    Args:
        logits: (B,), z, as `preference_logits` returns them.
        confidence: (B,), c in [0.5, 1]; None for 1.

    Returns:
        (B,), nats.
    """
    loss = -logsigmoid(logits)
    if confidence is None:
        return loss
    check_shapes(logits=logits, confidence=confidence)
    return loss + (1 - confidence) * logits  # log sigma(-z) = log sigma(z) - z


def preference_drift(chosen_logratios: Tensor, rejected_logratios: Tensor) -> Tensor:
    """Compute how far the policy's log-probs of a pair have moved from the reference's: (|r_c| + |r_r|) / 2.

    This does not estimate a KL, since the policy did not sample the completions.

    Args:
        chosen_logratios, rejected_logratios: (B,), r_c and r_r, nats.

    Returns:
        (B,), nats per sequence.
    """
    check_shapes(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return 0.5 * (chosen_logratios.abs() + rejected_logratios.abs())


def displaced(chosen_logratios: Tensor, rejected_logratios: Tensor) -> Tensor:
    """Find pairs of positive margin whose chosen completion is less likely than under the reference: r_r < r_c < 0.

    This is likelihood displacement, Razin et al. 2024, arXiv:2410.08847.

    Args:
        chosen_logratios, rejected_logratios: (B,), r_c and r_r, nats.

    Returns:
        (B,) bool.
    """
    check_shapes(chosen_logratios=chosen_logratios, rejected_logratios=rejected_logratios)
    return (chosen_logratios < 0) & (chosen_logratios > rejected_logratios)


def margin_scales(stds: Tensor, counts: Tensor, minimum: float = 0.25, maximum: float = 4.0) -> Tensor:
    """Compute the factor of beta for each source s of pairs: f_s = clamp(c / sigma_s, minimum, maximum).

    c is chosen so that the mean factor over all pairs is 1, sum_s n_s f_s = sum_s n_s, and the mean beta stays beta.
    The left side is piecewise linear in c, so c is found exactly. If no factor is clamped, c is the harmonic mean of
    the pairs' sigmas.

    Args:
        stds: (S,), sigma of each source's margins, nats.
        counts: (S,), n, number of pairs of each source.
        minimum: smallest factor, in (0, 1].
        maximum: largest factor, at least 1.

    Returns:
        (S,), dimensionless.
    """
    check_shapes(stds=stds, counts=counts)
    stds = stds.clamp(min=1e-12)
    shares = counts / counts.sum()

    def factors(c: Tensor) -> Tensor:
        return (c.unsqueeze(-1) / stds).clamp(minimum, maximum)

    corners = torch.cat([minimum * stds, maximum * stds]).sort().values
    means = (factors(corners) * shares).sum(-1)  # from minimum to maximum
    place = torch.searchsorted(means, torch.ones_like(means[:1]))
    after = int(place.clamp(1, len(means) - 1))
    low = means[after - 1]
    high = means[after]
    share = (1 - low) / (high - low) if high > low else torch.zeros_like(low)
    return factors(corners[after - 1] + share * (corners[after] - corners[after - 1]))
