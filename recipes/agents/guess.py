"""Guess a number that an OpenEnv server knows: the server is another process, its client is the environment."""

import atexit
import os
import random
import re
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from openenv.core import GenericEnvClient  # pip install -e '.[agents]'

MISTAKES = 0.6  # `slips` of the player that SFT imitates
HIGHEST = 15
GUESSES = 4  # as many as halving takes
SECONDS = 20.0  # for an answer of the server
SESSIONS = 4096  # at least one for each environment of a run, those of evaluations included


class Server:
    """Run the server in a separate process, which ends when this one does."""

    def __init__(self) -> None:
        # The server ends when its standard input ends, so also if this process is killed
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.stop)
        self.url = self.process.stdout.readline().strip()  # type: ignore[union-attr]
        if not self.url:
            raise RuntimeError(f"the OpenEnv server ended with status {self.process.wait()}: see its message above")

    def stop(self) -> None:
        """End the server's process."""
        self.process.kill()
        self.process.wait()


class Environment:
    """
    Pass guesses to the server at `OPENENV_URL`, or to a server that the first environment starts.

    A row's `seed` decides which number is to be guessed.
    """

    _server: Server | None = None  # of all environments of this process

    def __init__(self) -> None:
        if "OPENENV_URL" not in os.environ and Environment._server is None:
            Environment._server = Server()
        self._url = os.environ.get("OPENENV_URL") or Environment._server.url  # type: ignore[union-attr]
        client = GenericEnvClient(self._url, connect_timeout_s=SECONDS, message_timeout_s=SECONDS)
        self._client = client.sync()
        self._lost = ""

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Start an episode, in which the server chooses a number."""
        self._reward = 0.0
        return self._ask(self._client.reset, seed=seed)

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: 1 to 15.

        Returns:
            Between which numbers it is, or how it ended.
        """
        return self._ask(self._client.step, {"number": int(number)})

    def get_reward(self) -> float:
        """
        Return 1 if the number was found and no tool was called afterwards, else 0.

        Raises:
            RewardFailed: the server did not answer.
        """
        if self._lost:
            from trl_ext.rewards import RewardFailed  # the server, which is this file too, need not wait for it

            raise RewardFailed(self._lost)  # it ends the run in one sentence
        return self._reward

    def _ask(self, method: Any, *action: Any, **settings: Any) -> str:
        try:
            answer = method(*action, **settings)
        except Exception as error:
            if isinstance(error, RuntimeError) and str(error).startswith("Server error"):  # in its own words
                raise
            self._lost = f"the OpenEnv server at {self._url} does not answer: {type(error).__name__}: {error}"
            raise ConnectionError(self._lost) from None
        self._reward = float(answer.reward or 0.0)
        return answer.observation["text"]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of a dataset, each with the seed of its number."""
    prompt = [{"role": "user", "content": "Find the number.\n"}]
    return [{"prompt": prompt, "seed": seed * 1_000_000 + number} for number in range(count)]


class Player:
    """
    Guess the middle of the range that is left.

    Args:
        slips: share of guesses that are mistakes: the lowest possible number.
        seed: decides which guesses are mistakes.
    """

    def __init__(self, slips: float = 0.0, seed: int = 0):
        self.slips = slips
        self._random = random.Random(seed)

    def __call__(self, said: str) -> tuple[str, dict[str, Any]] | str:
        """Reply to the environment's last message with the next tool call, or with the final answer."""
        bounds = re.search(r"(\d+) to (\d+)", said)
        if not bounds:
            return "Done."
        low = int(bounds[1])
        high = int(bounds[2])
        return "guess", {"number": low if self._random.random() < self.slips else (low + high) // 2}


def serve() -> None:
    """Serve the game on a free port of loopback, and write its address to standard output."""
    import socket

    import uvicorn
    from openenv.core.env_server import create_app, interfaces, types

    class Guess(types.Action):
        number: int

    class Told(types.Observation):
        text: str

    class Game(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
            self.number = random.Random(seed).randint(1, HIGHEST)
            self.low = 1
            self.high = HIGHEST
            self.left = GUESSES
            self.is_found = False
            return self.told(f"{self.low} to {self.high}")

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
            if self.is_found or self.left == 0:
                self.is_found, self.left = False, 0  # else nothing tells the model to stop
                return self.told("It is over.")
            self.left -= 1
            self.is_found = action.number == self.number
            if self.is_found or self.left == 0:
                return self.told("You found it." if self.is_found else "You did not find it.")
            if action.number < self.number:
                self.low = max(self.low, action.number + 1)
            else:
                self.high = min(self.high, action.number - 1)
            return self.told(f"{self.low} to {self.high}")

        def told(self, text: str) -> Told:
            return Told(text=text, done=self.is_found or self.left == 0, reward=float(self.is_found))

        @property
        def state(self) -> types.State:
            return types.State(step_count=GUESSES - self.left)

    def end_with_parent() -> None:
        with suppress(Exception):
            sys.stdin.read()
        os._exit(0)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a client that is early waits
    app = create_app(Game, Guess, Told, env_name="guess", max_concurrent_envs=SESSIONS)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=end_with_parent, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    serve()
