"""Write the first sentence of a page: how the run ended, and whether a monitor watched it."""

from ...runs import is_notice
from .headline import Quantity, first_and_last, headline
from .markup import number
from .recorded import Run, is_finite

# What a monitor did, by its action, the gravest last
_DONE = {
    "warn": "warned",
    "save": "saved a checkpoint",
    "raise_kl": "raised the KL coefficient",
    "stop": "stopped the run",
    "rollback": "rolled the run back",
}
_NAMED = 3  # quantities, monitors and runs that a sentence has room for


def verdict(run: Run) -> str:
    """Summarise a run in one sentence; return "" if nothing was measured."""
    said = "; ".join(filter(None, [_changes(run), _worth(run), _watched(run)]))
    return _sentence(f"so far {said}" if said and run.events and not run.has_ended else said)


def verdict_of_several(runs: dict[str, Run]) -> str:
    """Summarise several runs in a sentence: the highest final score, the alerts, and the runs without monitors."""
    last: dict[str, dict[str, float]] = {}  # what was measured → run → its value at the end
    for name, run in runs.items():
        ends = [(_name(each), first_and_last(run, each.key)[-1:]) for each in _wanted(run)]
        for label, values in [*((label, [value]) for label, value in run.outcome.items()), *ends]:
            if values and is_finite(values[0]):
                last.setdefault(label, {})[name] = values[0]
    parts = []
    for label, of in [(label, of) for label, of in last.items() if len(of) > 1][:_NAMED]:
        low, high = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
        least, most = number(of[low], 3), number(of[high], 3)
        ends_apart = f"is highest in {high} ({most}) and lowest in {low} ({least})"
        where = "each" if len(of) == len(runs) else _listed(list(of))
        parts.append(f"the {label} {ends_apart if least != most else f'ended at {most} in {where}'}")
    found = [f"in {name} {said}" for name, run in runs.items() if (said := _found(run))]
    parts += found if len(found) <= _NAMED else [f"monitors found something in {len(found)} runs"]
    alone = [name for name, run in runs.items() if run.monitors == {}]
    if alone:
        parts.append(f"no monitors were set{f' in {_listed(alone)}' if len(alone) < len(runs) else ''}")
    rejected = [name for name, run in runs.items() if _objections(run)]
    if rejected:
        parts.append(f"a reward model of {_listed(rejected)} did not pass its report")
    return _sentence("; ".join(parts))


def not_passed(runs: dict[str, Run]) -> list[tuple[str, list[str]]]:
    """Return the objections of reward reports against the runs' reward models, with reasons, each once."""
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
    """Return the monitors of a run as the beginning of a sentence; "" if they are not recorded."""
    if not run.monitors:
        return "" if run.monitors is None else "no monitors were set"
    names = sorted(run.monitors)
    return f"{_listed(names) if len(names) <= _NAMED else f'{len(names)} monitors'} watched"


def _wanted(run: Run) -> list[Quantity]:
    """Return score, gold and KL; of a trainer without a score its first quantity, on held-out data if it has one."""
    quantities = headline(run)
    if "reward" in run.metrics:
        return [each for each in quantities if each.name in ("score", "gold, held out", "KL")][:_NAMED]
    return ([each for each in quantities if each.name.startswith("held-out")] or quantities)[:1]


def _name(quantity: Quantity) -> str:
    return quantity.name.replace("gold, held out", "held-out gold")  # the tile's name does not fit into a sentence


def _changes(run: Run) -> str:
    parts = []
    for each in _wanted(run):
        name, unit = f"the {_name(each)}", f" {each.unit}" if each.unit else ""
        logged = [log[each.key] for log in run.history if each.key in log]
        values = first_and_last(run, each.key)
        least = 1e-6 * max(map(abs, values), default=0.0)  # what rounding left of a KL of 0, say
        shown = [number(value if abs(value) > least else 0, 3) for value in values]
        if logged and not is_finite(logged[-1]):
            parts.append(f"{name} ended as {logged[-1]}")
        elif len(shown) == 1:
            parts.append(f"{name} was {shown[0]}{unit} (measured once)")
        elif shown and shown[0] == shown[1]:
            parts.append(f"{name} ended where it began, at {shown[0]}{unit}")
        elif shown:
            parts.append(f"{name} {'rose' if values[1] > values[0] else 'fell'} from {shown[0]} to {shown[1]}{unit}")
    return _listed(parts)


def _objections(run: Run) -> list[str]:
    """Return the objections of reward reports against the model that a run saved, and against its rewards."""
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
    """Return each monitor's most serious action and its first step, in words; "" if no monitor acted."""
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
