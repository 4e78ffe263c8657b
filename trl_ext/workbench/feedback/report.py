"""Compare a judge with people, make training pairs from its verdicts, and write the report and its page."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from ...data import write_rows
from ...rewards import text_of
from ...runs import write_text
from ..labels.agreement import cohen_kappa, resampled, with_interval as estimate
from ..labels.labelling import CHOICES
from ..pages.markup import number, percent, render, with_interval

_READ = 100  # most pairs that `to_read` has
_SIDES = {"a": ("response_a", "response_b"), "b": ("response_b", "response_a")}


def choice_of(votes: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """
    Return a pair's winner, and how sure the judge is of it.

    An answer wins if the judge's mean verdict for it is above 0.5 in both orders, shown first and shown second.
    Otherwise the pair is a tie.

    Args:
        votes: the verdicts on a pair. Each has `first`, the answer that was shown first, "a" or "b"; and
            `a_is_better`, how sure the judge is that answer a is better, 0 to 1. None counts as 0.5.

    Returns:
        "a", "b" or "tie"; and the mean verdict for the winner over both orders, 0.5 for a tie.
    """
    by_order: dict[str, list[float]] = {"a": [], "b": []}
    for vote in votes:
        by_order[vote["first"]].append(0.5 if vote["a_is_better"] is None else vote["a_is_better"])
    means = [fmean(values) for values in by_order.values()]
    for winner, shares in (("a", means), ("b", [1 - mean for mean in means])):
        if min(shares) > 0.5:
            return winner, fmean(shares)
    return "tie", 0.5


def prompt_groups(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return (N,) int group numbers for a bootstrap: rows with the same prompt have the same number."""
    return pd.factorize(np.array([json.dumps(row["prompt"], sort_keys=True) for row in rows], object))[0]


def kappa(
    ours: Sequence[str], theirs: Sequence[str], groups: np.ndarray, seed: int = 0
) -> tuple[float | None, list[float] | None]:
    """
    Compute Cohen's κ of two raters, and its 95 % interval by a bootstrap over groups of rows.

    Args:
        ours, theirs: (N,) choices of the two raters, each "a", "b" or "tie".
        groups: (N,) group numbers; the rows of a group are resampled together.
        seed: seed of the bootstrap.

    Returns:
        κ, and the interval [low, high]; None and None if κ is not defined.
    """
    cells = [3 * CHOICES.index(mine) + CHOICES.index(other) for mine, other in zip(ours, theirs, strict=True)]
    tables = resampled(np.eye(9)[cells], groups, seed).reshape(-1, 3, 3)
    return estimate(cohen_kappa(tables))


def noise(ours: Sequence[str], shares: Sequence[float], theirs: Sequence[str]) -> dict[str, Any]:
    """
    Measure how often people chose a judge's winners, and the factor that corrects how sure the judge is of them.

    Pairs that the judge calls a tie do not count. Of the other n pairs, let k be the number whose winner people chose,
    too; a pair that people call a tie counts ½. Then accuracy = (k + ½)/(n + 1).

    If the judge is sure of a winner by p, the confidence in the winner is ½ + (p − ½)·shrink. With
    shrink = max(2·accuracy − 1, 0)/(2·mean p − 1), the mean confidence in these n winners is the accuracy, ½ at least.

    Args:
        ours: (N,) the judge's choices.
        shares: (N,) how sure the judge is of its choices, p, as [`choice_of`] returns it.
        theirs: (N,) people's choices.

    Returns:
        A dict with `winners`, which is n, `accuracy` and `shrink`; the last two are None if n is 0.
    """
    rows = [row for row in zip(ours, shares, theirs, strict=True) if row[0] != "tie"]
    if not rows:
        return {"winners": 0, "accuracy": None, "shrink": None}
    right = sum(0.5 if said == "tie" else float(said == mine) for mine, _, said in rows)
    accuracy = (right + 0.5) / (len(rows) + 1)
    mean = fmean(share for _, share, _ in rows)
    shrink = max(2 * accuracy - 1, 0) / (2 * mean - 1)
    return {"winners": len(rows), "accuracy": accuracy, "shrink": shrink}


def longer_wins(choices: Sequence[str], rows: Sequence[dict[str, Any]]) -> float | None:
    """
    Return the share of rows in which the longer answer was chosen; ties, and answers of the same length, do not count.
    None if no row counts.

    Args:
        choices: (N,) "a", "b" or "tie".
        rows: (N,) pairs with `response_a` and `response_b`.
    """
    lengths = [(len(text_of(row["response_a"])), len(text_of(row["response_b"]))) for row in rows]
    known = [
        (a > b) == (choice == "a")
        for choice, (a, b) in zip(choices, lengths, strict=True)
        if choice != "tie" and a != b
    ]
    return fmean(known) if known else None


def of_known(
    known: list[dict[str, Any]],
    people: Mapping[str, str],
    votes_of: Callable[[dict[str, Any]], list[dict[str, Any]]],
    args: Any,
) -> dict[str, Any]:
    """
    Compare the judge with people, and decide whether the judge may label the other pairs.

    Args:
        known: the pairs that people labelled, as `load_pairs` returns them.
        people: maps a pair's key to people's choice, "a", "b" or "tie".
        votes_of: function from a pair to the judge's verdicts on it, as [`choice_of`] takes them.
        args: arguments of `trl-ext label`.

    Returns:
        - `known`: a dict with the number of `rows`; the share of equal choices, `agreement`; Cohen's `kappa` and its
          `kappa_interval`; `winners`, `accuracy` and `shrink` from [`noise`]; and `longer`, a dict with the share of
          pairs in which the `judge`, and in which `people`, chose the longer answer.
        - `to_read`: at most 100 pairs that judge and people label differently, those with the surest verdicts first,
          each with both labels (`people`, `judge`) and the judge's `messages`.
        - `gate`: a dict with `passed`, whether the judge may label; `reasons` why not; and `min_agreement`.
    """
    theirs = [people[row["key"]] for row in known]
    votes = [votes_of(row) for row in known]
    ours, shares = zip(*map(choice_of, votes), strict=True)
    agreed, ends = kappa(ours, theirs, prompt_groups(known), args.seed)
    measured = noise(ours, shares, theirs)
    to_read = [
        {
            **{name: row[name] for name in ("item", "prompt", "response_a", "response_b")},
            "people": said,
            "judge": choice,
            "share": share,
            "why": ", ".join(sorted({vote["why"] for vote in asked} - {"read"}))
            or "its two orders disagree" * (choice == "tie"),
            "messages": [vote["message"] for vote in asked],
        }
        for row, said, choice, share, asked in zip(known, theirs, ours, shares, votes, strict=True)
        if said != choice
    ]
    to_read.sort(key=lambda row: -row["share"])
    reasons = []
    if agreed is None or agreed < args.min_agreement:
        what = "not defined (all labels are the same)" if agreed is None else f"{agreed:.3f}"
        reasons.append(
            f"kappa of judge and people is {what} on {len(known)} pairs, and `min_agreement` is "
            f"{args.min_agreement:g}: no pair was written"
        )
    elif not measured["shrink"]:
        reasons.append("people chose the judge's winners no more often than by chance: no pair was written")
    if reasons:
        reasons.append(
            f"read the pairs that judge and people label differently ({len(to_read)} of {len(known)}; "
            f"{Path(args.output_dir) / 'label.html'} shows at most {_READ}); then correct the rubric or use another "
            "judge, in another `output_dir`"
        )
    return {
        "known": {
            "rows": len(known),
            "agreement": fmean(a == b for a, b in zip(ours, theirs, strict=True)),
            "kappa": agreed,
            "kappa_interval": ends,
            **measured,
            "longer": {"judge": longer_wins(ours, known), "people": longer_wins(theirs, known)},
        },
        "to_read": to_read[:_READ],
        "gate": {"passed": not reasons, "reasons": reasons, "min_agreement": args.min_agreement},
    }


def of_all(votes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """
    Describe the verdicts on the pairs that were judged. `votes` has each pair's verdicts, as the journal holds them.

    Returns:
        - `pairs`: number of pairs.
        - `calls`, `tokens_in`, `tokens_out`: requests to the judge, and tokens as the server, or a local judge's
          tokenizer, counts them.
        - `outcomes`: the number of questions by outcome: "read", or the reason why there is no verdict.
        - `ties`: share of the pairs without a winner.
        - `shown_first`: share of the verdicts that prefer the answer shown first; ties do not count. As both orders of
          each pair are asked, it is one half for a judge that ignores the order.
    """
    asked = [vote for each in votes for vote in each]
    taken = [(vote["a_is_better"], vote["first"] == "a") for vote in asked if vote["a_is_better"] not in (None, 0.5)]
    return {
        "pairs": len(votes),
        "calls": sum(vote.get("asked", 0) for vote in asked),
        **tokens_of(asked),
        "outcomes": dict(Counter(vote["why"] for vote in asked)),
        "ties": fmean(choice_of(each)[0] == "tie" for each in votes) if votes else None,
        "shown_first": fmean((p > 0.5) == is_a for p, is_a in taken) if taken else None,
    }


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the total `tokens_in` and `tokens_out` of the answers in a journal's rows."""
    return {
        f"tokens_{name}": sum(row.get("tokens", (0, 0))[at] for row in rows) for at, name in enumerate(("in", "out"))
    }


def training_pairs(
    known: list[dict[str, Any]],
    others: list[dict[str, Any]],
    people: Mapping[str, str],
    votes_of: Callable[[dict[str, Any]], list[dict[str, Any]]],
    report: dict[str, Any],
    args: Any,
) -> dict[str, Any]:
    """
    Write `pairs/train.jsonl`, labelled by the judge, and `pairs/test.jsonl`, labelled by people; they share no prompt.

    Args:
        known: the pairs that people labelled, as `load_pairs` returns them.
        others: the pairs whose prompts people did not label.
        people: maps a pair's key to people's choice.
        votes_of: function from a pair to the judge's verdicts.
        report: the report so far, with `known`, `judge` and `rubric`.
        args: arguments of `trl-ext label`.

    Returns:
        - `file`: path of the pairs to train on.
        - `train`, `test`: number of pairs in each file; if `train` is 0, no file is written.
        - `confidence`: mean confidence in the labels of the pairs to train on; 0 without such pairs.
        - `label_smoothing`: 1 − `confidence`.
        - `left_out`: number of pairs that are left out, by reason.
    """

    def of(row: dict[str, Any], choice: str) -> dict[str, Any]:
        sides = _SIDES[choice]
        kept = {name: row[name] for name in args.keep_columns or ()}
        return {
            **kept,
            "prompt": row["prompt"],
            "chosen": row[sides[0]],
            "rejected": row[sides[1]],
            "item": row["item"],
        }

    left_out: Counter[str] = Counter()
    train = []
    for row in others:
        votes = votes_of(row)
        choice, share = choice_of(votes)
        if choice == "tie":
            left_out["without a verdict" if all(vote["why"] != "read" for vote in votes) else "a tie"] += 1
            continue
        confidence = min(0.5 + (share - 0.5) * report["known"]["shrink"], 1.0)
        judge = next((vote["model"] for vote in votes if "model" in vote), report["judge"])
        said = {
            "confidence": confidence,
            "share": share,
            "votes": len(votes),
            "judge": judge,
            "rubric": report["rubric"],
        }
        train.append({**of(row, choice), **said})
    test = []
    for row in known:
        choice = people[row["key"]]
        if choice != "tie":
            test.append({**of(row, choice), "confidence": 1.0})
    folder = Path(args.output_dir) / "pairs"
    if train:
        write_rows(folder / "train.jsonl", train)
        write_rows(folder / "test.jsonl", test)
    mean = fmean(row["confidence"] for row in train) if train else 0.0
    return {
        "file": str(folder / "train.jsonl"),
        "train": len(train),
        "test": len(test),
        "confidence": mean,
        "label_smoothing": 1 - mean,
        "left_out": dict(left_out),
    }


def sentences(report: dict[str, Any]) -> list[str]:
    """Return a report's main figures as sentences for the terminal."""
    said = []
    counted = report["left_out"]
    if counted:
        said.append(f"Pairs left out: {', '.join(f'{count} {why}' for why, count in counted.items())}")
    if known := report.get("known"):
        longer = known["longer"]
        agreed = with_interval(known["kappa"], known["kappa_interval"], ".2f", "not defined")
        said += [
            f"Judge and people: kappa {agreed}, {known['rows']} pairs; the judge's winners that people chose, too: "
            f"{percent(known['accuracy'])} of {known['winners']}",
            f"The longer answer wins: by the judge {percent(longer['judge'])}, by people {percent(longer['people'])}",
        ]
    if judged := report["judged"]:
        bad = ", ".join(f"{count} {why}" for why, count in judged["outcomes"].items() if why != "read") or "none"
        said += [
            f"The judge chose the answer shown first: {percent(judged['shown_first'])}; without a bias it is 50 %",
            f"Requests: {judged['calls']:,} calls, {judged['tokens_in']:,} tokens in, {judged['tokens_out']:,} out",
            f"Without a verdict, counted as ties: {bad}",
        ]
    if pairs := report["pairs"]:
        left = ", ".join(f"{count} {why}" for why, count in pairs["left_out"].items()) or "none"
        said.append(
            f"Pairs: {pairs['file']}, {pairs['train']:,} by the judge, mean confidence {pairs['confidence']:.3f} "
            f"(label_smoothing {pairs['label_smoothing']:.3f}); {pairs['test']:,} by people to test on; left out: "
            f"{left}"
        )
    return said


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write `report` as `label.json` and `label.html`."""
    write_text(folder / "label.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    people = report["people"]
    shown = render(
        Path(__file__).with_name("page.html.j2"),
        title="Labels by a judge",
        verdict="" if report["gate"]["passed"] else "No pairs were written.",
        reasons=report["gate"]["reasons"],
        tiles={
            "judge": report["judge"],
            "rubric": report["rubric"],
            "κ that is needed": number(report["gate"]["min_agreement"]),
            "α among people": with_interval(people["alpha"], people["alpha_interval"], ".2f"),
            "pairs by people": people["items"],
            "all pairs": f"{report['rows']:,}",
        },
        said=sentences(report),
        to_read=report.get("to_read", []),
        settings=report["settings"],
    )
    write_text(folder / "label.html", shown)
