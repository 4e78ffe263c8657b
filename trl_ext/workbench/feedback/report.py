"""Assemble the report: how far the judge agrees with people, its biases, and the training pairs."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data import write_rows
from ...rewards import text_of
from ..pages.markup import percent, with_interval
from .criteria import OVERALL, Criteria
from .figures import agreement, choice_of, confidence, longer_wins, noise, shown_first, spent
from .journal import Journal

_READ = 100  # most pairs that `to_read` has


def votes_of(journal: Journal, row: dict[str, Any], votes: int) -> list[dict[str, Any]]:
    """Return the verdicts about a pair that the journal has: up to `votes` for each order of the two answers."""
    names = [(row["key"], first, vote) for first in "ab" for vote in range(votes)]
    return [journal.rows[name] for name in names if name in journal.rows]


def _prompts(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [json.dumps(row["prompt"], sort_keys=True) for row in rows]


def _lengths(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(len(text_of(row["response_a"])), len(text_of(row["response_b"]))) for row in rows]


def of_known(
    journal: Journal, known: list[dict[str, Any]], people: dict[str, str], names: Sequence[str], args: Any
) -> dict[str, Any]:
    """
    Compare the judge with people, and decide whether the judge may label.

    Args:
        journal: the judge's verdicts.
        known: the pairs that people labelled.
        people: key of a pair → people's choice.
        names: names of the principles, and "overall".
        args: arguments of `trl-ext label`.

    Returns:
        - `by_name`: name → how far the judge agrees with people by that name (see [`agreement`]), how often the
          `longer` answer won, and how many of the judge's `winners` are people's, too (see [`noise`]).
        - `noise`: `winners` of the name "overall".
        - `length`: how often the longer answer won by the `judge` and by `people`.
        - `to_read`: the pairs that judge and people label differently, the judge's surest first.
        - `gate`: whether the judge has `passed`, so that it may label, and `reasons` if not.
    """
    prompts, theirs = _prompts(known), [people[row["key"]] for row in known]
    found = [votes_of(journal, row, args.votes) for row in known]
    verdicts = {name: [choice_of(votes, name) for votes in found] for name in names}
    by_name: dict[str, dict[str, Any]] = {}
    for name, of in verdicts.items():
        by_name[name] = agreement([choice for choice, _ in of], theirs, prompts, args.seed)
        by_name[name]["longer"] = longer_wins([choice for choice, _ in of], _lengths(known), prompts)
        by_name[name]["winners"] = noise([choice for choice, _ in of], [share for _, share in of], theirs)
    measured = by_name[OVERALL]["winners"]
    to_read = [
        {
            **{name: row[name] for name in ("item", "prompt", "response_a", "response_b")},
            "people": said,
            "judge": choice,
            "share": share,
            "why": ", ".join(sorted({vote["why"] for vote in votes} - {"read"}))
            or "its two orders disagree" * (choice == "tie"),
            "messages": [vote["message"] for vote in votes],
        }
        for row, said, (choice, share), votes in zip(known, theirs, verdicts[OVERALL], found, strict=True)
        if said != choice
    ]
    whole, reasons = by_name[OVERALL], []
    if whole["kappa"] is None:
        reasons.append(
            f"kappa of judge and people is not defined on {len(known)} pairs, since both gave all of them the same "
            "label: have people label other pairs"
        )
    elif whole["kappa"] < args.min_agreement:
        reasons.append(
            f"kappa of judge and people is {whole['kappa']:.2f} on {len(known)} pairs, and `min_agreement` is "
            f"{args.min_agreement:g}: no pair was written"
        )
    elif not measured["shrink"]:
        reasons.append("people chose the judge's winners no more often than a coin would: no pair was written")
    if reasons:
        first = ", ".join(row["item"] for row in sorted(to_read, key=lambda row: -row["share"])[:5])
        reasons.append(
            f"read the {len(to_read)} pairs that judge and people label differently "
            f"({first}{', …' if len(to_read) > 5 else ''}), in {Path(args.output_dir) / 'label.html'}; then correct "
            "the rubric or use another judge, in another `output_dir`"
        )
    return {
        "by_name": by_name,
        "noise": measured,
        "length": {
            "judge": by_name[OVERALL]["longer"],
            "people": longer_wins(theirs, _lengths(known), prompts),
        },
        "to_read": sorted(to_read, key=lambda row: -row["share"])[:_READ],
        "gate": {"passed": not reasons, "reasons": reasons, "min_agreement": args.min_agreement},
    }


def of_all(journal: Journal, rows: list[dict[str, Any]], names: Sequence[str], args: Any) -> dict[str, Any]:
    """
    Describe the verdicts on those pairs whose questions all have an answer.

    Returns:
        - `pairs`: how many these pairs are.
        - `calls`: how many requests were sent.
        - `tokens_in`, `tokens_out`: tokens of requests and of answers, as the server counted them.
        - `money`: what the tokens cost; None without prices.
        - `model`: what the server called its model.
        - `outcomes`: "read", or why there is no verdict → how many questions ended so.
        - `by_name`: name → the share of `ties`, and how often the answer `shown_first` was preferred.
        - `longer`: how often the longer answer won.
    """
    found = [(row, votes_of(journal, row, args.votes)) for row in rows]
    found = [(row, votes) for row, votes in found if len(votes) == 2 * args.votes]
    asked = [vote for _, votes in found for vote in votes]
    prompt_of = dict(zip((row["key"] for row, _ in found), _prompts([row for row, _ in found]), strict=True))
    choices = {name: [choice_of(votes, name)[0] for _, votes in found] for name in names}
    shown = [row for row, _ in found]
    return {
        "pairs": len(found),
        "calls": sum(vote.get("asked", 0) for vote in asked),
        **spent(asked, args.price_input, args.price_output),
        "model": next(iter({vote["model"] for vote in asked if vote.get("model")}), None),
        "outcomes": dict(Counter(vote["why"] for vote in asked)),
        "by_name": {
            name: {
                "ties": choices[name].count("tie") / len(found) if found else None,
                "shown_first": shown_first(asked, name, prompt_of),
            }
            for name in names
        },
        "longer": longer_wins(choices[OVERALL], _lengths(shown), _prompts(shown)),
    }


def training_pairs(
    folder: Path,
    journal: Journal,
    known: list[dict[str, Any]],
    others: list[dict[str, Any]],
    people: dict[str, str],
    report: dict[str, Any],
    criteria: Criteria,
    args: Any,
) -> dict[str, Any]:
    """
    Write `pairs/train.jsonl`, labelled by the judge, and `pairs/test.jsonl`, labelled by people; they share no prompt.

    Args:
        folder: folder in which `pairs` is made.
        journal: the judge's verdicts.
        known: the pairs that people labelled.
        others: the pairs whose prompts people did not label.
        people: key of a pair → people's choice.
        report: the report so far, with `noise` and `judge`.
        criteria: what the judge judged by.
        args: arguments of `trl-ext label`.

    Returns:
        - `file`: path of the pairs to train on.
        - `train`, `test`: number of pairs in each file.
        - `confidence`: mean confidence in the labels of the pairs to train on.
        - `label_smoothing`: 1 − `confidence`.
        - `left_out`: reason → number of pairs.

    Raises:
        ValueError: no pair is left to train on.
    """
    left_out: Counter[str] = Counter()

    def of(row: dict[str, Any], choice: str) -> dict[str, Any]:
        winner, loser = ("response_a", "response_b") if choice == "a" else ("response_b", "response_a")
        of_policies = {
            f"{to}_{what}": row[f"{what}_{side[-1]}"]
            for what in ("policy", "temperature")
            for to, side in (("chosen", winner), ("rejected", loser))
            if f"{what}_a" in row
        }
        kept = {name: row[name] for name in args.keep_columns or ()}
        return {"prompt": row["prompt"], "chosen": row[winner], "rejected": row[loser], "item": row["item"],
                **of_policies, **kept}  # fmt: skip

    train = []
    for row in others:
        votes = votes_of(journal, row, args.votes)
        choice, share = choice_of(votes, OVERALL)
        if choice == "tie":
            left_out["without a verdict" if all(vote["why"] != "read" for vote in votes) else "a tie"] += 1
        else:
            by = {name: choice_of(votes, name)[0] for name in criteria.principles}
            winner = {"a": "chosen", "b": "rejected"} if choice == "a" else {"b": "chosen", "a": "rejected"}
            train.append(
                {
                    **of(row, choice),
                    "confidence": confidence(share, report["noise"]["shrink"]),
                    "share": share,
                    "votes": len(votes),
                    "principles": {name: winner.get(said, said) for name, said in by.items()},
                    "judge": next((vote["model"] for vote in votes if vote.get("model")), None) or report["judge"],
                    "rubric": criteria.rubric_id,
                    "constitution": criteria.constitution_id,
                }
            )
    if not train:
        raise ValueError(
            f"no pair is left to train on, of {len(others)} that people did not label (left out: "
            f"{report['left_out'] | left_out}): give more pairs"
        )
    test = [{**of(row, people[row["key"]]), "confidence": 1.0} for row in known if people[row["key"]] != "tie"]
    write_rows(folder / "pairs" / "train.jsonl", train)
    write_rows(folder / "pairs" / "test.jsonl", test)
    mean = sum(row["confidence"] for row in train) / len(train)
    return {
        "file": str(folder / "pairs" / "train.jsonl"),
        "train": len(train),
        "test": len(test),
        "confidence": mean,
        "label_smoothing": 1 - mean,
        "left_out": dict(left_out),
    }


def sentences(report: dict[str, Any]) -> list[str]:
    """Return a report's main figures as sentences for the terminal."""
    said = []
    if report["left_out"]:
        said.append(f"Left out: {', '.join(f'{count} pairs {why}' for why, count in report['left_out'].items())}")
    if by_name := report.get("by_name"):
        for name, of in reversed(by_name.items()):
            won = of["winners"]
            said.append(
                f"Judge and people, {name}: kappa {interval(of['kappa'], of['kappa_interval'])}, alpha "
                f"{interval(of['alpha'], of['alpha_interval'])}, {of['rows']} pairs; people chose "
                f"{percent(won['accuracy'])} of the judge's {won['winners']} winners"
            )
        lengths = report["length"]
        said += [
            f"The longer answer wins: by the judge {shares(lengths['judge'])}, by people {shares(lengths['people'])}"
        ]
    if judged := report.get("judged"):
        position = judged["by_name"][OVERALL]["shown_first"]
        bad = ", ".join(f"{count} {why}" for why, count in judged["outcomes"].items() if why != "read")
        cost = "" if judged["money"] is None else f", {judged['money']:,.2f} at these prices"
        said += [
            f"The judge chose the answer shown first in {shares(position)}; without a bias it would be 50 %",
            f"Asked: {judged['calls']:,} calls, {judged['tokens_in']:,} tokens in, {judged['tokens_out']:,} out{cost}",
            *([f"Without a verdict, counted as ties: {bad}"] if bad else []),
        ]
    if pairs := report["pairs"]:
        left = ", ".join(f"{count} {why}" for why, count in pairs["left_out"].items()) or "none"
        said.append(
            f"Pairs: {pairs['file']}, {pairs['train']:,} by the judge, mean confidence {pairs['confidence']:.3f} "
            f"(label_smoothing {pairs['label_smoothing']:.3f}); {pairs['test']:,} by people to test on; "
            f"left out: {left}"
        )
    return said


def interval(value: float | None, ends: list[float] | None) -> str:
    """Return a figure with its interval as text; "not defined" if the figure is None."""
    return with_interval(value, ends, ".2f", "not defined")


def shares(of: dict[str, Any]) -> str:
    """Return a share with its interval as text, in percent."""
    return with_interval(of["share"], of["interval"], ".0%")
