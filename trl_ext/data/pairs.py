"""Preference pairs from which nothing can be learnt."""

from datasets import Dataset

from .texts import has_content, is_text


def usable_pairs(dataset: Dataset, name: str, drop: bool = False) -> Dataset:
    """The pairs that teach something: prompt and both answers are there, and the answers differ.

    Args:
        dataset: rows with `chosen` and `rejected`, and with `prompt` if these do not contain it; text or messages.
        name: what messages call the dataset.
        drop: leave the other pairs out, and print how many.

    Raises:
        ValueError: there are other pairs and `drop` is not set, or nothing would be left; with the counts and rows.
    """
    pairs = list(zip(dataset["chosen"], dataset["rejected"], strict=True))
    wrong = {
        "without a chosen answer": [i for i, (chosen, _) in enumerate(pairs) if not has_content(chosen)],
        "without a rejected answer": [i for i, (_, rejected) in enumerate(pairs) if not has_content(rejected)],
        "with identical answers": [i for i, (a, b) in enumerate(pairs) if has_content(a) and a == b],
    }
    if "prompt" in dataset.column_names:
        wrong["without a prompt"] = [i for i, prompt in enumerate(dataset["prompt"]) if not is_text(prompt)]
    rows = {row for indices in wrong.values() for row in indices}
    if not rows:
        return dataset
    counts = [f"{len(i)} {what} (rows {str(i[:5])[1:-1]}{', …' * (len(i) > 5)})" for what, i in wrong.items() if i]
    message = f"{name} has {len(pairs)} pairs, of them {', '.join(counts)}"
    if not drop or len(rows) == len(pairs):
        raise ValueError(f"{message}: correct them, or leave them out with `drop_unusable_pairs`")
    print(f"{message}: left out")
    return dataset.select([i for i in range(len(pairs)) if i not in rows])
