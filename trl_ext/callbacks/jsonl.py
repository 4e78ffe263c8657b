"""Write everything that a run logs into a file of JSON lines."""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from ..rewards.watches.watch import Watch
from ..runs.files import PRIVATE_FOLDER, REGISTRY
from ..runs.jsonl import JSONLWriter, read_jsonl
from ..runs.processes import from_first
from ..runs.redaction import redacted
from .metrics import is_training_log, metrics_of, numbers_in

PHASES = {"time/generate": "seconds_generation", "time/score": "seconds_scoring", "time/update": "seconds_update"}


@dataclass(eq=False, kw_only=True)
class JSONLCallback(TrainerCallback):
    """
    Append the run's events to `metrics.rank{r}.jsonl`, one JSON object a line. `kill -9` loses at most the last line.

    Each event has `timestamp`, `rank`, `step` and `type`, and further keys by its type:

    - `begin`: the run's id, and its configuration without credentials. A resumed run keeps its id: the last one in the
      file.
    - `train`: all numbers of the log, under `logs`. As far as they are measured, also `kl`, the losses,
      `tokens_per_sec_per_gpu`, `vram_allocated_bytes`, `vram_peak_bytes`, `seconds_generation`, `seconds_scoring` and
      `seconds_update`.
    - `eval`, `end`: all numbers of the log, under `logs`.
    - `save`: nothing more.

    The first `train` event, or `end` if there is none, also has the monitors' arguments. Watches of `trl_ext.rewards`
    that have no folder of their own write into the same folder.

    >>> trainer.add_callback(JSONLCallback(every_process=False))

    Args:
        folder: folder of the file. The default is the output directory; with `push_to_hub` it is the folder `_run` in
            the output directory, which transformers does not upload.
        every_process: if True, each process writes a file of its own; if False, only the main process writes one.
    """

    folder: str | None = None
    every_process: bool = True

    def __post_init__(self) -> None:
        self.objections: list[str] = []  # what reports say against the rewards; `record_run` sets it
        self._writer: JSONLWriter | None = None
        self._introduced = False
        self._tokens: tuple[float, float] | None = None  # tokens so far, and the time in seconds

    def on_train_begin(self, args, state, control, **kwargs):
        folder = self.folder or (Path(args.output_dir) / PRIVATE_FOLDER if args.push_to_hub else args.output_dir)
        Watch.default_folder = str(folder)
        if self._writer is None and (self.every_process or state.is_world_process_zero):
            self._writer = JSONLWriter(Path(folder) / f"metrics.rank{PartialState().process_index}.jsonl")
        self._introduced, self._tokens = False, None
        run = uuid.uuid4().hex[:12]
        if state.global_step and self._writer is not None and self._writer.path.is_file():  # resumed
            run = [run, *(event["run"] for event in read_jsonl(self._writer.path) if "run" in event)][-1]
        run = from_first(run)
        config = {"config": redacted(args.to_dict()), "config_class": type(args).__name__}
        self._event("begin", state, run=run, **config, objections=redacted(self.objections))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None:
            return
        kind = "train" if is_training_log(logs) else "eval" if any(k.startswith("eval_") for k in logs) else "end"
        numbers = numbers_in(logs)
        measured: dict[str, Any] = {}
        if not self._introduced and kind != "eval":  # by the first log all monitors have registered
            monitors = state.stateful_callbacks.get(REGISTRY, {})
            measured["monitors"] = {name: of["args"] for name, of in monitors.items() if name != "alerts"}
            self._introduced = True
        if kind == "train":
            metric = metrics_of(args).get("kl")
            if metric is not None and metric.key in numbers:
                measured["kl"] = numbers[metric.key]
            measured |= {
                name: numbers[name] for name in ("loss", "loss/policy_avg", "loss/value_avg") if name in numbers
            }
            measured |= {name: numbers[key] for key, name in PHASES.items() if key in numbers}
            measured |= self._throughput(numbers)
            if torch.cuda.is_available():
                measured["vram_allocated_bytes"] = torch.cuda.memory_allocated()
                measured["vram_peak_bytes"] = torch.cuda.max_memory_allocated()
        self._event(kind, state, **measured, logs=numbers)

    def on_save(self, args, state, control, **kwargs):
        self._event("save", state)

    def _throughput(self, numbers: dict[str, float]) -> dict[str, float]:
        """
        Return a mapping with `tokens_per_sec_per_gpu`, the tokens per second since the previous log, divided by the
        number of processes; {} for the first log, and if the trainer logs no `num_tokens`.
        """
        tokens, now, before = numbers.get("num_tokens"), time.monotonic(), self._tokens
        if tokens is None:
            return {}
        self._tokens = (tokens, now)
        if before is None or now <= before[1]:
            return {}
        return {"tokens_per_sec_per_gpu": (tokens - before[0]) / (now - before[1]) / PartialState().num_processes}

    def _event(self, kind: str, state: Any, **values: Any) -> None:
        if self._writer is not None:
            head = {"timestamp": time.time(), "rank": PartialState().process_index, "step": state.global_step}
            self._writer.write({**head, "type": kind, **values})
