"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names load on first use: a script that only reads what a run has written imports neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..runs.control import request_kl_scale as request_kl_scale
    from ..runs.needs import check_monitors as check_monitors
    from .alerts import Alert as Alert
    from .alerts import JSONLSink as JSONLSink
    from .alerts import TensorBoardSink as TensorBoardSink
    from .alerts import TrackioSink as TrackioSink
    from .alerts import WandbSink as WandbSink
    from .alerts import WebhookSink as WebhookSink
    from .canary import CanaryCallback as CanaryCallback
    from .clip_fraction import ClipFractionCallback as ClipFractionCallback
    from .console import ConsoleCallback as ConsoleCallback
    from .cut_off import CutOffCallback as CutOffCallback
    from .drawing import PANELS as PANELS
    from .drawing import as_label as as_label
    from .drawing import draw_alerts as draw_alerts
    from .drawing import draw_line as draw_line
    from .entropy_floor import EntropyFloorCallback as EntropyFloorCallback
    from .gold_gap import GoldGapCallback as GoldGapCallback
    from .hack_watch import HackWatch as HackWatch
    from .hack_watch import watch_rounds as watch_rounds
    from .jsonl import JSONLCallback as JSONLCallback
    from .kl_budget import KLBudgetCallback as KLBudgetCallback
    from .length_drift import LengthDriftCallback as LengthDriftCallback
    from .loading import attach_monitors as attach_monitors
    from .loading import load_monitors as load_monitors
    from .metrics import METRICS as METRICS
    from .metrics import Metric as Metric
    from .metrics import curve as curve
    from .monitor import Finding as Finding
    from .monitor import MonitorCallback as MonitorCallback
    from .not_finite import NotFiniteCallback as NotFiniteCallback
    from .plot import MonitoringPlotCallback as MonitoringPlotCallback
    from .prometheus import PrometheusCallback as PrometheusCallback
    from .recording import record_run as record_run
    from .repetition import RepetitionCallback as RepetitionCallback
    from .reward_disagreement import RewardDisagreementCallback as RewardDisagreementCallback
    from .reward_drift import RewardDriftCallback as RewardDriftCallback
    from .samples import AnswersCallback as AnswersCallback
    from .samples import SamplesCallback as SamplesCallback
    from .tool_abuse import ToolAbuseCallback as ToolAbuseCallback
    from .value_health import ValueHealthCallback as ValueHealthCallback

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
