from .checks import known_not_to_work, known_to_go_wrong
from .layout import Layout
from .memory import GIB, kv_cache_bytes, optimizer_bytes, quantized_bytes, share
from .runs import Job, Plan, Role
from .simulate import LiveBytes, fake, forward_peak, training_peak
from .stages import plan

__all__ = [
    "GIB",
    "Job",
    "Layout",
    "LiveBytes",
    "Plan",
    "Role",
    "fake",
    "forward_peak",
    "known_not_to_work",
    "known_to_go_wrong",
    "kv_cache_bytes",
    "optimizer_bytes",
    "plan",
    "quantized_bytes",
    "share",
    "training_peak",
]
