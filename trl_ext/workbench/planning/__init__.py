"""What a run will take, computed without loading a weight."""

from .advice import Facts, Leak, Reason, Recommendation, advise
from .capacity import Fit, fit
from .checks import known_not_to_work, known_to_go_wrong
from .duration import GPU, GPUS, Efficiency, examples, hours, seconds_per_example
from .layout import Layout
from .memory import GIB, kv_cache_bytes, optimizer_bytes, quantized_bytes, share
from .runs import Job, LoadedReward, Plan, Role
from .simulate import LiveBytes, fake, forward_peak, training_peak
from .stages import plan

__all__ = [
    "GIB",
    "GPU",
    "GPUS",
    "Efficiency",
    "Facts",
    "Fit",
    "Job",
    "Layout",
    "Leak",
    "LiveBytes",
    "LoadedReward",
    "Plan",
    "Reason",
    "Recommendation",
    "Role",
    "advise",
    "examples",
    "fake",
    "fit",
    "forward_peak",
    "hours",
    "known_not_to_work",
    "known_to_go_wrong",
    "kv_cache_bytes",
    "optimizer_bytes",
    "plan",
    "quantized_bytes",
    "seconds_per_example",
    "share",
    "training_peak",
]
