"""Write the first sentence of a page: how the run ended, and whether a monitor watched it."""

import math
from itertools import pairwise
from statistics import fmean
from typing import Any

from ...callbacks import curve
from ...runs import is_notice
from .headline import Quantity, first_and_last, headline, shown_ends
from .markup import number
from .recorded import Run, is_finite

# A monitor's action → what the sentence says that the monitor did; the most serious action last
_DONE = {
    "warn": "warned",
    "save": "saved a checkpoint",
    "raise_kl": "raised the KL coefficient",
    "stop": "stopped the run",
}
_CUT_OFF = 0.9  # if more than this share of answers is cut off, the page says so, as the terminal does
_NAMED = 3  # most quantities, monitors or runs that a sentence names


def verdict(run: Run) -> str:
    """Summarise a run in one sentence; return "" if nothing was measured."""
    said = "; ".join(filter(None, [_changes(run), _cut_off(run), _worth(run), _watched(run)]))
    return _sentence(f"so far {said}" if said and run.events and not run.has_ended else said)


def verdict_of_several(runs: dict[str, Run], evaluated: dict[str, Any] | None = None) -> str:
    """
    Summarise several runs in one sentence.

    It says in which runs the final score is highest and lowest, what monitors found, which runs had no monitors, and
    which runs have a reward model that did not pass its report.

    Args:
        runs: name → run.
        evaluated: name → the run's entry in an `evaluation.json`. If two or more runs have scores there, these replace
            the scores that the runs logged, which may be of different prompts.
    """
    found = [
        (f"evaluation's score by {reward}", name, of["mean"])
        for name, policy in (evaluated or {}).items()
        for reward, of in policy["rewards"].items()
    ]
    logged = [(label, name, value) for name, run in runs.items() for label, value in _last(run)]
    measured = _by_label(found) or _by_label(logged)
    parts = []
    for label, of in [*measured.items()][:_NAMED]:
        low, high = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
        least, most = number(of[low], 3), number(of[high], 3)
        ends_apart = f"is highest in {high} ({most}) and lowest in {low} ({least})"
        where = "each" if len(of) == len(runs) else _listed(list(of))
        parts.append(f"the {label} {ends_apart if least != most else f'ended at {most} in {where}'}")
    noticed = [f"in {name} {said}" for name, run in runs.items() if (said := _found(run))]
    parts += noticed if len(noticed) <= _NAMED else [f"monitors found something in {len(noticed)} runs"]
    alone = [name for name, run in runs.items() if run.monitors == {}]
    if alone:
        parts.append(f"no monitors were set{f' in {_listed(alone)}' if len(alone) < len(runs) else ''}")
    rejected = [name for name, run in runs.items() if _objections(run)]
    if rejected:
        parts.append(f"a reward model of {_listed(rejected)} did not pass its report")
    return _sentence("; ".join(parts))


def _last(run: Run) -> list[tuple[str, Any]]:
    """Return (label, value) of what was measured after a run, and the last value of each of its main quantities."""
    ends = [(_name(each), first_and_last(run, each.key)[-1:]) for each in _wanted(run)]
    return [*run.outcome.items(), *((label, value) for label, values in ends for value in values)]


def _by_label(found: list[tuple[str, str, Any]]) -> dict[str, dict[str, float]]:
    """
    Turn (label, run, value) into label → run → value.

    Values that are not finite are left out, and so are labels that fewer than two runs have.
    """
    measured: dict[str, dict[str, float]] = {}
    for label, run, value in found:
        if is_finite(value):
            measured.setdefault(label, {})[run] = value
    return {label: of for label, of in measured.items() if len(of) > 1}


def not_passed(runs: dict[str, Run]) -> list[tuple[str, list[str]]]:
    """
    Return (objection, its reasons) for each report that does not accept a reward model of the runs.

    An objection that several runs share comes once, and begins with their names.
    """
    said: dict[str, list[str]] = {}
    for name, run in runs.items():
        for objection in _objections(run):
            said.setdefault(objection, []).append(name)
    rows = []
    for objection, names in said.items():
        what, *reasons = objection.split("\n  - ")
        what = f"{_listed(names)}: {what}" if len(runs) > 1 else what
        rows.append((what[:800], [reason[:800] for reason in reasons]))
    return rows


def watchers(run: Run) -> str:
    """Return the beginning of a sentence, such as "HackWatch watched"; "" if a run's monitors are not recorded."""
    if not run.monitors:
        return "" if run.monitors is None else "no monitors were set"
    names = sorted(run.monitors)
    return f"{_listed(names) if len(names) <= _NAMED else f'{len(names)} monitors'} watched"


def _wanted(run: Run) -> list[Quantity]:
    """
    Return the quantities that a run's sentence names.

    For a run with a score these are the score, gold on held-out prompts, and the KL. For another run they are its
    first main quantity and its loss, both on held-out data if anything was measured on held-out data.
    """
    quantities = headline(run)
    if "reward" in run.metrics:
        return [each for each in quantities if each.name in ("score", "gold, held out", "KL")][:_NAMED]
    held_out = [each for each in quantities if each.name.startswith("held-out")] or quantities
    return [each for each in held_out if each in held_out[:1] or each.name.endswith("loss")]


def _name(quantity: Quantity) -> str:
    return quantity.name.replace("gold, held out", "held-out gold")  # the tile's name does not fit into a sentence


def _changes(run: Run) -> str:
    parts = []
    for each in _wanted(run):
        name, unit = f"the {_name(each)}", f" {each.unit}" if each.unit else ""
        logged = [log[each.key] for log in run.history if each.key in log]
        values, shown = first_and_last(run, each.key), shown_ends(run, each.key)
        if logged and not is_finite(logged[-1]):
            parts.append(f"{name} ended as {logged[-1]}")
        elif len(shown) == 1:
            parts.append(f"{name} was {shown[0]}{unit} (measured once)")
        elif shown and shown[0] == shown[1]:
            parts.append(f"{name} ended where it began, at {shown[0]}{unit}")
        elif shown and _is_noise(run, each.key):
            parts.append(f"{name} hardly changed ({shown[0]} to {shown[1]}{unit})")
        elif shown:
            parts.append(f"{name} {'rose' if values[1] > values[0] else 'fell'} from {shown[0]} to {shown[1]}{unit}")
    return _listed(parts)


def _cut_off(run: Run) -> str:
    """Return a clause on how many of the last answers the length limit cut off; "" if 90 % or fewer."""
    shares = first_and_last(run, run.metrics["length_clipped"].key) if "length_clipped" in run.metrics else []
    return f"{shares[-1]:.0%} of the last answers were cut off" if shares and shares[-1] > _CUT_OFF else ""


def _is_noise(run: Run, key: str) -> bool:
    """
    Return whether the last value of a key differs from the first by less than 2 σ.

    σ is the noise of the difference of two values. It is estimated by the root mean square of the differences between
    neighbouring values, in which a trend is small. With fewer than four values return False.
    """
    values = curve(run.history, key)[1]
    steps = [b - a for a, b in pairwise(values)]
    return len(steps) > 2 and abs(values[-1] - values[0]) < 2 * math.sqrt(fmean(step**2 for step in steps))


def _objections(run: Run) -> list[str]:
    """Return what reward reports object to the reward model that a run saved, and to those that scored its answers."""
    if run.report.get("passed") is not False:
        return run.objections
    reasons = run.report.get("reasons")
    named = map(str, reasons if isinstance(reasons, list) else [])
    return [
        "\n  - ".join(["reward_report.json says no to the model that this run has saved:", *named]),
        *run.objections,
    ]


def _worth(run: Run) -> str:
    if isinstance(run.report.get("passed"), bool):
        return f"the saved model {'passed' if run.report['passed'] else 'did not pass'} its report"
    return "a reward model did not pass its report" if run.objections else ""


def _watched(run: Run) -> str:
    if found := _found(run):
        return found
    return f"{watchers(run)} and found nothing" if run.monitors else watchers(run)


def _found(run: Run) -> str:
    """Return in words each monitor's most serious action and the step when it first took it; "" if none acted."""
    gravest: dict[str, tuple[int, str, int]] = {}  # monitor → gravity, what it did, at which step
    for alert in run.alerts:
        if not is_notice(alert):
            action, name = str(alert.get("action")), str(alert.get("monitor"))
            gravity = [*_DONE].index(action) if action in _DONE else 0
            if name not in gravest or gravity > gravest[name][0]:
                gravest[name] = gravity, _DONE.get(action, "warned"), alert["step"]
    said = sorted(gravest.items(), key=lambda item: -item[1][0])
    named = [f"{name} {done} at step {step}" for name, (_, done, step) in said[:_NAMED]]
    more = len(said) - len(named)
    return _listed([*named, f"{more} more monitor{'s' * (more > 1)} found something"] if more else named)


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}." if said else ""
