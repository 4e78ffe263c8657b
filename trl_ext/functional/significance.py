"""
Test at every log whether a mean exceeds a bound; limit the probability that any of these tests raises a false alarm.
"""

import math


def spent_level(look: int, alpha: float) -> float:
    """Return the significance level of the k-th test on growing data: alpha_k = 6 alpha / (pi^2 k^2).

    Each test is a look at the data so far. The levels of all looks add up to alpha. So, by the union bound, the
    probability that any look errs is at most alpha, however many looks there are and whenever one stops (as in Shin,
    Ramdas and Rinaldo 2022, 2203.03532, for changes at an unknown time).

    Args:
        look: k, the number of the look, from 1.
        alpha: probability that any look errs, in (0, 1).

    Returns:
        alpha_k: this look errs with at most this probability.
    """
    return 6 * alpha / (math.pi * look) ** 2


def student_quantile(tail: float, dof: float) -> float:
    """Return t with P(T > t) = tail for a Student-distributed T; T is normal for infinite degrees of freedom.

    Args:
        tail: probability, in (0, 0.5).
        dof: degrees of freedom, above 0; may be fractional.

    Returns:
        t, in standard errors.
    """
    import scipy.special  # here, since it takes half a second

    return -float(scipy.special.stdtrit(dof, tail))


def scatter(squared_steps: float, count: int) -> tuple[float, float]:
    """Estimate the variance of single values from successive differences: sum (x_i+1 - x_i)^2 / (2 (n - 1)).

    A slow drift of the values' mean adds little to this estimate (von Neumann, Kent, Bellinson and Hart 1941). Its
    degrees of freedom, 2 (n - 1)^2 / (3 n - 4), come from fitting a scaled chi-squared distribution to the estimate's
    mean and variance.

    Args:
        squared_steps: sum of the squared differences of successive values, in the squared unit of the values.
        count: n, the number of values.

    Returns:
        The variance, in the squared unit of the values, infinity where n < 2; and its degrees of freedom.
    """
    if count < 2:
        return math.inf, 1.0
    return squared_steps / (2 * (count - 1)), 2 * (count - 1) ** 2 / (3 * count - 4)


def share_error(share: float, count: float) -> float:
    """Return the standard error of a mean of n values in [0, 1]: sqrt(q (1 - q) / n), q = (n p + 2) / (n + 4).

    No variable in [0, 1] with mean p has more variance than p (1 - p) (Bhatia and Davis 2000). q is the mean after two
    values of 1 and two of 0 are added to the n values, so that the error is above 0 even where p is 0 or 1 (Agresti
    and Coull 1998).

    Args:
        share: p, the mean of the values.
        count: n, the number of values, above 0.

    Returns:
        The standard error of the mean.
    """
    centre = (count * min(max(share, 0.0), 1.0) + 2) / (count + 4)
    return math.sqrt(centre * (1 - centre) / count)


def unexplained_error(count: float) -> float:
    """Return an upper bound on the standard error of log(1 - explained variance): 2 / sqrt(n - 1).

    1 - explained variance is the ratio Var(residuals) / Var(returns). The logarithm of the sample variance of n normal
    values has a variance of 2 / (n - 1). The logarithm of the ratio has at most twice that variance, if the logarithms
    of numerator and denominator are not negatively correlated.

    Args:
        count: n, the number of independent values: count answers, not tokens, since the tokens of one answer depend
            on each other.

    Returns:
        The bound on the standard error of the logarithm; infinity where n < 2.
    """
    return 2 / math.sqrt(count - 1) if count > 1 else math.inf
