"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names are imported on first use, so a script that only reads a run's files imports neither torch nor
transformers.
"""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..runs.control import (
        request_kl_scale as request_kl_scale,
        request_rate_scale as request_rate_scale,
    )
    from .answers import (
        AnswersCallback as AnswersCallback,
        CanaryCallback as CanaryCallback,
        GoldGapCallback as GoldGapCallback,
    )
    from .console import ConsoleCallback as ConsoleCallback
    from .hack_watch import HackWatch as HackWatch, watch_rounds as watch_rounds
    from .metrics import (
        METRICS as METRICS,
        PANELS as PANELS,
        Metric as Metric,
        as_label as as_label,
        curve as curve,
        draw_alerts as draw_alerts,
        draw_line as draw_line,
    )
    from .monitor import Alert as Alert, Finding as Finding, MonitorCallback as MonitorCallback
    from .monitors import (
        ClipFractionCallback as ClipFractionCallback,
        CutOffCallback as CutOffCallback,
        EntropyFloorCallback as EntropyFloorCallback,
        KLBudgetCallback as KLBudgetCallback,
        LengthDriftCallback as LengthDriftCallback,
        NotFiniteCallback as NotFiniteCallback,
        RepetitionCallback as RepetitionCallback,
        RewardDisagreementCallback as RewardDisagreementCallback,
        RewardDriftCallback as RewardDriftCallback,
        ScoreFallCallback as ScoreFallCallback,
        ToolAbuseCallback as ToolAbuseCallback,
        ValueHealthCallback as ValueHealthCallback,
        attach_monitors as attach_monitors,
        load_monitors as load_monitors,
    )
    from .recording import (
        JSONLCallback as JSONLCallback,
        MonitoringPlotCallback as MonitoringPlotCallback,
        PrometheusCallback as PrometheusCallback,
        SamplesCallback as SamplesCallback,
        record_run as record_run,
    )

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
