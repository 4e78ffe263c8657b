"""Compute the memory and time that a run needs, without loading its weights."""

from .memory import GIB
from .runs import GPU, GPUS, Efficiency, Job, Layout, LoadedReward, Plan, Role, examples, hours, known_not_to_work
from .runs import known_to_go_wrong, seconds_per_example
from .stages import plan
