"""Provide tools around training: labels, prompt sets, reward reports, evaluation, plans, and pages on runs."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..callbacks import record_run as record_run
    from .pages.report import (
        next_answer as next_answer,
        next_line as next_line,
        report_of as report_of,
        without_next as without_next,
        write_report as write_report,
    )
    from .reports.reward_report import (
        objections as objections,
        report_trained as report_trained,
        write_reward_report as write_reward_report,
    )
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
