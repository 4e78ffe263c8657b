"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names load on first use: a script that only reads what a run has written imports neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..runs.control import request_kl_scale as request_kl_scale
    from ..runs.needs import check_monitors as check_monitors
    from .alerts import Alert as Alert
    from .alerts import WebhookSink as WebhookSink
    from .answers import AnswersCallback as AnswersCallback
    from .answers import CanaryCallback as CanaryCallback
    from .answers import GoldGapCallback as GoldGapCallback
    from .console import ConsoleCallback as ConsoleCallback
    from .drawing import PANELS as PANELS
    from .drawing import as_label as as_label
    from .drawing import draw_alerts as draw_alerts
    from .drawing import draw_line as draw_line
    from .exports import MonitoringPlotCallback as MonitoringPlotCallback
    from .exports import PrometheusCallback as PrometheusCallback
    from .hack_watch import HackWatch as HackWatch
    from .hack_watch import watch_rounds as watch_rounds
    from .metrics import METRICS as METRICS
    from .metrics import Metric as Metric
    from .metrics import curve as curve
    from .monitor import Finding as Finding
    from .monitor import MonitorCallback as MonitorCallback
    from .monitors import ClipFractionCallback as ClipFractionCallback
    from .monitors import CutOffCallback as CutOffCallback
    from .monitors import EntropyFloorCallback as EntropyFloorCallback
    from .monitors import KLBudgetCallback as KLBudgetCallback
    from .monitors import LengthDriftCallback as LengthDriftCallback
    from .monitors import NotFiniteCallback as NotFiniteCallback
    from .monitors import RepetitionCallback as RepetitionCallback
    from .monitors import RewardDisagreementCallback as RewardDisagreementCallback
    from .monitors import RewardDriftCallback as RewardDriftCallback
    from .monitors import ToolAbuseCallback as ToolAbuseCallback
    from .monitors import ValueHealthCallback as ValueHealthCallback
    from .monitors import attach_monitors as attach_monitors
    from .monitors import load_monitors as load_monitors
    from .recording import JSONLCallback as JSONLCallback
    from .recording import SamplesCallback as SamplesCallback
    from .recording import record_run as record_run

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
