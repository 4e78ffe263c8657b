"""Set the coefficient of the KL penalty, `kl_coef`, after each rollout."""

import math

from transformers.utils import logging

from ..functional import adaptive_kl_coef
from .config import PPOConfig

logger = logging.get_logger(__name__)


class KLController:
    """
    Hold `kl_coef`, the coefficient of the KL penalty.

    With `kl_controller: adaptive` it changes after each rollout, so that the KL moves towards `kl_target` (Ziegler et
    al., 1909.08593). Otherwise it is constant. In both cases a callback may scale it.
    """

    def __init__(self, args: PPOConfig):
        self.args = args
        self.kl_coef = args.kl_coef
        self._maximum = math.inf if args.kl_coef_max is None else args.kl_coef_max

    def update(self, kl: float, n_episodes: int) -> None:
        """
        Change the coefficient after a rollout, if the controller is adaptive.

        Args:
            kl: `objective/kl` of the rollout, nats summed over a response, mean over all processes.
            n_episodes: responses in the rollout, all processes.
        """
        if self.args.kl_controller == "adaptive":
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                kl,
                self.args.kl_target,
                n_episodes,
                self.args.kl_horizon,
                minimum=self.args.kl_coef_min,
                maximum=self._maximum,
            )

    def scale(self, factor: float) -> None:
        """Multiply the coefficient by a factor that a callback requested; the result is at most `kl_coef_max`."""
        if factor == 1.0:
            return
        self.kl_coef = min(self.kl_coef * factor, self._maximum)
        if self.kl_coef == 0:
            logger.warning(
                "A callback asked to raise `kl_coef`, but no factor changes `kl_coef=0`. Set a positive `kl_coef`."
            )

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]
