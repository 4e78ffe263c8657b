"""How surely `trl_ext.workbench.labels` finds annotators that were planted, and what their labels then come to.

    python -m tests.benchmarks.annotators                   # the tables of docs/annotators.md
    python -m tests.benchmarks.annotators --rankings        # that of rankings alone
    python -m tests.benchmarks.annotators --write labels.parquet --rows 1000000 # one planted table
    python -m tests.benchmarks.annotators --table labels.parquet                # time and memory of its report

Twenty people label pairs of which one answer is better. Most are right with a probability around 80 % (or 70 %). One,
or two, of each kind toss a coin, are lazy and always take the answer shown first, or are wrong as often as the others
are right. Each pair goes to three people, each time in a random order.
"""

import argparse
import resource
import tempfile
import time
from contextlib import suppress
from itertools import combinations

import numpy as np
import pandas as pd
from datasets import Dataset

from trl_ext.workbench.labels import (
    SECOND,
    Columns,
    agreement_report,
    hold_out_annotators,
    majority_pairs,
    read_labels,
    shares_of_labels,
    zscores,
)
from trl_ext.workbench.labels.agreement import per_annotator

KINDS = ("good", "random", "lazy", "adversarial")
BOUNDS = (-2.0, -3.0)
COLUMNS = Columns(item="item", seconds="seconds", time="time")


def planted(labels_each, seed, accuracy=0.8, people=20, off=1, per_item=3):
    """A long table, what kind each annotator is, and which answer is better in each item: 0 is `x`, 1 is `y`."""
    generator = np.random.default_rng(seed)
    kinds = np.array([kind for kind in KINDS[1:] for _ in range(off)] + ["good"] * (people - 3 * off))
    right = np.clip(generator.normal(accuracy, 0.04, people), 0.5, 0.99)
    right = np.select([kinds == "random", kinds == "adversarial"], [0.5, 1 - right], right)
    items = people * labels_each // per_item
    # Each item to three people who differ: of as many decks, each shuffled, one after the other
    decks = np.argsort(generator.random((-(-items * per_item // people), people)), axis=1)
    who = decks.reshape(-1)[: items * per_item]
    item = np.arange(items * per_item) // per_item
    better = generator.integers(0, 2, items)
    chosen = np.where(generator.random(len(who)) < right[who], better[item], 1 - better[item])
    swapped = generator.integers(0, 2, len(who))
    chosen = np.where(kinds[who] == "lazy", swapped, chosen)
    texts = {name: np.char.add(f"answer {name} of item ", item.astype(str)) for name in "xy"}
    table = pd.DataFrame(
        {
            "item": item,
            "prompt": np.char.add("prompt ", item.astype(str)),
            "response_a": np.where(swapped, texts["y"], texts["x"]),
            "response_b": np.where(swapped, texts["x"], texts["y"]),
            "annotator": np.char.add("annotator ", who.astype(str)),
            "choice": np.where(chosen == swapped, "a", "b"),
            "time": np.arange(len(who)),
            "seconds": np.where(kinds[who] == "lazy", 4.0, generator.gamma(4.0, 8.0, len(who))),
        }
    )
    return Dataset.from_pandas(table, preserve_index=False), {f"annotator {i}": k for i, k in enumerate(kinds)}, better


def planted_rankings(seed, per=3, off=1, in_pairs=False, prompts=400, people=20, answers=4):
    """
    A table of rankings of four answers, or of each pair of them by other people, how its columns are called, and how
    good each answer is. Who is good ranks by quality with a spread of 1.5, and noise under which Bradley and Terry's
    model holds; some rank at random, and as many by the opposite of quality.
    """
    generator = np.random.default_rng(seed)
    sign = np.array([0, -1] * off + [1] * (people - 2 * off))
    quality = generator.normal(size=(prompts, answers)) * 1.5
    sets = [*combinations(range(answers), 2)] if in_pairs else [tuple(range(answers))]
    rows = []
    for prompt in range(prompts):
        for shown in sets:
            for who in generator.permutation(people)[:per]:
                scores = sign[who] * quality[prompt, [*shown]] + generator.gumbel(size=len(shown))
                row = {"prompt": f"prompt {prompt}", "annotator": f"annotator {who}"}
                for place, (answer, score) in enumerate(zip(shown, scores, strict=True)):
                    row |= {f"answer_{place}": f"{answer} of {prompt}", f"score_{place}": score}
                rows.append(row)
    names = [tuple(f"{what}_{place}" for place in range(len(sets[0]))) for what in ("answer", "score")]
    return Dataset.from_list(rows), Columns(responses=names[0], scores=names[1]), quality


def ranked_outcome(seeds, **how):
    """For each way to make pairs: shares of items that become right pairs, and wrong ones, and the mean confidence."""
    shares = {}
    for seed in range(seeds):
        table, columns, quality = planted_rankings(seed, **how)
        labels = read_labels(table, columns)
        kept = labels.where(~(zscores(labels) < -3)[labels.annotator])
        texts = np.stack([table[name][:] for name in columns.responses], 1).ravel()
        of_answer = np.array([quality[int(text.split()[2]), int(text.split()[0])] for text in texts])[labels.answers]
        ways = {"majority": (labels, "majority"), "majority, z < −3 left out": (kept, "majority")}
        ways |= {"Dawid–Skene": (labels, "dawid_skene"), "noisy Bradley–Terry": (labels, "noisy_bt")}
        for name, (given, method) in ways.items():
            with suppress(ValueError):  # too few labels
                share = shares_of_labels(given, method)
                is_pair = (share[:, :2].max(1) >= 0.6) & (share[:, 0] != share[:, 1])
                is_right = (share[:, 0] > share[:, 1]) == (of_answer[:, 0] > of_answer[:, 1])
                found = (is_pair & is_right).mean(), (is_pair & ~is_right).mean(), share[is_pair].max(1).mean()
                shares.setdefault(name, []).append(found)
    return {name: np.mean(values, axis=0) for name, values in shares.items()}


def found(labels_each, seeds, accuracy, off):
    """For each bound and kind, the share of annotators with a z-score below it; and of whom a lean is found."""
    shares = {(bound, kind): [] for bound in (*BOUNDS, "lean") for kind in KINDS}
    for seed in range(seeds):
        table, kinds, _ = planted(labels_each, seed, accuracy, off=off)
        labels = read_labels(table, COLUMNS)
        for row in per_annotator(labels, labels.counts()):
            kind = kinds[row["annotator"]]
            for bound in BOUNDS:
                shares[bound, kind].append(row["z"] < bound)
            shares["lean", kind].append(abs(row["lean_z"] or 0) > 4)
    return {key: float(np.mean(values)) for key, values in shares.items()}


def outcome(labels_each, seeds, accuracy, off):
    """For each way to make pairs, the share of all items that become a right pair, and a wrong one."""
    shares = {}
    for seed in range(seeds):
        table, _, better = planted(labels_each, seed, accuracy, off=off)
        labels = read_labels(table, COLUMNS)
        kept = labels.where(~(zscores(labels) < -3)[labels.annotator])
        first_is_x = np.array([row.startswith("answer x") for row in table.select(labels.rows)["response_a"]])
        truth = np.where(first_is_x, better, 1 - better)  # in the order of the item's first row
        ways = {"majority": (labels, "majority"), "majority, z < −3 left out": (kept, "majority")}
        ways |= {"Dawid–Skene": (labels, "dawid_skene"), "MACE": (labels, "mace")}
        for name, (given, method) in ways.items():
            share = shares_of_labels(given, method)
            is_pair = (share[:, :2].max(1) >= 0.6) & (share[:, 0] != share[:, 1])
            is_right = (share[:, SECOND] > share[:, 0]) == (truth == 1)
            shares.setdefault(name, []).append([(is_pair & is_right).mean(), (is_pair & ~is_right).mean()])
    return {name: np.mean(values, axis=0) for name, values in shares.items()}


def measure(path):
    """CPU time and memory of the report on one table, and of pairs."""
    with tempfile.TemporaryDirectory() as folder:
        table = Dataset.from_parquet(path, cache_dir=folder)
        print(f"{len(table):,} labels: {_peak():.2f} GiB at most before anything is read", flush=True)
        began = time.process_time()
        labels = read_labels(table, COLUMNS)
        print(f"read: {time.process_time() - began:.1f} s, {_peak():.2f} GiB at most", flush=True)
        began = time.process_time()
        agreement_report(labels)
        print(f"report: {time.process_time() - began:.1f} s, {_peak():.2f} GiB at most", flush=True)
        began = time.process_time()
        parts = hold_out_annotators(labels)
        number = sum(1 for part in parts for _ in majority_pairs(table, part, COLUMNS))
        print(f"{number:,} pairs: {time.process_time() - began:.1f} s, {_peak():.2f} GiB at most", flush=True)


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def show_rankings(seeds):
    print("| four answers, compared | by | of each kind | way | right pairs | wrong pairs | confidence |")
    print("|---|---|---|---|---|---|---|")
    for in_pairs, per, off in ((False, 3, 1), (False, 3, 3), (True, 1, 1), (True, 3, 1), (True, 3, 3)):
        for name, (right, wrong, sure) in ranked_outcome(seeds, in_pairs=in_pairs, per=per, off=off).items():
            how = "two at a time" if in_pairs else "in one ranking"
            print(f"| {how} | {per} | {off} | {name} | {right:.1%} | {wrong:.1%} | {sure:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="PARQUET", help="write one planted table there instead")
    parser.add_argument("--rows", type=int, default=2000, help="of that table")
    parser.add_argument("--table", metavar="PARQUET", help="measure the report on such a table instead")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--rankings", action="store_true", help="print the table of rankings alone")
    args = parser.parse_args()
    if args.table:
        return measure(args.table)
    if args.write:
        people = 20 if args.rows < 100_000 else 200
        planted(args.rows // people, seed=0, people=people)[0].to_parquet(args.write)
        return None
    show_rankings(min(args.seeds, 5))
    if args.rankings:
        return None
    print("\n| right | of each kind | labels each | random | lazy | adversarial | good | lazy, lean | good, lean |")
    print("|---|---|---|---|---|---|---|---|---|")
    for accuracy, off in ((0.8, 1), (0.8, 2), (0.7, 1)):
        for each in (10, 20, 50, 100, 200, 400):
            shares = found(each, args.seeds, accuracy, off)
            cells = [f"{shares[-2.0, kind]:.0%} / {shares[-3.0, kind]:.0%}" for kind in KINDS[1:]]
            cells += [f"{shares[-2.0, 'good']:.1%} / {shares[-3.0, 'good']:.1%}"]
            cells += [f"{shares['lean', 'lazy']:.0%}", f"{shares['lean', 'good']:.1%}"]
            print(f"| {accuracy:.0%} | {off} | {each} | {' | '.join(cells)} |", flush=True)
    print("\n| right | of each kind | labels each | way | right pairs | wrong pairs |\n|---|---|---|---|---|---|")
    for accuracy, off, each in ((0.8, 1, 50), (0.8, 2, 200), (0.7, 1, 200)):
        for name, (right, wrong) in outcome(each, min(args.seeds, 5), accuracy, off).items():
            print(f"| {accuracy:.0%} | {off} | {each} | {name} | {right:.1%} | {wrong:.1%} |", flush=True)
    return None


if __name__ == "__main__":
    main()
