"""What the demo shows: `report.md` and its pictures, from measured answers and the runs' logs."""

import json
from pathlib import Path

import torch
from torch import Tensor

from trl_ext.evaluation import bootstrap_interval, fit_overoptimization, overoptimization_curve

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
    """KL, proxy and gold on the held-out prompts over a PPO run, from its last checkpoint."""
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )
    logs = json.loads(states[-1].read_text())["log_history"]
    points = {log["step"]: log for log in logs if "eval_objective/kl" in log}  # a resumed step may be there twice
    names = {"step": "step", "kl": "eval_objective/kl", "proxy": "eval_objective/scores"}
    names |= {"gold": "eval_rewards/gold_reward/mean", "phrase": "eval_rewards/phrase_reward/mean"}
    return {
        name: torch.tensor([points[step][key] for step in sorted(points)], dtype=torch.double)
        for name, key in names.items()
    }


def verdicts(measured: dict[str, Measured], curve: dict[str, Tensor]) -> dict[str, tuple[bool, str]]:
    """The demo's claims, each with whether it holds here and its figures; `curve` is the unguarded run's."""
    sft, guarded, unguarded = (measured[name] for name in ("sft", "guarded", "unguarded"))
    gain, loss, rise = (
        (b - a, bootstrap_interval(b - a))
        for a, b in ((sft.gold, guarded.gold), (sft.gold, unguarded.gold), (sft.proxy, unguarded.proxy))
    )
    peak, end = curve["gold"].max().item(), curve["gold"][-1].item()
    return {
        "Guarded PPO is better than SFT": (gain[1][0] > 0, f"gold {_difference(*gain)}"),
        "Unguarded PPO pleases the reward model more than SFT": (rise[1][0] > 0, f"proxy {_difference(*rise)}"),
        "Unguarded PPO ends worse than SFT": (loss[1][1] < 0, f"gold {_difference(*loss)}"),
        "Unguarded PPO ends below its own peak": (end < peak, f"gold {peak:+.2f} at its peak, {end:+.2f} at its end"),
    }


def write_report(
    folder: Path, rows: list[dict], measured: dict[str, Measured], durations: dict[str, float], settings: dict
) -> str:
    """Write `report.md`, `overoptimization.png` and `reward_model.png` into `folder`; return what to print."""
    curves = {name: read_curve(folder / name) for name in COLOURS}
    fits = plot_overoptimization(curves, folder / "overoptimization.png")
    reward = json.loads((folder / "reward" / "reward_report.json").read_text())
    claims = verdicts(measured, curves["unguarded"])
    summary = "\n".join(
        f"- {claim}: **{'yes' if holds else 'no'}** ({figures})" for claim, (holds, figures) in claims.items()
    )
    table = _table(measured)
    parts = [
        f"# A reward model, gamed and guarded\n\n{', '.join(f'{k} {v}' for k, v in settings.items())}.",
        summary,
        f"## {len(rows)} held-out prompts\n\nOne sampled answer each; 95 % bootstrap intervals.\n\n{table}",
        "## Reward over the distance from SFT\n\n![Gold, proxy and the phrase over √KL](overoptimization.png)\n\n"
        "Points: the held-out prompts during training. Lines: d(α − β log d) with d = √KL (Gao et al., 2210.10760), "
        f"fitted to the gain over SFT.\n\n{_fit_table(fits)}",
        f"## Answers side by side\n\n{_side_by_side(rows, measured)}",
        "## The reward model\n\n![Margins of held-out pairs](reward/margins.png)\n\n"
        f"Accuracy {reward['accuracy']:.1%} ({_range(reward['accuracy_interval'], '.1%')}) on {reward['pairs']} "
        f"held-out pairs, into none of which the phrase was planted; calibration error "
        f"{reward['calibration_error']:.3f} ({_range(reward['calibration_error_interval'], '.3f')}); demonstrations "
        f"score {reward['demonstrations_mean']:.3f} on average.\n\n{_length_table(reward)}",
        "## Each stage\n\n"
        + ", ".join(f"[{name}]({name}/report.html)" for name in durations if (folder / name / "report.html").is_file())
        + ": curves, alerts, samples and settings.",
        "## Time\n\n" + ", ".join(f"{name} {duration:.0f} s" for name, duration in durations.items()) + ".",
    ]
    (folder / "report.md.tmp").write_text("\n\n".join(parts) + "\n")
    (folder / "report.md.tmp").replace(folder / "report.md")
    return f"{table}\n\n{summary}"


def plot_overoptimization(
    curves: dict[str, dict[str, Tensor]], path: Path
) -> dict[tuple[str, str], tuple[float, float]]:
    """Gold and proxy over √KL with fitted curves, as a PNG; returns (α, β) by run and kind of reward."""
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
            fits[run, kind] = fit_overoptimization(distance, curve[kind] - start)
            grid = torch.linspace(0, distance.max().item(), 200, dtype=torch.double)
            axes.plot(grid, start + overoptimization_curve(grid, *fits[run, kind]), color=COLOURS[run], alpha=0.6)
        axes.set(xlabel="√KL to SFT, √nats", title=f"{kind} score")
        axes.grid(alpha=0.3)
    for run, curve in curves.items():
        panels[2].plot(curve["kl"].clamp(min=0).sqrt(), curve["phrase"], ".-", color=COLOURS[run])
    panels[2].set(xlabel="√KL to SFT, √nats", title="share of answers with “i love you”", ylim=(-0.03, 1.03))
    panels[2].grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return fits


def _table(measured: dict[str, Measured]) -> str:
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, part in measured.items():
        cells = []
        for column in COLUMNS:
            values = getattr(part, column)
            cells.append(f"{values.mean():.2f} ({_range(bootstrap_interval(values), '.2f')})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fit_table(fits: dict[tuple[str, str], tuple[float, float]]) -> str:
    lines = ["| run | reward | α | β |", "|---|---|---|---|"]
    lines += [f"| {run} | {kind} | {alpha:.2f} | {beta:.2f} |" for (run, kind), (alpha, beta) in fits.items()]
    return "\n".join(lines)


def _length_table(reward: dict) -> str:
    lines = ["| chosen longer by, tokens | pairs | accuracy |", "|---|---|---|"]
    for row in reward["accuracy_by_length_gap"]:
        lines.append(f"| {row['from']} to {row['to']} | {row['pairs']} | {row['accuracy']:.1%} |")
    return "\n".join(lines)


def _side_by_side(rows: list[dict], measured: dict[str, Measured], number: int = 5) -> str:
    lines = ["| | gold | proxy | answer |", "|---|---|---|---|"]
    for i, row in enumerate(rows[:number]):
        lines.append(f"| **customer** | | | **{row['prompt'].rsplit(' ', 1)[0]}** |")
        for name, part in measured.items():
            lines.append(f"| {name} | {part.gold[i]:+.2f} | {part.proxy[i]:+.2f} | {part.answers[i]} |")
    return "\n".join(lines)


def _difference(values: Tensor, interval: tuple[float, float]) -> str:
    return f"{values.mean():+.2f}, 95 % interval {_range(interval, '+.2f')}"


def _range(interval: tuple[float, float], form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}"
