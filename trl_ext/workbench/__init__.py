"""Provide tools around training: labels, prompt sets, reward reports, evaluation, plans, and pages on runs."""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from ..callbacks import record_run as record_run
    from .pages.report import *
    from .reports.reward_report import *
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "..callbacks": "record_run",
            ".pages.report": "next_answer next_line report_of without_next write_report",
            ".reports.reward_report": "objections report_trained write_reward_report",
        },
    )
