"""Play textarena's Nim against a scripted opponent: whoever takes the last object wins."""

import random
import re
from typing import Any

import textarena  # pip install -e '.[agents]'

MISTAKES = 0.6  # `slips` of the player that SFT imitates
BLUNDERS = 0.3  # share of the opponent's moves that are random
HIGHEST = 3  # objects in a pile
PILES = 3
EPISODES = 4000


def winning_moves(piles: list[int]) -> list[tuple[int, int]]:
    """
    Return the moves (pile, count) after which the XOR of the piles is 0; there are none if it is 0 before the move.
    """
    total = 0
    for pile in piles:
        total ^= pile
    return [(number, pile - (pile ^ total)) for number, pile in enumerate(piles) if pile ^ total < pile]


def choose(piles: list[int], blunders: float, generator: random.Random) -> tuple[int, int]:
    """Return a winning move, or with probability `blunders`, and where no move wins, a random move."""
    good = winning_moves(piles)
    if good and generator.random() >= blunders:
        return generator.choice(good)
    return generator.choice([(number, count + 1) for number, pile in enumerate(piles) for count in range(pile)])


def piles_in(text: str) -> list[int]:
    """Read the sizes of the piles from the text of a board."""
    return [int(pile) for pile in re.findall(r"pile \d: (\d+)", text)]


class Environment:
    """
    Let the model move first. A row's `piles` start an episode, and its `seed` decides the opponent's random moves.
    """

    def reset(self, piles: list[int], seed: int = 0, **row: Any) -> str:
        """Start an episode with these piles."""
        self._game = textarena.make("Nim-v0-raw", piles=piles)
        self._game.reset(num_players=2)  # a seed would go to Python's global generator
        self._random = random.Random(seed)
        self._reward = 0.0
        self._is_over = False
        return self._board()

    def take(self, pile: int, count: int) -> str:
        """
        Take objects from a pile.

        Args:
            pile: 0, 1 or 2.
            count: 1 or more.

        Returns:
            The piles after the opponent has moved, too, or how it ended.
        """
        if self._is_over:
            self._reward = 0.0  # else nothing tells the model to stop
            return "It is over."
        turn = self._game.state.turn
        self._step(int(pile), int(count))
        if self._is_over:
            return "You won." if self._reward else "You lost."
        if self._game.state.turn == turn:
            return f"Not allowed. {self._board()}"
        self._step(*choose(piles_in(self._board()), BLUNDERS, self._random))
        return "You lost." if self._is_over else self._board()

    def get_reward(self) -> float:
        """Return 1 if the game was won and no tool was called afterwards, else 0."""
        return self._reward

    def _step(self, pile: int, count: int) -> None:
        self._is_over, _ = self._game.step(f"[{pile} {count}]")
        if self._is_over:
            rewards, _ = self._game.close()
            self._reward = float(rewards[0] == 1)

    def _board(self) -> str:
        _, messages = self._game.get_observation()
        boards = [text for _, text, kind in messages if kind == textarena.ObservationType.GAME_BOARD]
        return " ".join(boards[-1].split()[2:])  # without its title


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of a dataset; each is a position that can be won."""
    generator = random.Random(seed)
    result = []
    prompt = [{"role": "user", "content": "Take the last object.\n"}]
    while len(result) < count:
        piles = [generator.randint(0, HIGHEST) for _ in range(PILES)]
        if winning_moves(piles):
            result.append({"prompt": prompt, "piles": piles, "seed": seed * 1_000_000 + len(result)})
    return result


class Player:
    """
    Win each position that can be won.

    Args:
        slips: share of moves that are mistakes: they take the whole first pile that is not empty.
        seed: decides which moves are mistakes.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips = slips
        self._random = random.Random(seed)

    def __call__(self, said: str) -> tuple[str, dict[str, Any]] | str:
        """Reply to the environment's last message with the next tool call, or with the final answer."""
        piles = piles_in(said)
        if not piles:
            return "Done."
        pile, count = choose(piles, 0.0, self._random)
        if self._random.random() < self.slips:
            pile, count = next((number, count) for number, count in enumerate(piles) if count)
        return "take", {"pile": pile, "count": count}
