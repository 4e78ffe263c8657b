"""Write the page on a refreshed reward model: the old and new model compared, and high-scored answers that lost."""

from typing import Any

from .markup import TEMPLATES, number, render, with_interval


def refresh_page(report: dict[str, Any]) -> str:
    """Return the HTML of a report as `recipes/refresh_reward.py` writes it into `refresh.json`."""
    pairs, training, models = report["pairs"], report["training"], []
    for name, old in report["old"].items():
        if isinstance(old, dict):
            both = [old, report["new"][name]]
            accuracy = [with_interval(each["accuracy"], each["accuracy_interval"]) for each in both]
            models.append([name, old["pairs"], *accuracy, *(number(each["calibration_error"], 3) for each in both)])
    return render(
        TEMPLATES / "refresh.html.j2",
        title=f"Reward model, refreshed: round {report['round']}",
        tiles={
            "round": report["round"],
            "labels": f"{pairs['labels']:,}",
            "pairs labelled": f"{pairs['items']:,}",
            "new pairs trained on": f"{training['new']:,}",
            "old ones": f"{training['old']:,}",
        },
        # Called held-out only if it is known that no model was trained on these pairs
        pairs="held-out pairs" if report.get("is_held_out") else "pairs",
        models=models,
        said=report.get("said", []),
        won=[[why, each["pairs"], f"{each['won']:.0%}"] for why, each in report["won"].items()],
        lost=[[number(row["score"], 3), row["prompt"], row["answer"], row["preferred"]] for row in report["lost"]],
    )
