"""Compute the memory and time that a run needs, without loading its weights."""

from typing import TYPE_CHECKING

from ...upstream.lazy import lazily

if TYPE_CHECKING:
    from .memory import GIB as GIB
    from .runs import (
        GPU as GPU,
        GPUS as GPUS,
        Efficiency as Efficiency,
        Job as Job,
        Layout as Layout,
        LoadedReward as LoadedReward,
        Plan as Plan,
        Role as Role,
        examples as examples,
        hours as hours,
        known_not_to_work as known_not_to_work,
        known_to_go_wrong as known_to_go_wrong,
        seconds_per_example as seconds_per_example,
    )
    from .stages import plan as plan
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
