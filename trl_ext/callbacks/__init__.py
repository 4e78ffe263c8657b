"""Monitors for any TRL or transformers script: `trainer.add_callback(KLBudgetCallback(limit=10, action="stop"))`.

Public names load on first use: who only reads what a run has written needs neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .recording import record_run
    from .repetition import RepetitionCallback
    from .reward_disagreement import RewardDisagreementCallback
    from .reward_drift import RewardDriftCallback
    from .samples import SamplesCallback
    from .value_health import ValueHealthCallback

_MODULES = {
    "Alert": "trl_ext.callbacks.alerts",
    "CanaryCallback": "trl_ext.callbacks.canary",
    "ClipFractionCallback": "trl_ext.callbacks.clip_fraction",
    "ConsoleCallback": "trl_ext.callbacks.console",
    "EntropyFloorCallback": "trl_ext.callbacks.entropy_floor",
    "Finding": "trl_ext.callbacks.monitor",
    "GoldGapCallback": "trl_ext.callbacks.gold_gap",
    "JSONLCallback": "trl_ext.callbacks.jsonl",
    "JSONLSink": "trl_ext.callbacks.alerts",
    "KLBudgetCallback": "trl_ext.callbacks.kl_budget",
    "LengthDriftCallback": "trl_ext.callbacks.length_drift",
    "LivePlotCallback": "trl_ext.callbacks.live_plot",
    "MonitorCallback": "trl_ext.callbacks.monitor",
    "MonitoringPlotCallback": "trl_ext.callbacks.plot",
    "NotFiniteCallback": "trl_ext.callbacks.not_finite",
    "PrometheusCallback": "trl_ext.callbacks.prometheus",
    "RepetitionCallback": "trl_ext.callbacks.repetition",
    "RewardDisagreementCallback": "trl_ext.callbacks.reward_disagreement",
    "RewardDriftCallback": "trl_ext.callbacks.reward_drift",
    "SamplesCallback": "trl_ext.callbacks.samples",
    "TensorBoardSink": "trl_ext.callbacks.alerts",
    "TrackioSink": "trl_ext.callbacks.alerts",
    "ValueHealthCallback": "trl_ext.callbacks.value_health",
    "WandbSink": "trl_ext.callbacks.alerts",
    "WebhookSink": "trl_ext.callbacks.alerts",
    "attach_monitors": "trl_ext.callbacks.loading",
    "load_monitors": "trl_ext.callbacks.loading",
    "record_run": "trl_ext.callbacks.recording",
    "request_kl_scale": "trl_ext.control",
}

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
    "record_run",
    "request_kl_scale",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
