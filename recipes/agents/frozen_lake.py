"""Play Gymnasium's FrozenLake as text: walk over slippery ice to the gift, by calls of `move`."""

import random
import re
from typing import Any

import gymnasium  # pip install -e '.[agents]'

DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
SLIPPERY = {"is_slippery": True, "success_rate": 0.8}  # the rest of the moves go to one side
MISTAKES = 0.6  # `slips` of the player that SFT imitates
MOVES = 16  # after which the ice breaks
WAY = [  # of the player, around the holes
    ["down", "right", "down", "left"],
    ["down", "down", "down", "down"],
    ["right", "down", "down", "down"],
    ["right", "right", "right", "right"],
]


class Environment:
    """Let the model walk over the ice. A row's `seed` decides each slip of an episode."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Start an episode at the shore; `seed` decides each slip."""
        self._lake = gymnasium.make("FrozenLake-v1", map_name="4x4", **SLIPPERY).unwrapped
        self._place, _ = self._lake.reset(seed=seed)
        self._reward = 0.0
        self._moves = 0
        self._is_over = False
        return self._where()

    def move(self, direction: str) -> str:
        """
        Walk one step.

        Args:
            direction: left, down, right or up.

        Returns:
            The lake, or how it ended.
        """
        if self._is_over:
            self._reward = 0.0  # else nothing tells the model to stop
            return "It is over."
        if direction not in DIRECTIONS:
            raise ValueError("direction must be left, down, right or up")
        self._place, reward, ended, _, _ = self._lake.step(DIRECTIONS[direction])
        self._moves += 1
        self._place = int(self._place)
        self._reward = float(reward)
        self._is_over = ended or self._moves == MOVES
        if self._is_over:
            return "You have the gift." if reward else "You are lost."
        return self._where()

    def get_reward(self) -> float:
        """Return 1 if the gift was reached and no tool was called afterwards, else 0."""
        return self._reward

    def _where(self) -> str:
        row, column = divmod(self._place, 4)
        return f"row {row + 1} column {column + 1}"


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of a dataset, each with another seed for the slips."""
    prompt = [{"role": "user", "content": "Walk from row 1 column 1 to row 4 column 4. "}]
    return [{"prompt": prompt, "seed": seed * 1_000_000 + number} for number in range(count)]


class Player:
    """
    Walk the shortest way around the holes.

    Args:
        slips: share of moves that are mistakes. A mistake goes right, or down in the last column, even into a hole.
        seed: decides which moves are mistakes.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips = slips
        self._random = random.Random(seed)

    def __call__(self, said: str) -> tuple[str, dict[str, Any]] | str:
        """Reply to the environment's last message with the next tool call, or with the final answer."""
        place = re.search(r"row (\d) column (\d)", said)
        if not place:
            return "Done."
        row = int(place[1])
        column = int(place[2])
        if self._random.random() < self.slips:
            return "move", {"direction": "right" if column < 4 else "down"}
        return "move", {"direction": WAY[row - 1][column - 1]}
