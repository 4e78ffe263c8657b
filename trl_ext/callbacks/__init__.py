"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names are imported on first use, so a script that only reads a run's files imports neither torch nor
transformers.
"""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from ..runs.control import *
    from .answers import *
    from .console import *
    from .hack_watch import *
    from .metrics import *
    from .monitor import *
    from .monitors import *
    from .recording import *

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "..runs.control": "request_kl_scale request_rate_scale",
            ".answers": "AnswersCallback CanaryCallback GoldGapCallback",
            ".console": "ConsoleCallback",
            ".hack_watch": "HackWatch watch_rounds",
            ".metrics": "METRICS PANELS Metric as_label curve draw_alerts draw_line",
            ".monitor": "Alert Finding MonitorCallback",
            ".monitors": """
                ClipFractionCallback CutOffCallback EntropyFloorCallback KLBudgetCallback LengthDriftCallback
                NotFiniteCallback RepetitionCallback RewardDisagreementCallback RewardDriftCallback ScoreFallCallback
                ToolAbuseCallback ValueHealthCallback attach_monitors load_monitors""",
            ".recording": "JSONLCallback MonitoringPlotCallback PrometheusCallback SamplesCallback record_run",
        },
    )
