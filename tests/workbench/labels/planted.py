"""Labels of simulated annotators, with the behaviour of each and the better answer of each pair.

Twenty people label pairs of answers; one answer of each pair is better. Most people are right in about 80 %. One or
two are of each other kind: some choose at random, some are lazy and always choose the answer that is shown first,
some are wrong as often as the others are right. Three people label each pair, each in a random order.
"""

import numpy as np
import pandas as pd
from datasets import Dataset

KINDS = ("good", "random", "lazy", "adversarial")


def planted(labels_each, seed, accuracy=0.8, people=20, off=1, per_item=3):
    """A long table, each annotator's kind, and the better answer of each item: 0 is `x`, 1 is `y`."""
    generator = np.random.default_rng(seed)
    kinds = np.array([kind for kind in KINDS[1:] for _ in range(off)] + ["good"] * (people - 3 * off))
    right = np.clip(generator.normal(accuracy, 0.04, people), 0.5, 0.99)
    right = np.select([kinds == "random", kinds == "adversarial"], [0.5, 1 - right], right)
    items = people * labels_each // per_item
    # Each item goes to three different people, by dealing shuffled decks one after the other
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
        }
    )
    return Dataset.from_pandas(table, preserve_index=False), {f"annotator {i}": k for i, k in enumerate(kinds)}, better
