"""Spell words backward: tasks of reasoning-gym, answered in one turn and scored by reasoning-gym's checker."""

import itertools
import json
import random
import zlib
from typing import Any

import reasoning_gym  # pip install -e '.[agents]'

TASK: dict[str, Any] = {"name": "spell_backward", "min_word_len": 3, "max_word_len": 3}
MISTAKES = 0.6  # `slips` of the player that SFT imitates
EPISODES = 20000  # they are short
VOCABULARY = 300  # tokens: letters, so that a word that was not seen can be spelled
Environment = None  # nothing is called

_tasks = reasoning_gym.create_dataset(**TASK, size=1, seed=0)


def correct(completions: list, entry: list[str], **_: Any) -> list[float]:
    """Return 1 for each answer that gets the full score of reasoning-gym's checker, else 0."""
    answers = [completion[-1]["content"].strip() for completion in completions]
    return [
        float(_tasks.score_answer(answer, json.loads(task)) == 1) for answer, task in zip(answers, entry, strict=True)
    ]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """
    Return rows of a dataset, each with a task and the data for its checker.

    A tenth of the words is held out: only `seed=1`, the evaluation set, uses them.
    """
    tasks = reasoning_gym.create_dataset(**TASK, size=20 * count, seed=seed)
    kept = (task for task in tasks if (zlib.crc32(task["answer"].encode()) % 10 == 0) == (seed == 1))
    return [
        {"prompt": [{"role": "user", "content": task["question"]}], "entry": json.dumps(task)}
        for task in itertools.islice(kept, count)
    ]


class Player:
    """
    Spell a word backward.

    Args:
        slips: share of words that are spelled forward, by mistake.
        seed: decides which words these are.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips = slips
        self._random = random.Random(seed)

    def __call__(self, said: str) -> str:
        """Return the answer to a question."""
        word = said.split()[-1]
        return word if self._random.random() < self.slips else word[::-1]
