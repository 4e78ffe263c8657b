"""Which checkpoints can be trusted, and whether they belong to this run."""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..upstream import sort_checkpoints
from .config import PPOConfig

MARKER = "trl_ext_complete.json"  # written last: a checkpoint without it was interrupted

# Fields that may differ between a run and its continuation: they change what is shown, kept or how fast it goes
_MAY_DIFFER = (
    "dataloader_",
    "dataset_num_proc",
    "ddp_",
    "debug",
    "disable_tqdm",
    "do_",
    "enable_jit",
    "eval_",
    "greater_is_better",
    "hub_",
    "load_best",
    "local_rank",
    "log_",
    "logging_",
    "metric_for",
    "num_completions_to_print",
    "num_generations_eval",
    "num_sample_generations",
    "output_dir",
    "per_device_eval",
    "project",
    "push_to_hub",
    "report_to",
    "restore_callback",
    "resume_from",
    "run_name",
    "save_",
    "skip_memory",
    "torch_empty_cache",
    "trackio",
    "vllm_gpu",
    "vllm_group",
    "vllm_server",
)


def fingerprint(args: PPOConfig, **facts: Any) -> dict[str, Any]:
    """What must be equal for a run to be continued exactly."""
    config = {name: value for name, value in args.to_dict().items() if not name.startswith(_MAY_DIFFER)}
    return json.loads(json.dumps({**config, **facts}, default=str))


def write_marker(checkpoint: str, contents: dict[str, Any], processes: int) -> None:
    temporary = Path(checkpoint) / f"{MARKER}.tmp"
    # The time is kept within: a copied folder's files have the time of the copy
    marker = {"written_ns": time.time_ns(), "processes": processes, "configuration": contents}
    temporary.write_text(json.dumps(marker, indent=2))
    os.replace(temporary, Path(checkpoint) / MARKER)


def read_marker(checkpoint: str) -> dict[str, Any] | None:
    """`configuration`, `processes` and `written_ns` of a complete checkpoint, None for one that was not finished."""
    marker = Path(checkpoint) / MARKER
    return json.loads(marker.read_text()) if marker.is_file() else None


def newest_complete(output_dir: str) -> tuple[str | None, list[str]]:
    """The complete checkpoint in `output_dir` that was finished last, and those that are not complete."""
    if not any(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        return None, []
    markers = {checkpoint: read_marker(checkpoint) for checkpoint in sort_checkpoints(output_dir)}
    complete = {checkpoint: marker["written_ns"] for checkpoint, marker in markers.items() if marker is not None}
    return max(complete, key=complete.__getitem__, default=None), [c for c in markers if c not in complete]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{name}: {a.get(name)!r} → {b.get(name)!r}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


@contextmanager
def temporarily(target: Any, **values: Any):
    saved = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(saved)
