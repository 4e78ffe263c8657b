"""Compute the memory and time that a run needs, without loading its weights."""

from typing import TYPE_CHECKING

from ...upstream.lazy import lazily

if TYPE_CHECKING:
    from .memory import GIB as GIB
    from .runs import GPU as GPU
    from .runs import GPUS as GPUS
    from .runs import Efficiency as Efficiency
    from .runs import Job as Job
    from .runs import Layout as Layout
    from .runs import LoadedReward as LoadedReward
    from .runs import Plan as Plan
    from .runs import Role as Role
    from .runs import examples as examples
    from .runs import hours as hours
    from .runs import known_not_to_work as known_not_to_work
    from .runs import known_to_go_wrong as known_to_go_wrong
    from .runs import seconds_per_example as seconds_per_example
    from .stages import plan as plan
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
