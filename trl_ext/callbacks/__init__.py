"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names are imported on first use, so a script that only reads a run's files imports neither torch nor
transformers.
"""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

# ruff: noqa: F401
if TYPE_CHECKING:
    from ..runs.control import check_monitors, request_kl_scale, request_rate_scale
    from .answers import AnswersCallback, CanaryCallback, GoldGapCallback
    from .console import ConsoleCallback
    from .hack_watch import HackWatch, watch_rounds
    from .metrics import METRICS, PANELS, Metric, as_label, curve, draw_alerts, draw_line
    from .monitor import Alert, Finding, MonitorCallback
    from .monitors import (
        ClipFractionCallback,
        CutOffCallback,
        EntropyFloorCallback,
        KLBudgetCallback,
        LengthDriftCallback,
        NotFiniteCallback,
        RepetitionCallback,
        RewardDisagreementCallback,
        RewardDriftCallback,
        ScoreFallCallback,
        ToolAbuseCallback,
        ValueHealthCallback,
        attach_monitors,
        load_monitors,
    )
    from .recording import JSONLCallback, MonitoringPlotCallback, PrometheusCallback, SamplesCallback, record_run

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
