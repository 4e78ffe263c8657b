"""Answer how warm it is in a city on a day, from a table that only a tool can read."""

import random
import re
import zlib
from typing import Any

CITIES = ["Accra", "Bern", "Cairo", "Dakar", "Kyoto", "Lima", "Minsk", "Oslo", "Quito"]
DAYS = 20
MISTAKES = 0.6  # `slips` of the player that SFT imitates
EPISODES = 3000
SPLIT = r"\n|(?<=: )"  # a city and a day are never one token
Environment = None  # nothing changes between calls: a function is enough


def temperature(city: str, day: int) -> int:
    """
    Look up how warm it is.

    Args:
        city: name of a city.
        day: 1 to 20.

    Returns:
        Degrees.
    """
    if city not in CITIES or not 1 <= day <= DAYS:
        raise ValueError("there is no such city or day in the table")
    return 10 + zlib.crc32(f"{city} {day}".encode()) % 20


TOOLS = [temperature]


def correct(completions: list, city: list[str], day: list[int], **_: Any) -> list[float]:
    """Return 1 for each answer that is the right number, else 0."""
    return [
        float(str(answer[-1]["content"]).strip() == str(temperature(*place)))
        for answer, *place in zip(completions, city, day, strict=True)
    ]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """
    Return rows of a dataset, each with a question.

    A tenth of the pairs of city and day is held out for `seed=1`, so that a memorised answer cannot be right.
    """
    generator = random.Random(seed)
    result = []
    while len(result) < count:
        city = generator.choice(CITIES)
        day = generator.randint(1, DAYS)
        if (zlib.crc32(f"{day} {city}".encode()) % 10 == 0) == (seed == 1):
            prompt = [{"role": "user", "content": f"How warm is it in\n{city}\non day {day}"}]
            result.append({"prompt": prompt, "city": city, "day": day})
    return result


class Player:
    """
    Look up the temperature that is asked for, and answer.

    Args:
        slips: share of calls that are mistakes: they ask for the day after.
        seed: decides which calls are mistakes.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips = slips
        self._random = random.Random(seed)

    def __call__(self, said: str) -> tuple[str, dict[str, Any]] | str:
        """Reply to the last message with the next tool call, or with the final answer."""
        asked = re.search(r"in\n(\w+)\non day (\d+)", said)
        if not asked:
            return said
        day = int(asked[2])
        if self._random.random() < self.slips:
            day = day % DAYS + 1
        return "temperature", {"city": asked[1], "day": day}
