"""Estimate scores of answers, and how far to trust each annotator, from comparisons of pairs."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit

# The prior of a reliability is Beta(8, 2), with mean 0.8: most annotators beat a coin. It also fixes the scores' sign
_RIGHT, _WRONG = 8.0, 2.0


def noisy_bradley_terry(
    first: np.ndarray, second: np.ndarray, first_wins: np.ndarray, annotator: np.ndarray, steps: int = 500
) -> tuple[np.ndarray, np.ndarray]:
    """
    Estimate scores of answers and the reliability of annotators together.

    P(annotator k prefers i to j) = η_k σ(s_i − s_j) + (1 − η_k) σ(s_j − s_i) (Crowd-BT, Chen et al. 2013, "Pairwise
    ranking aggregation in a crowdsourced setting"). With η_k = 1 this is Bradley and Terry's model; an annotator with
    η_k = ½ tosses a coin, and one with η_k = 0 always says the opposite. The priors are s ~ N(0, 1) and
    η ~ Beta(8, 2). L-BFGS, started at s = 0, finds the mode of the posterior.

    Args:
        first, second: (L,) int, the two answers of each label.
        first_wins: (L,) 1 if the first answer is preferred, 0 if the second is, ½ for a tie, which counts as half a
            win of each.
        annotator: (L,) int, who gave each label.
        steps: largest number of steps of L-BFGS.

    Returns:
        (R,) scores s of the answers, and (A,) reliabilities η of the annotators, in (0, 1).
    """
    answers, people = (
        int(max(place.max(initial=-1) for place in each)) + 1 for each in ((first, second), (annotator,))
    )
    start = np.concatenate([np.zeros(answers), np.full(people, np.log(_RIGHT / _WRONG))])
    given = first, second, first_wins, annotator, answers
    found = minimize(negative_log_posterior, start, given, "L-BFGS-B", jac=True, options={"maxiter": steps}).x
    return found[:answers], expit(found[answers:])


def negative_log_posterior(
    parameters: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    first_wins: np.ndarray,
    annotator: np.ndarray,
    answers: int,
) -> tuple[float, np.ndarray]:
    """
    Return −log p(labels, s, η) of [`noisy_bradley_terry`] up to a constant, and its gradient.

    With p = σ(s_i − s_j) and η = σ(ρ), P(i ≻ j) = q = η p + (1 − η)(1 − p). So ∂q/∂s_i = (2η − 1) p (1 − p) =
    −∂q/∂s_j, and ∂q/∂ρ = (2p − 1) η (1 − η).

    Args:
        parameters: (R + A,) the score s of each answer, then ρ of each annotator.
        first, second, first_wins, annotator: as in [`noisy_bradley_terry`].
        answers: number R of answers.
    """
    scores, logits = parameters[:answers], parameters[answers:]
    p, eta = expit(scores[first] - scores[second]), expit(logits)
    trust = eta[annotator]
    q = np.clip(trust * p + (1 - trust) * (1 - p), 1e-12, 1 - 1e-12)
    slope = -(first_wins / q - (1 - first_wins) / (1 - q))  # of the loss, by q
    by_score = slope * (2 * trust - 1) * p * (1 - p)
    by_logit = slope * (2 * p - 1) * trust * (1 - trust)
    gradient = np.concatenate(
        [
            scores + np.bincount(first, by_score, answers) - np.bincount(second, by_score, answers),
            np.bincount(annotator, by_logit, len(eta)) - (_RIGHT - 1) * (1 - eta) + (_WRONG - 1) * eta,
        ]
    )
    likelihood = (first_wins * np.log(q) + (1 - first_wins) * np.log(1 - q)).sum()
    prior = (_RIGHT - 1) * log_expit(logits).sum() + (_WRONG - 1) * log_expit(-logits).sum()
    return float(-likelihood - prior + (scores**2).sum() / 2), gradient
