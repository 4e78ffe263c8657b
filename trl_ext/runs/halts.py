"""Remember in `stopped.json` that a monitor ended a run, so that the same command does not go on without a word."""

import json
from pathlib import Path
from typing import Any

from .files import whole_file

STOPPED = "stopped.json"
_SPOILT = "trl_ext_spoilt"  # in `TrainerState.stateful_callbacks`: the weights are not to be saved


class CannotResume(ValueError):
    """Refuse to resume: the checkpoint is missing, incomplete or from other settings, or a monitor ended the run."""


class Stopped(CannotResume):
    """Refuse to train: a monitor ended this run, and nobody has said that it is to go on."""


def write_stop(output_dir: str, monitor: str, step: int, what: str) -> None:
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with whole_file(Path(output_dir, STOPPED), durably=True) as temporary:
        temporary.write_text(json.dumps({"monitor": monitor, "step": step, "what": what}, indent=2))


def forget_stop(output_dir: str) -> None:
    if Path(output_dir, STOPPED).is_file():  # `output_dir` may be a file, which another check reports
        Path(output_dir, STOPPED).unlink(missing_ok=True)


def stop_of(output_dir: str, how: str) -> str | None:
    """Return a sentence on who ended the run and on how to go on; None if no monitor did."""
    record = Path(output_dir, STOPPED)
    if not record.is_file():
        return None
    try:
        told = json.loads(record.read_text())
        said = f"{told['monitor']} ended this run at step {told['step']} ({told['what']})"
    except (ValueError, KeyError, TypeError):
        said = "A monitor ended this run"
    return f"{said}, see alerts.jsonl in {output_dir}. To go on, {how}"


def spoil(state: Any, sentence: str) -> None:
    """Store in `state` that the weights are not to be saved, and why."""
    state.stateful_callbacks[_SPOILT] = {"sentence": sentence}


def spoilt(state: Any) -> str | None:
    """Return the sentence that [`spoil`] stored; None if the weights may be saved."""
    found = state.stateful_callbacks.get(_SPOILT)
    return found and found["sentence"]
