"""Write the demo's page, `report.html`, from measured answers and the runs' logs, with links to its stages."""

import base64
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from trl_ext.evaluation import bootstrap_interval
from trl_ext.runs import write_text
from trl_ext.workbench.pages import markup

from .measure import Measured

COLUMNS = {
    "gold": "gold",
    "proxy": "proxy (reward model)",
    "kl": "KL to SFT, nats",
    "entropy": "entropy, nats",
    "ended": "ends by EOS",
    "length": "tokens",
    "phrase": "says “i love you”",
}
COLOURS = {"guarded": "tab:blue", "unguarded": "tab:red"}


def read_curve(folder: Path) -> dict[str, Tensor]:
    """
    Return the step, KL, scores (and their spread) and share of the planted phrase at each evaluation of a PPO run on
    the held-out prompts, from the log in its last checkpoint.
    """
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )
    logs = json.loads(states[-1].read_text())["log_history"]
    points = {log["step"]: log for log in logs if "eval_objective/kl" in log}  # a resumed step may be there twice
    names = {"step": "step", "kl": "eval_objective/kl", "proxy": "eval_objective/scores"}
    names |= {"gold": "eval_rewards/gold_reward/mean", "phrase": "eval_rewards/phrase_reward/mean"}
    names |= {"gold_std": "eval_rewards/gold_reward/std"}
    return {
        name: torch.tensor([points[step][key] for step in sorted(points)], dtype=torch.double)
        for name, key in names.items()
    }


def alarm_of(folder: Path) -> int | None:
    """Return the step at which `HackWatch` first raised an alarm in a run; None if it raised none."""
    file = folder / "alerts.jsonl"
    alerts = map(json.loads, file.read_text().splitlines() if file.is_file() else ())
    return next((each["step"] for each in alerts if each["monitor"] == "HackWatch" and each["level"] == "alert"), None)


def verdicts(measured: dict[str, Measured], curve: dict[str, Tensor]) -> dict[str, tuple[bool, str]]:
    """
    Map each claim of the demo to whether it holds in this run, and its figures; `curve` is the unguarded run's.
    """
    sft, guarded, unguarded = (measured[name] for name in ("sft", "guarded", "unguarded"))
    gain, loss, rise = (
        (b - a, bootstrap_interval(b - a))
        for a, b in ((sft.gold, guarded.gold), (sft.gold, unguarded.gold), (sft.proxy, unguarded.proxy))
    )
    peak = int(curve["gold"].argmax())
    fall = (curve["gold"][-1] - curve["gold"][peak]).item()
    error = 1.96 * curve["gold_std"][[peak, -1]].norm().item() / math.sqrt(len(sft.gold))
    return {
        "Guarded PPO is better than SFT": (gain[1][0] > 0, f"gold {_difference(*gain)}"),
        "Unguarded PPO pleases the reward model more than SFT": (rise[1][0] > 0, f"proxy {_difference(*rise)}"),
        "Unguarded PPO ends worse than SFT": (loss[1][1] < 0, f"gold {_difference(*loss)}"),
        "Unguarded PPO ends below its own peak": (
            fall + error < 0,
            f"gold {fall:+.2f}, 95 % interval {_range((fall - error, fall + error), '+.2f')}",
        ),
    }


def write_report(
    folder: Path, rows: list[dict], measured: dict[str, Measured], durations: dict[str, float], settings: dict
) -> str:
    """
    Write `report.html` and `overoptimization.png` into `folder`; return a summary to print. `rows` are the held-out
    prompts, `measured` has each policy's answers to them, and `durations` the seconds that each stage took.
    """
    curves = {name: read_curve(folder / name) for name in COLOURS}
    alarms = {name: alarm_of(folder / name) for name in COLOURS}
    fits = plot_overoptimization(curves, folder / "overoptimization.png", alarms)
    reward = json.loads((folder / "reward" / "reward_report.json").read_text())
    claims = verdicts(measured, curves["unguarded"])
    page = markup.render(
        Path(__file__).with_name("report.html.j2"),
        title="A reward model, gamed and guarded",
        claims=[[claim, *found] for claim, found in claims.items()],
        wrong=[claim for claim, (holds, _) in claims.items() if not holds],
        settings=settings,
        stages=[[name, f"{seconds:.0f}", _pages(folder / name)] for name, seconds in durations.items()],
        prompts=len(rows),
        models=list(measured),
        measured=_measured(measured),
        curves=_inline(folder / "overoptimization.png"),
        fits=[[run, kind, f"{alpha:.2f}", f"{beta:.2f}"] for (run, kind), (alpha, beta) in fits.items()],
        answers=_side_by_side(rows, measured),
        reward=reward,
        gaps=[
            [f"{row['from']} to {row['to']}", row["pairs"], f"{row['accuracy']:.1%}"]
            for row in reward["accuracy_by_length_gap"]
        ],
    )
    write_text(folder / "report.html", page)
    return "\n".join(f"{claim}: {'yes' if holds else 'no'} ({figures})" for claim, (holds, figures) in claims.items())


def _pages(stage: Path) -> list[tuple[str, str]]:
    """Return names and addresses of the pages that a stage has written."""
    pages = {"the run": "report.html", "the saved model": "reward_report.html"}
    return [(name, f"{stage.name}/{page}") for name, page in pages.items() if (stage / page).is_file()]


def _measured(measured: dict[str, Measured]) -> list[list[str]]:
    rows = []
    for column, name in COLUMNS.items():
        values = [getattr(part, column) for part in measured.values()]
        rows.append([name, *(f"{value.mean():.2f} ({_range(bootstrap_interval(value), '.2f')})" for value in values)])
    return rows


def _inline(picture: Path) -> str:
    """Return a PNG as a data URL, so that the page loads no other file."""
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"


def _terms(distance: Tensor) -> Tensor:
    """Return the (N, 2) terms of the law d (α − β log d), which is linear in α and β (Gao et al., 2210.10760)."""
    return torch.stack([distance, -torch.special.xlogy(distance, distance)], dim=1)


def plot_overoptimization(
    curves: dict[str, dict[str, Tensor]], path: Path, alarms: dict[str, int | None]
) -> dict[tuple[str, str], tuple[float, float]]:
    """
    Draw gold and proxy score, with fitted curves, and the share of the planted phrase against √KL, with the steps of
    alarms, into a PNG.

    Return a dict from (run, kind of reward) to the fitted (α, β).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    fits = {}
    for axes, kind in zip(panels[:2], ("gold", "proxy"), strict=True):
        for run, curve in curves.items():
            distance = curve["kl"].clamp(min=0).sqrt()
            axes.plot(distance, curve[kind], ".", color=COLOURS[run], label=run)
            if len(distance[distance > 0].unique()) < 2:
                continue
            start = curve[kind][0]
            gain = (curve[kind] - start)[:, None]
            fitted = torch.linalg.lstsq(_terms(distance), gain, driver="gelsd").solution
            fits[run, kind] = tuple(fitted[:, 0].tolist())
            grid = torch.linspace(0, distance.max().item(), 200, dtype=torch.double)
            axes.plot(grid, start + (_terms(grid) @ fitted)[:, 0], color=COLOURS[run], alpha=0.6)
        axes.set(xlabel="√KL to SFT, √nats", title=f"{kind} score")
        axes.grid(alpha=0.3)
    for run, step in alarms.items():
        if step is not None:  # at the first evaluation that comes after it
            at = min(int((curves[run]["step"] < step).sum()), len(curves[run]["step"]) - 1)
            x = curves[run]["kl"][at].clamp(min=0).sqrt()
            for axes, kind in zip(panels, ("gold", "proxy", "phrase"), strict=True):
                label = f"{run}: HackWatch warns, step {step}"
                axes.plot(x, curves[run][kind][at], "^", color="black", markersize=9, label=label)
    for run, curve in curves.items():
        panels[2].plot(curve["kl"].clamp(min=0).sqrt(), curve["phrase"], ".-", color=COLOURS[run])
    panels[2].set(xlabel="√KL to SFT, √nats", title="share of answers with “i love you”", ylim=(-0.03, 1.03))
    panels[2].grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)  # off the points
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return fits


def _side_by_side(rows: list[dict], measured: dict[str, Measured], number: int = 5) -> list[list[str]]:
    cells = []
    for i, row in enumerate(rows[:number]):
        cells.append(["customer", "", "", row["prompt"].rsplit(" ", 1)[0]])
        for name, part in measured.items():
            cells.append([name, f"{part.gold[i]:+.2f}", f"{part.proxy[i]:+.2f}", part.answers[i]])
    return cells


def _difference(values: Tensor, interval: tuple[float, float]) -> str:
    return f"{values.mean():+.2f}, 95 % interval {_range(interval, '+.2f')}"


def _range(interval: tuple[float, float], form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}"
