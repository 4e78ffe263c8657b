"""Labels of planted annotators: it is known how each of them labels, and which answer is better.

Twenty people label pairs of answers; one answer of each pair is better. Most people are right with a probability
around 80 % (or 70 %). Of each other kind there are one or two: some toss a coin, some are lazy and always take the
answer that is shown first, some are wrong as often as the others are right. Three people label each pair, each in a
random order.
"""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pandas as pd
from datasets import Dataset

from trl_ext.workbench.labels import (
    Columns,
    read_labels,
    shares_of_labels,
    zscores,
)

KINDS = ("good", "random", "lazy", "adversarial")
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
