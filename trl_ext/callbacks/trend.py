"""Test after each log whether the mean of a quantity is significantly above or below a bound."""

import math
from typing import Any, NamedTuple

from ..functional import scatter, share_error, spent_level, student_quantile

ALPHA = 0.005  # probability that a bound is ever found crossed in a run that stays within it
FEW = 4  # where the error of a log's mean is unknown, means of fewer logs are too far from normally distributed
DOUBLINGS = 6  # means of the last 1, 2, 4, … 32 values: a few show a large change at once, many show a small one later


class Crossing(NamedTuple):
    """Hold a mean that has crossed its bound, the bound, and the baseline of its series, if it has one."""

    value: float
    bound: float
    baseline: float | None = None


class Series:
    """
    Keep the values of one quantity, and test whether their mean has crossed a bound.

    A single value beyond a bound may be noise. So `above` and `below` take the means of the last `size`, 2 `size`, …
    32 `size` values: the bound counts as crossed if the confidence interval of one of these means lies beyond it, and
    the mean of the last `size` values is beyond it, too, since a change that is over needs no alarm. The interval is
    corrected for the number of tests so far.

    Each value may come with its standard error. If one comes without, the error is estimated from the scatter of
    earlier values, and only means of four values or more are tested. If a bound is relative to the baseline, which is
    the mean of the first values, the error of the baseline is taken into account, too.

    Args:
        memory: state of this series, a dict that is saved as JSON; {} for a new series.
        first: number of first values that make the baseline; 0 for no baseline. The baseline ends before a value that
            differs significantly from the values before it.
        size: number of values in the shortest of the means that are tested.
    """

    def __init__(self, memory: dict[str, Any], first: int = 0, size: int = 1):
        self.memory = memory
        self.wanted = memory.get("wanted", first)
        self.size = size
        self.is_clustered = False
        if not memory:
            memory |= {"count": 0, "first": [], "squared_steps": 0.0, "is_known": True, "variance": 0.0, "dof": 0}
            memory["first_variance"] = 0.0  # kept apart: a hack that widens the spread must not blur the baseline
            memory["last"] = []  # value, its squared step from the one before, its variance, its completions

    def add(
        self,
        value: float,
        error: float | None = None,
        dof: float = math.inf,
        count: float | None = None,
        is_clustered: bool = False,
    ) -> None:
        """
        Add the next value.

        Args:
            value: the mean of the quantity in one log, or in the logs of one rollout.
            error: its standard error; None if it is not known.
            dof: the degrees of freedom of `error`.
            count: number of completions that `value` is averaged over, if each completion's number is in [0, 1]. It
                is given in place of `error`, which is then computed.
            is_clustered: whether these completions may depend on each other. If so, the error is also estimated from
                the scatter of earlier values, and the larger of the two errors is used.
        """
        self.is_clustered = is_clustered
        memory = self.memory
        last = self.memory["last"]
        first = self.memory["first"]
        wanted = self.wanted
        if error is None and count is not None:
            error = share_error(value, count)
        variance = (error or 0.0) ** 2
        squared_step = (value - last[-1][0]) ** 2 if last else 0.0
        memory["count"] += 1
        memory["squared_steps"] += squared_step
        memory["is_known"] &= error is not None
        memory["variance"] += variance
        memory["dof"] += min(dof, 1e9)
        last.append([value, squared_step, variance, count])
        del last[: -(self.size * 2 ** (DOUBLINGS - 1))]
        if 0 < len(first) < wanted:
            self.wanted = len(first)
            if self.above(1) is None and self.below(1) is None:
                self.wanted = wanted
            else:  # a baseline that went on through this change would hide it
                memory["wanted"] = self.wanted
        if len(first) < self.wanted:
            first.append(value)
            memory["first_variance"] += variance

    @property
    def baseline(self) -> float | None:
        """Return the mean of the first values; None if there is none, or if no value followed yet."""
        values = self.memory["first"]
        return sum(values) / len(values) if 0 < self.wanted < self.memory["count"] else None

    @property
    def falls(self) -> bool:
        """Return whether, of the last 2 `size` values, the newer half has a lower mean than the older half."""
        values = [value for value, *_ in self.memory["last"][-2 * self.size :]]
        half = len(values) // 2
        return half > 0 and sum(values[-half:]) < sum(values[:half])

    def above(self, factor: float = 0.0, plus: float = 0.0, error: float = 0.0) -> Crossing | None:
        """
        Return a [`Crossing`] if a mean of the last values is significantly above `factor` · baseline + `plus`, else
        None.

        Args:
            factor, plus: they define the bound. With a `factor` of 0 the bound needs no baseline.
            error: standard error of `plus`.
        """
        return self._beyond(1, factor, plus, error)

    def below(self, factor: float = 0.0, plus: float = 0.0, error: float = 0.0) -> Crossing | None:
        """
        Return a [`Crossing`] if a mean of the last values is significantly below `factor` · baseline + `plus`, else
        None. The arguments are those of [`Series.above`].
        """
        return self._beyond(-1, factor, plus, error)

    def _beyond(self, sign: int, factor: float, plus: float, error: float) -> Crossing | None:
        last = self.memory["last"]
        looks = self.memory["count"]
        bound = plus
        baseline = self.baseline
        if factor:
            if baseline is None:
                return None
            bound += factor * baseline
            looks -= self.wanted  # no value is both in the baseline and compared with it
        for number in (self.size * 2**doubling for doubling in range(DOUBLINGS)):
            if number > min(looks, len(last)):
                break
            mean = sum([row[0] for row in last[-number:]]) / number
            gap = sign * (mean - bound)
            if gap <= 0 and number == self.size:  # a change that is over raises no alarm
                break
            if gap <= 0:
                continue
            now, then, dof = self._errors(number, mean)
            # Half of ALPHA is spent over the looks and their means; the bound's error, which all share, has the rest
            margin = now * student_quantile(spent_level(looks, ALPHA / 2) / DOUBLINGS, dof)
            if factor or error:
                margin += math.hypot(error, factor * then if factor else 0.0) * student_quantile(ALPHA / 2, dof)
            if gap > margin:
                return Crossing(mean, bound, baseline)
        return None

    def _errors(self, number: int, mean: float) -> tuple[float, float, float]:
        """Return the standard errors of `mean`, of the last `number` values, and of the baseline; and their dof."""
        memory = self.memory
        wanted = max(self.wanted, 1)
        _, steps, variances, completions = zip(*memory["last"][-number:], strict=True)
        before = max(0.0, memory["squared_steps"] - sum(steps))  # the scatter is of the values before these
        variance, dof = scatter(before, memory["count"] - number)
        of_scatter = math.sqrt(variance / number), math.sqrt(variance / wanted)
        if None not in completions:  # the share of all these completions is better known than the mean of shares
            drawn = sum(completions)
            now = share_error(mean, drawn)
            then = share_error(self.baseline or 0.0, drawn / number * wanted)
            if not self.is_clustered:
                return now, then, math.inf
            return max(now, of_scatter[0]), max(then, of_scatter[1]), dof
        if memory["is_known"]:
            now = max(memory["variance"] / memory["count"], sum(variances) / number)
            return math.sqrt(now / number), math.sqrt(memory["first_variance"]) / wanted, memory["dof"]
        if number < FEW and variance > 0:
            return math.inf, math.inf, dof
        return *of_scatter, dof
