"""Gymnasium's FrozenLake as text: walk over slippery ice to the gift, by calls of `move`."""

import random
from collections import deque
from typing import Any

import gymnasium

DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
SLIPPERY = {"is_slippery": True, "success_rate": 0.8}  # the rest of the moves go to one side
MOVES = 12  # after which the ice breaks


class FrozenLake:
    """An episode is decided by its row's `seed`: the map and each slip."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Start on a map of `seed`, and return it."""
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        self._lake = gymnasium.make("FrozenLake-v1", desc=generate_random_map(4, p=0.8, seed=seed), **SLIPPERY).unwrapped
        self._place, _ = self._lake.reset(seed=seed)
        self._reward, self._moves, self._is_over = 0.0, 0, False
        return self._board()

    def move(self, direction: str) -> str:
        """
        Walk one step.

        Args:
            direction: left, down, right or up.

        Returns:
            The lake, or how it ended.
        """
        if self._is_over:
            return "It is over."
        if direction not in DIRECTIONS:
            raise ValueError("direction must be left, down, right or up")
        self._place, reward, ended, _, _ = self._lake.step(DIRECTIONS[direction])
        self._moves += 1
        self._place, self._reward = int(self._place), float(reward)
        self._is_over = ended or self._moves == MOVES
        if self._is_over:
            return "You have the gift." if reward else "You are lost."
        return self._board()

    def get_reward(self) -> float:
        """Return 1 for the gift."""
        return self._reward

    def _board(self) -> str:
        rows = ["".join(cell.decode() for cell in row) for row in self._lake.desc]
        row, column = divmod(self._place, 4)
        rows[row] = rows[row][:column] + "@" + rows[row][column + 1 :]
        return "\n".join(rows)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of a dataset, each with a lake of its own."""
    prompt = [{"role": "user", "content": "Walk to G. H is a hole, F is ice.\n"}]
    return [{"prompt": prompt, "seed": seed * 1_000_000 + number} for number in range(count)]


class Player:
    """
    Walk the shortest way around the holes.

    Args:
        slips: share of moves that are drawn at random.
        seed: of these.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips, self._random = slips, random.Random(seed)

    def __call__(self, said: str) -> tuple[str, dict[str, Any]] | str:
        """Return the next call to what the environment said last, or the last words."""
        if "@" not in said:
            return "Done."
        if self._random.random() < self.slips:
            return "move", {"direction": self._random.choice([*DIRECTIONS])}
        return "move", {"direction": _way(said.strip().splitlines()[-4:])}


def _way(board: list[str]) -> str:
    cells = {(r, c): cell for r, line in enumerate(board) for c, cell in enumerate(line)}
    start = next(place for place, cell in cells.items() if cell == "@")
    steps = {"down": (1, 0), "right": (0, 1), "left": (0, -1), "up": (-1, 0)}
    waiting, seen = deque([(start, "")]), {start}
    while waiting:
        (row, column), first = waiting.popleft()
        if cells[row, column] == "G":
            return first
        for name, (down, right) in steps.items():
            place = row + down, column + right
            if cells.get(place, "H") != "H" and place not in seen:
                seen.add(place)
                waiting.append((place, first or name))
    return "down"
