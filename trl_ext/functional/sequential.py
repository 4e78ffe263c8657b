"""When a mean is beyond a bound by more than its noise, though one looks again at every log."""

import math
from functools import lru_cache
from statistics import NormalDist


def spent_level(look: int, alpha: float) -> float:
    """Return the error that the k-th look may make: alpha_k = 6 alpha / (pi^2 k^2), which add up to alpha.

    By the union bound, looks of these levels err with a probability of at most alpha, however many there are and
    whenever one stops (as in Shin, Ramdas and Rinaldo 2022, 2203.03532, for changes at an unknown time).

    Args:
        look: k, from 1.
        alpha: probability that any look errs, in (0, 1).

    Returns:
        probability.

    Raises:
        ValueError: look is below 1, or alpha is not in (0, 1).
    """
    if look < 1 or not 0 < alpha < 1:
        raise ValueError(
            f"look must be 1 or more and alpha lie in (0, 1), got {look} and {alpha}; count looks from 1."
        )
    return 6 * alpha / (math.pi * look) ** 2


@lru_cache(maxsize=4096)
def student_quantile(tail: float, dof: float) -> float:
    """Return t with P(T > t) = tail for Student's T, the normal quantile z for infinite degrees of freedom.

    Far out in the tail, where T has the weight of a power, by the expansion of Hill (1970), Algorithm 396,
    Communications of the ACM 13; nearer t = sqrt(nu (exp(z^2 ((8 nu + 3) / (8 nu + 1))^2 / nu) - 1)), the inverse of
    Wallace (1959), Annals of Mathematical Statistics 30. For tails up to 0.05 this is within
    1 % from nu = 1.6 on, and up to 19 % too large below.

    Args:
        tail: probability, in (0, 0.5).
        dof: degrees of freedom nu, above 0; may be fractional.

    Returns:
        standard errors; infinity where nothing can be said.

    Raises:
        ValueError: tail is not in (0, 0.5), or dof is not above 0.
    """
    if not (0 < tail < 0.5 and dof > 0):
        raise ValueError(f"tail must lie in (0, 0.5) and dof be above 0, got {tail} and {dof}; see `scatter` for dof.")
    z = -NormalDist().inv_cdf(tail)
    if math.isinf(dof):
        return z
    a = 1 / (dof - 0.5) if dof > 0.5 else math.inf
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * dof
    y = (2 * d * tail) ** (2 / dof)
    if y > 0.05 + a:
        return math.sqrt(dof * math.expm1((z * (8 * dof + 3) / (8 * dof + 1)) ** 2 / dof))
    rest = 1 / (((dof + 6) / (dof * y) - 0.089 * d - 0.822) * (dof + 2) * 3)
    return math.sqrt(dof * (((rest + 0.5 / (dof + 4)) * y - 1) * (dof + 1) / (dof + 2) + 1 / y))


def scatter(squared_steps: float, count: int) -> tuple[float, float]:
    """Return the variance of single values, by how far each is from the one before: sum (x_i+1 - x_i)^2 / (2 (n - 1)).

    A slow drift of their mean adds little to it (von Neumann, Kent, Bellinson and Hart 1941). Its degrees of freedom
    are those of a chi-squared variable with the same mean and variance, 2 (n - 1)^2 / (3 n - 4).

    Args:
        squared_steps: sum of the squared differences of successive values, in their squared unit.
        count: n, the number of values.

    Returns:
        variance in the squared unit, infinity where n < 2, and its degrees of freedom.
    """
    if count < 2:
        return math.inf, 1.0
    return squared_steps / (2 * (count - 1)), 2 * (count - 1) ** 2 / (3 * count - 4)


def share_error(share: float, count: float) -> float:
    """Return the standard error of a mean of n values in [0, 1]: sqrt(q (1 - q) / n), q = (n p + 2) / (n + 4).

    No variable in [0, 1] with mean p varies more than a share does (Bhatia and Davis 2000). Two successes and two
    failures are added, so that it is above 0 for shares of 0 and 1 (Agresti and Coull 1998).

    Args:
        share: mean p.
        count: n, above 0.

    Returns:
        standard error.
    """
    centre = (count * min(max(share, 0.0), 1.0) + 2) / (count + 4)
    return math.sqrt(centre * (1 - centre) / count)


def unexplained_error(count: float) -> float:
    """Return the standard error of log(1 - explained variance): at most 2 / sqrt(n - 1).

    1 - EV is Var(residuals) / Var(returns). The logarithm of each variance of n normal values has a variance of
    2 / (n - 1), and that of their ratio is at most twice as much where they are not negatively correlated.

    Args:
        count: n, independent values: answers, since the tokens of one answer depend on each other.

    Returns:
        standard error of the logarithm; infinity where n < 2.
    """
    return 2 / math.sqrt(count - 1) if count > 1 else math.inf
