"""What `HackWatch` is compared with: two published signals, and a regression on all that a run logs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.outcomes import outcome
from trl_ext.callbacks.metrics import is_training_log

FIRST = 4  # logs of a baseline, and of a running mean
Risks = list[tuple[int, float]]  # after each training log: the step, and the risk


def changes(log: dict[str, Any], keys: list[str]) -> tuple[list[int], np.ndarray]:
    """Steps, and `(logs, keys)`: mean of the last four logs less that of the first four; 0 where nothing is logged."""
    rows = [row for row in log["log_history"] if is_training_log(row)]
    values = np.array([[row.get(key, 0.0) for key in keys] for row in rows])
    recent = [values[max(0, at - FIRST + 1) : at + 1].mean(0) for at in range(len(rows))]
    return [int(row["step"]) for row in rows], np.array(recent) - values[:FIRST].mean(0)


def rise_of(key: str) -> Callable[[dict[str, Any]], Risks]:
    """A signal: by how much a logged number has risen."""

    def signal(log: dict[str, Any]) -> Risks:
        steps, values = changes(log, [key])
        return list(zip(steps, values[:, 0].tolist(), strict=True))

    return signal


SIGNALS = {
    "energy loss (2501.19358)": rise_of("inside/energy_loss"),
    "share of outliers, as InfoRM's": rise_of("inside/outliers"),
}


def limit_of(risks: list[Risks], logs: list[dict[str, Any]]) -> float:
    """The limit that 5 % of the healthy runs pass."""
    highest = [
        max(risk for _, risk in each) for each, log in zip(risks, logs, strict=True) if not outcome(log).is_hacked
    ]
    return float(np.quantile(highest, 0.95))


def ceiling(
    logs: list[dict[str, Any]], others: list[dict[str, Any]] | None = None, apart: str = "seed"
) -> list[Risks]:
    """
    The risks that a logistic regression on the changes of all logged numbers, without gold, gives each run.

    A log counts as hacked from the fall of gold on; those of a hacked run before it are left out. It is fitted on
    `logs`. Without `others` it is fitted anew for each world, on the other ones; with `apart="name"` for each kind of
    run.
    """
    keys = sorted({key for log in logs for row in log["log_history"] if is_training_log(row) for key in row})
    keys = [key for key in keys if "/" in key and "gold" not in key and not key.startswith("inside/")]

    def fitted(those: list[dict[str, Any]]) -> Any:
        rows, labels = [], []
        for log in those:
            fall, (steps, values) = outcome(log).fall, changes(log, keys)
            for step, value in zip(steps, values, strict=True):
                if fall is None or step >= fall:
                    rows.append(value)
                    labels.append(fall is not None)
        regression = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)
        return make_pipeline(StandardScaler(), regression).fit(np.array(rows), labels)

    def risks(model: Any, log: dict[str, Any]) -> Risks:
        steps, values = changes(log, keys)
        return list(zip(steps, model.predict_proba(values)[:, 1].tolist(), strict=True))

    if others is not None:
        model = fitted(logs)
        return [risks(model, log) for log in others]
    models = {one: fitted([log for log in logs if log[apart] != one]) for one in {log[apart] for log in logs}}
    return [risks(models[log[apart]], log) for log in logs]
