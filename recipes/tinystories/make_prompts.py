"""Write prompts/train.jsonl and prompts/test.jsonl: openings of short stories from a small grammar.

    python recipes/tinystories/make_prompts.py

Test openings use people, animals and things that no training opening has.
"""

import json
import random
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).parent / "prompts"
SIZES = {"train": 512, "test": 96}

WORDS = {
    "train": {
        "girl": ["Lily", "Sue", "Anna", "Mia", "Lucy", "Sara", "Jane", "Amy"],
        "boy": ["Tim", "Ben", "Tom", "Max", "Sam", "Jack", "Bob", "Billy"],
        "animal": ["cat", "dog", "bird", "bear", "bunny", "fish", "frog", "mouse"],
        "thing": ["ball", "doll", "car", "hat", "book", "box", "kite", "cake"],
        "place": ["park", "forest", "garden", "store", "house", "beach"],
        "mood": ["little", "big", "sad", "brave", "kind", "small"],
    },
    "test": {
        "girl": ["Emma", "Kate", "Daisy", "Molly"],
        "boy": ["Leo", "Mark", "Joe", "Timmy"],
        "animal": ["fox", "duck", "turtle", "lion"],
        "thing": ["toy", "bike", "boat", "flower"],
        "place": ["park", "forest", "garden", "store", "house", "beach"],
        "mood": ["little", "big", "sad", "brave", "kind", "small"],
    },
}

OPENINGS = [
    "Once upon a time, there was a little girl named {girl}. She",
    "Once upon a time, there was a little boy named {boy}. He",
    "Once upon a time, there was a {mood} {animal} who lived in the {place}. The {animal}",
    "Once upon a time, there was a girl named {girl}. She had a {mood} {animal}. One day, {girl}",
    "One day, {girl} and {boy} went to the {place}. They",
    "One day, {boy} saw a {mood} {animal} in the {place}. {boy}",
    "{girl} had a new {thing}. One day, she",
    "{boy} was sad because he lost his {thing}. He",
    "{girl} wanted to play with the {thing}, but her mom said no. {girl}",
    "The {animal} was scared. It was alone in the {place}. Then",
]


def openings(words: dict[str, list[str]], size: int) -> list[str]:
    """Return `size` distinct openings, spread over the ten patterns as evenly as the patterns' variants allow."""
    rng = random.Random(0)
    pools = []
    for opening in OPENINGS:
        slots = [slot for slot in words if f"{{{slot}}}" in opening]
        pool = [
            opening.format(**dict(zip(slots, chosen, strict=True)))
            for chosen in product(*(words[slot] for slot in slots))
        ]
        pools.append(rng.sample(pool, len(pool)))
    rounds = (pool[turn] for turn in range(max(map(len, pools))) for pool in pools if turn < len(pool))
    chosen = [prompt for prompt, _ in zip(rounds, range(size), strict=False)]
    return rng.sample(chosen, len(chosen))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for split, size in SIZES.items():
        rows = openings(WORDS[split], size)
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows)
        (FOLDER / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
