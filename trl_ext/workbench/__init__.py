"""What `trl-ext` runs; what `__getattr__` names is for scripts, too."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("objections", "report_trained", "write_reward_report"):
        from .reward_report import command as reward_report

        return getattr(reward_report, name)
    if name == "record_run":
        from ..callbacks import record_run

        return record_run
    if name not in ("next_answer", "report_of", "write_report"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .pages import report  # imported with the package, `python -m trl_ext.workbench.pages.report` would warn

    return getattr(report, name)
