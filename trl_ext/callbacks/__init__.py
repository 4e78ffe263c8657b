"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`."""

from ..control import request_kl_scale
from .alerts import Alert, JSONLSink, TensorBoardSink, TrackioSink, WandbSink, WebhookSink
from .canary import CanaryCallback
from .clip_fraction import ClipFractionCallback
from .console import ConsoleCallback
from .entropy_floor import EntropyFloorCallback
from .gold_gap import GoldGapCallback
from .jsonl import JSONLCallback
from .kl_budget import KLBudgetCallback
from .length_drift import LengthDriftCallback
from .live_plot import LivePlotCallback
from .loading import attach_monitors, load_monitors
from .monitor import Finding, MonitorCallback
from .not_finite import NotFiniteCallback
from .plot import MonitoringPlotCallback
from .prometheus import PrometheusCallback
from .repetition import RepetitionCallback
from .reward_disagreement import RewardDisagreementCallback
from .reward_drift import RewardDriftCallback
from .samples import SamplesCallback
from .value_health import ValueHealthCallback

__all__ = [
    "Alert",
    "CanaryCallback",
    "ClipFractionCallback",
    "ConsoleCallback",
    "EntropyFloorCallback",
    "Finding",
    "GoldGapCallback",
    "JSONLCallback",
    "JSONLSink",
    "KLBudgetCallback",
    "LengthDriftCallback",
    "LivePlotCallback",
    "MonitorCallback",
    "MonitorCallback",
    "MonitoringPlotCallback",
    "NotFiniteCallback",
    "PrometheusCallback",
    "RepetitionCallback",
    "RewardDisagreementCallback",
    "RewardDriftCallback",
    "SamplesCallback",
    "TensorBoardSink",
    "TrackioSink",
    "ValueHealthCallback",
    "WandbSink",
    "WebhookSink",
    "attach_monitors",
    "load_monitors",
    "request_kl_scale",
]
