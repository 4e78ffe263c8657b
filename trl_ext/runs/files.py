"""What those who read a run's files must know of who wrote them. It imports neither torch nor transformers."""

from typing import Any

PRIVATE_FOLDER = "_run"  # a Trainer uploads nothing whose name begins with an underscore
# The key of all monitors' states in `TrainerState.stateful_callbacks`. Monitors are no `ExportableState`, which would
# use their classes' names: with `restore_callback_states_from_checkpoint` transformers would rebuild them from JSON,
# without `trainer=`, and a monitor added on resume would crash the next save.
REGISTRY = "trl_ext_monitors"
RUNBOOK = "docs/runbook.md"


def is_notice(alert: dict[str, Any]) -> bool:
    """Return whether an alert tells of the monitor, not of the run: it has nothing to watch."""
    return alert.get("level") == "notice"
