"""Record a run's logs and some of its completions, export and draw its metrics, and write a page when it ends."""

import time
import uuid
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback
from transformers.utils.logging import get_logger

from ..data import first_prompts, save_trained_prompts
from ..rewards.completions import record_completions, recording_folder
from ..runs.files import PRIVATE_FOLDER, REGISTRY, append_jsonl, finite, from_first, whole_file
from ..runs.redaction import redacted
from ..upstream.packages import need
from .answers import AnswersCallback
from .metrics import PANELS, draw_alerts, is_training_log, metrics_of, numbers_in, printable, rollout_steps
from .monitor import alerts_of

logger = get_logger(__name__)
# Imported by name: the workbench, above this layer, makes pages. Without it a run has no page
_PAGES = "trl_ext.workbench"
# Name in an event of training steps → key in the logs
_MEASURED = {"loss": "loss", "loss/policy_avg": "loss/policy_avg", "loss/value_avg": "loss/value_avg"}
_MEASURED |= {"seconds_generation": "time/generate", "seconds_scoring": "time/score", "seconds_update": "time/update"}


@dataclass(eq=False, kw_only=True)
class JSONLCallback(TrainerCallback):
    """
    Append the run's events to `metrics.rank{r}.jsonl`, one JSON object per line; `kill -9` loses at most the last
    line.

    Each event has `timestamp`, `rank`, `step` and `type`, and further keys by its type:

    - `begin`: `run`, the run's id, which a resumed run keeps; `config`, its configuration without credentials, and
      `config_class`.
    - `train`: all numbers of the log, under `logs`. If they are measured, also `kl`, `loss`, `loss/policy_avg`,
      `loss/value_avg`, `tokens_per_sec_per_gpu`, `vram_allocated_bytes`, `vram_peak_bytes`, `seconds_generation`,
      `seconds_scoring` and `seconds_update`.
    - `eval`, and `end` for any other log: all numbers of the log, under `logs`.
    - `save`: no further keys.

    The first `train` event, or `end` if there is none, also has the monitors' arguments, under `monitors`. Watches of
    `trl_ext.rewards` without a `folder` write into the same folder.

    >>> trainer.add_callback(JSONLCallback(every_process=False))

    Args:
        folder: folder of the file. The default is the output directory; with `push_to_hub` it is the folder `_run` in
            the output directory, which transformers does not upload.
        every_process: if True, each process writes a separate file; if False, only the main process writes a file.
    """

    folder: str | None = None
    every_process: bool = True

    def __post_init__(self) -> None:
        self._file: Path | None = None
        self._introduced = False  # also for a run that is complete, and is only evaluated
        self._tokens: tuple[float, float] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        folder = self.folder or (Path(args.output_dir) / PRIVATE_FOLDER if args.push_to_hub else args.output_dir)
        state.trl_ext_folder = str(folder)  # read by `recording_folder`; no field that checkpoints keep
        if self.every_process or state.is_world_process_zero:
            self._file = Path(folder) / f"metrics.rank{PartialState().process_index}.jsonl"
        self._introduced, self._tokens = False, None  # tokens so far, and the time in seconds
        run = state.stateful_callbacks.setdefault("trl_ext_run", {"id": from_first(uuid.uuid4().hex[:12])})
        config = {"config": redacted(args.to_dict()), "config_class": type(args).__name__}
        self._event("begin", state, run=run["id"], **config)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        kind = "eval" if any(k.startswith("eval_") for k in logs) else "end"
        if is_training_log(logs):
            kind = "train"
        numbers = numbers_in(logs)
        measured: dict[str, Any] = {}
        if not self._introduced and kind != "eval":  # by the first log all monitors have registered
            monitors = state.stateful_callbacks.get(REGISTRY, {})
            measured["monitors"] = {name: of["args"] for name, of in monitors.items() if name != "alerts"}
            self._introduced = True
        if kind == "train":
            kl = metrics_of(args).get("kl")
            keys = _MEASURED | ({"kl": kl.key} if kl else {})
            measured |= {name: numbers[key] for name, key in keys.items() if key in numbers}
            if "num_tokens" in numbers:
                tokens = numbers["num_tokens"]
                now = time.monotonic()
                if self._tokens is not None:
                    before, then = self._tokens
                    rate = (tokens - before) / max(now - then, 1e-9)
                    measured["tokens_per_sec_per_gpu"] = rate / PartialState().num_processes
                self._tokens = tokens, now
            if torch.cuda.is_available():
                measured["vram_allocated_bytes"] = torch.cuda.memory_allocated()
                measured["vram_peak_bytes"] = torch.cuda.max_memory_allocated()
        self._event(kind, state, **measured, logs=numbers)

    def on_save(self, args, state, control, **kwargs):
        self._event("save", state)

    def _event(self, kind: str, state: Any, **values: Any) -> None:
        if self._file is not None:
            head = {"timestamp": time.time(), "rank": PartialState().process_index, "step": state.global_step}
            append_jsonl(self._file, {**head, "type": kind, **values})


@dataclass(eq=False, kw_only=True)
class SamplesCallback(TrainerCallback):
    """
    Append the first completions of each rollout, with every reward function's score, to `completions.rank0.jsonl`.

    The file is in the folder of [`JSONLCallback`]; without that callback nothing is written. A completion is written
    as text or, if tools were called, as the messages of all its turns.

    >>> trainer.add_callback(SamplesCallback(trainer=trainer, per_rollout=4))

    Args:
        trainer: the GRPOTrainer, RLOOTrainer or PPOTrainer whose completions are written.
        per_rollout: number of completions to keep of each rollout, over all processes. A thousand rollouts with 8
            completions of 1 kB each take 8 MB.
    """

    trainer: Any
    per_rollout: int = 8

    def on_step_end(self, args, state, control, **kwargs):
        # After the first step of a rollout the table holds its completions; after an evaluation, the evaluation's
        if not state.is_world_process_zero or (state.global_step - 1) % rollout_steps(args):
            return

        def first(column: Any) -> list:
            return [*column][-args.generation_batch_size :][: self.per_rollout]

        table = self.trainer._logs
        scores = {name: first(column) for name, column in table["rewards"].items()}
        by_row = zip(*scores.values(), strict=True)
        rows = finite([dict(zip(scores, row, strict=True)) for row in by_row], nan_as_null=True)
        step = state.global_step - 1
        folder = recording_folder(state)
        record_completions(folder, first(table["prompt"]), first(table["completion"]), rows, step)


# ---- Exports ----


@dataclass(eq=False, kw_only=True)
class PrometheusCallback(TrainerCallback):
    """
    Export the run's metrics to Prometheus, by HTTP or by a file for the node exporter's textfile collector.

    Only the main process exports.

    It exports:

    - the gauges `trl_ext_step`, `trl_ext_kl`, `trl_ext_entropy`, …, one for each quantity of
      `trl_ext.callbacks.METRICS` that the trainer logs, in its unit
    - the gauge `trl_ext_log{key=…}`, for every logged number
    - the counter `trl_ext_alerts_total{monitor=…}`

    A number that was never logged is not exported. The package `prometheus-client` is needed.

    >>> trainer.add_callback(PrometheusCallback(textfile="run.prom"))

    Args:
        port: port of the HTTP server. 0 takes a free port, None starts no server.
        textfile: path of the file, ending in `.prom`. None writes no file.
        address: address that the server listens on. The default is reachable from this machine only.
    """

    port: int | None = None
    textfile: str | None = None
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        need("prometheus_client", "PrometheusCallback")
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        # Cached, since a registry refuses a second gauge of the same name
        self._gauge = cache(lambda name, unit: Gauge(f"trl_ext_{name}", unit, registry=self.registry))
        self._logs = Gauge("trl_ext_log", "Every number that is logged", ["key"], registry=self.registry)
        self._alerts = Counter("trl_ext_alerts", "Alerts of the monitors", ["monitor"], registry=self.registry)
        self._counted = 0
        self._server: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.port is not None and self._server is None and state.is_world_process_zero:
            from prometheus_client import start_http_server

            self._server, _ = start_http_server(self.port, addr=self.address, registry=self.registry)
            self.port = self._server.server_port

    def on_log(self, args, state, control, logs=None, **kwargs):
        numbers = numbers_in(logs or {})
        alerts = alerts_of(state)
        metrics = metrics_of(args) if is_training_log(numbers) else {}
        self._gauge("step", "optimizer steps").set(state.global_step)
        for name, metric in metrics.items():
            if metric.key in numbers:
                self._gauge(name, metric.unit).set(numbers[metric.key])
        for key, number in numbers.items():
            self._logs.labels(printable(key)).set(number)
        self._counted = min(self._counted, len(alerts))  # a second `train()` starts without alerts
        for alert in alerts[self._counted :]:
            self._alerts.labels(printable(alert["monitor"])).inc()
        self._counted = len(alerts)
        if self.textfile is not None and state.is_world_process_zero:
            from prometheus_client import write_to_textfile

            try:
                write_to_textfile(self.textfile, self.registry)
            except OSError as error:
                logger.warning_once(f"PrometheusCallback could not write its `textfile`; training continues: {error}")

    def on_train_end(self, args, state, control, **kwargs):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@dataclass(eq=False, kw_only=True)
class MonitoringPlotCallback(TrainerCallback):
    """
    Draw `rlhf_monitoring.png` into the output directory.

    The picture shows scores, KL, entropy, clip fraction, critic and lengths, with the monitors' bounds and alerts.

    >>> trainer.add_callback(MonitoringPlotCallback(steps=50))

    Args:
        steps: optimizer steps from one drawing to the next. The end of training is always drawn.
    """

    steps: int = 100

    def __post_init__(self) -> None:
        need("matplotlib", "MonitoringPlotCallback")
        self._drawn = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._drawn = state.global_step

    def on_log(self, args, state, control, **kwargs):
        if state.global_step - self._drawn >= self.steps:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        self._drawn = state.global_step
        if not state.is_world_process_zero:
            return
        from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

        alerts = alerts_of(state)
        figure = Figure(figsize=(15, 7), layout="constrained")
        grid = figure.subplots(2, 3, sharex=True)
        for axes, (title, draw) in zip(grid.flat, PANELS.items(), strict=True):
            draw(axes, state.log_history, metrics_of(args), state.stateful_callbacks.get(REGISTRY, {}))
            axes.set(title=title if axes.lines else f"{title}: not logged", xlabel="optimizer step")
            if axes.lines:
                axes.legend(fontsize="small", loc="best")
            draw_alerts(axes, alerts)
        figure.suptitle("▲ alert (orange: warning, red: action)" if alerts else "", fontsize="medium")
        try:
            with whole_file(Path(args.output_dir) / "rlhf_monitoring.png") as temporary:
                figure.savefig(temporary, dpi=100, format="png")
        except OSError as error:
            logger.warning_once(f"`rlhf_monitoring.png` could not be written; training continues: {error}")


# ---- The page ----


class ReportCallback(TrainerCallback):
    """
    Write the page `report.html` when training ends; if the page cannot be written, log a warning.

    Args:
        rows: training rows; None if they are not known. Hashes of their prompts are kept beside the model, so that
            `trl-ext evaluate` can refuse prompts that the model was trained on.
        start: folder or hub name of the model that the run starts from; None if it is not known. If this folder has
            such hashes, they are kept, too.
    """

    def __init__(self, rows: Any = None, start: str | None = None):
        self.rows = rows
        self.start = start

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            save_trained_prompts(args.output_dir, self.rows, self.start, is_uploaded=args.push_to_hub)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            try:
                import_module(_PAGES).write_report(args.output_dir)
            except Exception as error:  # the model is what the run was for
                logger.warning(
                    f"No page of this run was written: {' '.join(str(error).split())}. The run is not affected; "
                    f"`trl-ext report {args.output_dir}` can write the page later."
                )


def record_run(trainer: Any, samples: bool = False) -> None:
    """
    Make a run record its logs, unless it already does, and write a page that shows them when training ends.

    PPOTrainer, DPOTrainer and CriticTrainer call this by themselves, if `record_run` is set in their configurations.
    Only the main process writes. A [`JSONLCallback`] that the trainer already has records as it was set up; if it has
    a `folder` of its own, no page is written. If the trainer's arguments have a `record_answers` above 0, an
    [`AnswersCallback`] also records the model's completions of that many prompts of the data.

    Args:
        trainer: any Trainer.
        samples: whether to keep some completions of each rollout, too; for PPOTrainer, GRPOTrainer and RLOOTrainer.
    """

    def attached(kind: type) -> Any:
        return next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)), None)

    if attached(JSONLCallback) is None:
        trainer.add_callback(JSONLCallback(every_process=False))
        if attached(AnswersCallback) is not None:  # when training begins, it needs the folder
            trainer.add_callback(trainer.pop_callback(AnswersCallback))
    recorder = attached(JSONLCallback)
    if samples and attached(SamplesCallback) is None:
        trainer.add_callback(SamplesCallback(trainer=trainer))
    if (count := getattr(trainer.args, "record_answers", 0)) and attached(AnswersCallback) is None:
        # As they were before they were tokenized
        rows = getattr(trainer, "given_eval_rows", None) or getattr(trainer, "given_rows", None)
        if isinstance(rows, dict):
            rows = next(iter(rows.values()))
        if prompts := first_prompts(rows, count):
            trainer.add_callback(AnswersCallback(trainer=trainer, prompts=prompts))
        else:
            logger.warning(
                f"`record_answers={count}`: the first rows of the data have no prompt. Give them a column `prompt` or "
                "`messages`, or set `record_answers` to 0."
            )
    # The page is of the output directory: a run that records elsewhere has none
    if recorder.folder is None and attached(ReportCallback) is None:
        rows = getattr(trainer, "given_rows", None)
        rows = getattr(trainer, "train_dataset", None) if rows is None else rows
        trainer.add_callback(ReportCallback(rows, getattr(trainer, "start_path", None)))
