"""Log the quantiles of single scores. Trainers log only their mean and standard deviation."""

from typing import Any

import torch
from torch import nn

from ...upstream.names import get_callable_name
from ..checks import checked_name
from ..member import HoldsRewards, awaited, log_to
from ..segments import total_of
from .watch import Watch


class ScoreWatch(HoldsRewards, Watch):
    """
    Log the quantiles of a reward's single scores as `score_watch/<name>/q05` and so on.

    With `bound`, the share of scores above it is also logged, as `score_watch/<name>/share_above`. Each process
    computes the quantiles of each batch, and their means are logged.

    Args:
        reward: a reward function, async or not, or a reward model object. In `reward_funcs`, put the watch in the
            place of a function, with the function's weight; the watch returns the function's scores. Leave a model in
            `reward_funcs`, and put the watch after it, with weight 0; the watch returns `score`.
        bound: scores above this number are counted; 0.8 suits scores from 0 to 1. None: none are counted.
        quantiles: which quantiles to log, each in [0, 1].
        name: name in the metrics. The default is the reward's own name.
        folder, score: see [`Watch`].

    Examples:
        >>> from trl_ext.rewards import ScoreWatch
        >>> def length(completions, **kwargs):
        ...     return [float(len(text.split())) for text in completions]
        >>> watch = ScoreWatch(length, bound=2.5, quantiles=(0.5,))
        >>> watch(prompts=["Tea?"] * 3, completions=["No.", "Yes, please.", "A cup, please."], log_metric=print)
        score_watch/length/q50 2.0
        score_watch/length/share_above 0.3333333333333333
        [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        reward: Any,
        bound: float | None = None,
        quantiles: tuple[float, ...] = (0.05, 0.5, 0.95),
        name: str | None = None,
        **kwargs: Any,
    ):
        if not all(0 <= q <= 1 for q in quantiles):
            raise ValueError(f"`quantiles` must lie in [0, 1], got {quantiles}")
        is_model = isinstance(reward, nn.Module)
        if not callable(reward) or isinstance(reward, type):
            raise TypeError(f"`reward` must be a function or a model object; got {reward!r}")
        super().__init__(**kwargs)
        self.reward = reward
        self.bound = bound
        self.quantiles = quantiles
        self.watched = checked_name(name, "reward_model" if is_model else get_callable_name(reward))
        self.__name__ = f"score_watch_{self.watched}" if is_model else self.watched
        self._seen: list[float] = []
        if is_model:
            reward.register_forward_hook(lambda module, inputs, output: self._seen.extend(_scores(output)))

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        if isinstance(self.reward, nn.Module):
            scores, self._seen = self._seen[-len(prompts) :], []
            returned = [self.score] * len(prompts)
        else:
            arguments = {"log_metric": log_metric, "trainer_state": trainer_state, **kwargs}
            returned = awaited(self.reward(prompts=prompts, completions=completions, **arguments))
            scores = list(map(total_of, returned))
        values = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
        values = values[values.isfinite()]
        if len(values):
            metrics: dict[str, float | None] = {f"q{100 * q:02.0f}": values.quantile(q).item() for q in self.quantiles}
            if self.bound is not None:
                metrics["share_above"] = (values > self.bound).double().mean().item()
            log_to(log_metric, {f"score_watch/{self.watched}/{key}": value for key, value in metrics.items()})
        if len(scores) == len(prompts):
            self.write_completions(prompts, completions, list(scores), trainer_state)
        return returned


def _scores(output: Any) -> list[float]:
    return output.logits[:, 0].detach().float().tolist()


def score_watch(reward: Any, **kwargs: Any) -> ScoreWatch:
    """Make a [`ScoreWatch`] of a reward function or a reward model."""
    return ScoreWatch(reward, **kwargs)
