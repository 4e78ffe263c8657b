"""How well and how fast duplicates of prompts are found: planted edits by their real similarity, seconds and memory.

    python -m tests.benchmarks.prompts --pairs 20000
    python -m tests.benchmarks.prompts --rows 1000000

The first plants pairs of prompts, of which one is edited, among as many others, and prints which share was found by
the similarity that the two really have, and what a few edits do to it. The second makes so many prompts of 100 words
in the mean, a fifth of them copies with or without edits, writes them as JSONL, and runs `trl-ext prompts` on them.
`--template 40` begins each prompt with the same 40 words.
"""

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trl_ext import StrictTrlParser
from trl_ext.evaluation import find_duplicates, similarity_of

BOUNDS = (0.0, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0)
SETTINGS = (("words", 3, 0.7), ("characters", 5, 0.7))


@dataclass
class BenchmarkArguments:
    """What is measured."""

    pairs: int = field(default=0, metadata={"help": "Planted pairs."})
    rows: int = field(default=0, metadata={"help": "Prompts to run the command on."})
    words: int = field(default=100, metadata={"help": "Words of a prompt in `rows`, in the mean."})
    template: int = field(default=0, metadata={"help": "Words that all prompts in `rows` begin with."})
    seed: int = field(default=0, metadata={"help": "Of the prompts."})


class Writer:
    """Prompts of made-up words, frequent and rare."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.words = ["".join(self.draw.choices("abcdefghijklmnop", k=self.draw.randint(2, 9))) for _ in range(30_000)]
        self.weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(self.words))))

    def prompt(self, words: int) -> str:
        return " ".join(self.draw.choices(self.words, cum_weights=self.weights, k=words))

    def edited(self, prompt: str, edits: int) -> str:
        """Some words replaced by others."""
        words = prompt.split()
        for place in self.draw.sample(range(len(words)), edits):
            words[place] = self.draw.choice(self.words)
        return " ".join(words)

    def prompts(self, rows: int, words: int, template: int = 0) -> Iterator[str]:
        """Some 100 words in the mean; a tenth copies in capitals, a tenth with one word in 50 replaced."""
        shared = self.prompt(template) + " " if template else ""
        earlier: list[str] = []
        for _ in range(rows):
            turn = self.draw.random()
            if earlier and turn < 0.1:
                yield self.draw.choice(earlier).upper()
            elif earlier and turn < 0.2:
                old = self.draw.choice(earlier)
                yield self.edited(old, max(1, len(old.split()) // 50))
            else:
                made = shared + self.prompt(max(3, int(self.draw.lognormvariate(0, 0.6) * words / 1.2)))
                yield made
                if len(earlier) < 10_000:
                    earlier.append(made)
                else:
                    earlier[self.draw.randrange(len(earlier))] = made


def recall(pairs: int, seed: int, unit: str, n: int, threshold: float) -> dict[tuple[float, float], tuple[int, int]]:
    """(least, most) similarity → (planted pairs, found ones)."""
    writer = Writer(seed)
    planted = []
    for _ in range(pairs):
        words = writer.draw.choice((15, 30, 100))
        first = writer.prompt(words)
        planted.append((first, writer.edited(first, writer.draw.randrange(words // 6 + 2))))
    others = [writer.prompt(writer.draw.choice((15, 30, 100))) for _ in range(pairs)]
    near = find_duplicates([text for pair in planted for text in pair] + others, threshold, unit, n, seed=seed).near
    table = dict.fromkeys(itertools.pairwise(BOUNDS), (0, 0))
    for i, pair in enumerate(planted):
        similarity = similarity_of(*pair, unit, n)
        bounds = next(each for each in reversed(table) if similarity >= each[0])
        count, found = table[bounds]
        table[bounds] = count + 1, found + int(near[2 * i] == near[2 * i + 1])
    return table


def show_recall(pairs: int, seed: int) -> None:
    tables = [recall(pairs, seed, *setting) for setting in SETTINGS]
    heads = [f"{n}-grams of {unit}, {threshold:g}" for unit, n, threshold in SETTINGS]
    print(f"| similarity | {' | '.join(f'{head}: pairs | found' for head in heads)} |")
    print("|---|" + "---|---|" * len(heads))
    for bounds in itertools.pairwise(BOUNDS):
        cells = [
            f"{count} | {found / count:.4f}" if count else "0 | –" for count, found in (t[bounds] for t in tables)
        ]
        print(f"| {bounds[0]:g}–{bounds[1]:g} | {' | '.join(cells)} |")


def show_edits(seed: int) -> None:
    writer = Writer(seed)
    print("\n| words | replaced | " + " | ".join(f"{n}-grams of {unit}" for unit, n, _ in SETTINGS) + " |")
    print("|---|---|---|---|")
    for words, edits in ((10, 1), (20, 1), (20, 2), (50, 1), (50, 5), (100, 2), (100, 10)):
        made = [writer.prompt(words) for _ in range(200)]
        cells = []
        for unit, n, _ in SETTINGS:
            similarities = [similarity_of(text, writer.edited(text, edits), unit, n) for text in made]
            cells.append(f"{sum(similarities) / len(similarities):.2f}")
        print(f"| {words} | {edits} | {' | '.join(cells)} |")


def measure(args: BenchmarkArguments) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "prompts.jsonl").open("w") as file:
            for row, text in enumerate(Writer(args.seed).prompts(args.rows, args.words, args.template)):
                file.write(json.dumps({"prompt": text, "topic": f"topic {row % 8}"}) + "\n")
        size = (folder / "prompts.jsonl").stat().st_size
        command = "-m trl_ext prompts --sets rl=prompts.jsonl --output_dir out --split train=0.99 test=0.01".split()
        begin = time.perf_counter()
        path = {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_DATASETS_CACHE": str(folder / "cache")}
        subprocess.run(
            [sys.executable, *command, "--stratify", "topic"], cwd=folder, check=True, env={**os.environ, **path}
        )
        wall = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{args.rows:,} prompts, {size / 2**20:.0f} MiB: {wall:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU-seconds"
        f", peak {used.ru_maxrss / 2**10:.0f} MiB with what is mapped from files"
    )


def main(arguments: list[str] | None = None) -> None:
    (args,) = StrictTrlParser(BenchmarkArguments, without_arguments=__doc__).parse_args_and_config(arguments)
    if args.pairs:
        show_recall(args.pairs, args.seed)
        show_edits(args.seed)
    if args.rows:
        measure(args)


if __name__ == "__main__":
    main()
