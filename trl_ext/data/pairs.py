"""Check that a model can learn from preference pairs."""

from datasets import Dataset

from .forms import one_form, say
from .texts import has_content, is_text


def usable_pairs(dataset: Dataset, name: str, drop: bool = False) -> Dataset:
    """Return the pairs that have a prompt and two different answers, in the form that [`one_form`] gives them.

    Args:
        dataset: rows with `chosen` and `rejected`, text or messages, and with `prompt` unless these contain it.
        name: what error messages call the dataset.
        drop: whether to leave out all other pairs, the unusable ones, and print how many there are.

    Raises:
        ValueError: some pairs are unusable and `drop` is False, or all pairs are unusable. The message says how many
            are, and in which rows. Or some pairs are text and others messages.
    """
    dataset = one_form(dataset, name)
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
    message = f"{name} has {len(pairs)} pairs, among them {', '.join(counts)}"
    if not drop or len(rows) == len(pairs):
        raise ValueError(f"{message}: correct them; `drop_unusable_pairs` leaves them out if other pairs remain")
    say(f"{message}: left out")
    return dataset.select([i for i in range(len(pairs)) if i not in rows])
