"""Compute the formulas of PPO, of DPO and of their monitors: pure functions of torch and scipy."""

from .advantages import *
from .baselines import *
from .dpo import *
from .kl import *
from .logprobs import *
from .losses import *
from .masking import *
from .statistics import *
from .step_size import *
