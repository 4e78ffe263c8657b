"""A cache in front of a reward function: in this process and, where told, in a Redis that several share."""

import hashlib
import json
import marshal
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import cachetools
import regex
import xxhash
from transformers.utils import logging

from ..runs.redaction import redacted
from ..runs.sources import source_identity
from ..upstream.names import get_callable_name
from .member import (
    FAILED,
    answers_of,
    failure,
    finite_number,
    log_to,
    policies_within,
    runs_in_background,
    without_failures,
)
from .naming import checked_name
from .segments import is_by_token

logger = logging.get_logger(__name__)

NO_COLUMNS = ("trainer_state", "log_extra", "log_metric")  # what TRL passes that is in no key
_LONGEST_NUMBER = 32  # characters; Python writes each float in 24 or fewer


class CachedReward:
    """
    Score each answer once: what was scored before is looked up.

    What a score depends on makes its key: which reward it is ([`source_identity`]: name, settings, revision), prompt,
    completion and columns. The key is a hash of 128 bits, in memory XXH3 with a secret seed, in Redis BLAKE2b: among a
    million entries two share one with a probability of 2e-27, and nobody can look for such a pair. The reward is given
    what is in the key and nothing else: no other column, and a `trainer_state` that refuses to be read. Scores of None
    are not kept, nor is anything of a call that fails. A function that looks at other answers of its batch must not be
    cached.

    It logs `rewards/<name>/cache_hits`, the share of answers that needed no scoring (in memory, in Redis, or twice in
    one call), and with Redis `rewards/<name>/redis_hits`, the share that came from there.

    Args:
        reward: a reward function that scores each answer by itself. Its own `on_error` must be no number, which would
            be kept as a score.
        capacity: entries in memory; the least recently used one makes room.
        columns: which columns the score depends on, beside prompt and completion; the reward is given no others. None:
            all that the trainer passes, `completion_ids` among them. Fewer give more hits: with `[]` the same text has
            the same score, however it was tokenised and whether it ended by EOS or not (that is `"finished"`).
        normalize: what makes texts the same. `"space"`: runs of white space count as one space, and at the ends as
            nothing; `"punctuation"`: punctuation does not count either. The first such answer gives the score. It
            needs `columns` without ids of tokens.
        redis_url: `redis://[user@]host:port/db`, `rediss://…` with TLS, or `unix://…`. Options of redis-py's client
            go into its query: `?ssl_ca_certs=ca.pem`. None: memory alone.
        redis_password_env: name of the environment variable that holds the password.
        ttl: seconds that Redis keeps a score.
        timeout: seconds to connect, and to wait for an answer. A Redis that does not answer is left alone for
            `retry_after` seconds; answers are scored meanwhile.
        retry_after: see `timeout`.
        name: in the logs; by default `cached_<name of the reward>`.
    """

    def __init__(
        self,
        reward: Callable,
        capacity: int = 1_000_000,
        columns: list[str] | None = None,
        normalize: Literal["space", "punctuation"] | None = None,
        redis_url: str | None = None,
        redis_password_env: str | None = None,
        ttl: int = 3600,
        timeout: float = 1.0,
        retry_after: float = 10.0,
        name: str | None = None,
    ):
        if not callable(reward) or isinstance(reward, type):
            raise TypeError(f"`reward` must be a reward function, got {reward!r}")
        if isinstance(fallback := getattr(reward, "on_error", None), (int, float)):
            raise ValueError(
                f"`reward` has on_error={fallback}, which would be kept as a score: give it 'raise' or 'skip', and "
                "the number to what is around the cache"
            )
        if within := [each for each in policies_within(reward) if each != "raise"]:
            raise ValueError(
                f"`reward` holds a member with on_error={within[0]!r}, so that a score of the others alone would be "
                "kept: put the cache around that member, or give it 'raise'"
            )
        for argument, value, least in [("capacity", capacity, 1), ("ttl", ttl, 1)]:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"`{argument}` must be a whole number of {least} or more, got {value!r}")
        for argument, seconds in [("timeout", timeout), ("retry_after", retry_after)]:
            if not seconds > 0:
                raise ValueError(f"`{argument}` must be more than 0 seconds, got {seconds!r}")
        if isinstance(columns, str) or columns is not None and not all(isinstance(each, str) for each in columns):
            raise TypeError(f"`columns` must be a list of names, got {columns!r}")
        if normalize not in (None, "space", "punctuation"):
            raise ValueError(f"`normalize` must be 'space', 'punctuation' or None, got {normalize!r}")
        if normalize and (columns is None or not {"completion_ids", "prompt_ids"}.isdisjoint(columns)):
            raise ValueError(
                "`normalize` makes texts the same that ids of tokens tell apart: give `columns` without "
                f"'completion_ids' and 'prompt_ids', as [], got {columns}"
            )
        self.reward = reward
        self.capacity = capacity
        self.columns = columns
        self.normalize = normalize
        self.redis_url = redis_url
        self.redis_password_env = redis_password_env
        self.ttl = ttl
        self.timeout = timeout
        self.retry_after = retry_after
        self.__name__ = checked_name(name, f"cached_{get_callable_name(reward)}")
        if redis_url is not None:
            _check_redis(redis_url, redis_password_env)
        elif redis_password_env is not None:
            raise ValueError("`redis_password_env` is read only with `redis_url`")
        self._start()

    def _start(self) -> None:
        self._memory: cachetools.LRUCache = cachetools.LRUCache(self.capacity)
        self._lock = threading.Lock()
        self._seed = secrets.randbits(64)  # of the fast hash in memory: who does not know it makes no two keys alike
        self._identity: str | None = None
        self._redis: Any = None
        self._redis_rests_until = 0.0
        self._said = False

    def __getstate__(self) -> dict[str, Any]:
        fresh = ("_memory", "_lock", "_seed", "_identity", "_redis", "_redis_rests_until", "_said")
        return {name: value for name, value in vars(self).items() if name not in fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def identity(self) -> str:
        """Which reward this is: the one within. Where its scores are kept changes none of them."""
        return f"cached {self._of_the_reward()} {self.columns} {self.normalize}"

    @property
    def in_background(self) -> bool:
        """Whether the reward's time goes by elsewhere."""
        return runs_in_background(self.reward)

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the score of each answer. The reward is asked only for those that are not known yet."""
        return without_failures(self.told(prompts, completions, completion_ids, **kwargs))

    def told(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the same, but NaN for a row that the reward failed on or withheld."""
        count = len(completions)
        if completion_ids is not None:
            kwargs["completion_ids"] = completion_ids
        written = self._written(prompts, completions, kwargs)
        keys = [xxhash.xxh3_128_digest(row, self._seed) for row in written]
        with self._lock:
            look_up = self._memory.get
            scores = [look_up(key) for key in keys]
        unknown: dict[bytes, int] = {}  # key → its first row
        if None in scores:
            for row, key in enumerate(keys):
                if scores[row] is None:
                    unknown.setdefault(key, row)
        in_redis = {key: _redis_key(written[row]) for key, row in unknown.items()} if self.redis_url else {}
        shared = self._from_redis(in_redis)
        rows = [row for key, row in unknown.items() if key not in shared]
        scored = self._score(prompts, completions, log_metric, self._given(kwargs), rows) if rows else {}
        if unknown:
            answered = {**shared, **{keys[row]: score for row, score in scored.items()}}
            found = {key: score for key, score in answered.items() if score is not None and not math.isnan(score)}
            with self._lock:
                self._memory.update(found)
            scores = [answered.get(key) if score is None else score for key, score in zip(keys, scores, strict=True)]
            if self.redis_url and len(found) > len(shared):
                self._to_redis({in_redis[key]: score for key, score in found.items() if key not in shared})
        if count:
            log_to(log_metric, {f"rewards/{self.__name__}/cache_hits": (count - len(rows)) / count})
            if self.redis_url:
                log_to(log_metric, {f"rewards/{self.__name__}/redis_hits": len(shared) / count})
        return scores

    # ---- Keys ----

    def _of_the_reward(self) -> str:
        """Which reward it is, found once: of a model that takes as long as reading its weights."""
        if self._identity is None:
            self._identity = f"{get_callable_name(self.reward)} {source_identity(self.reward)}"
        return self._identity

    def _written(self, prompts: list, completions: list, kwargs: dict[str, Any]) -> list[bytes]:
        """Return what decides on the score of each row, as bytes, which are hashed for a key."""
        if self.normalize:
            prompts, completions = ([self._normalized(text) for text in texts] for texts in (prompts, completions))
        count = len(completions)
        if self.columns is None:
            names = sorted(name for name in kwargs if name not in NO_COLUMNS)
        else:
            names = sorted(self.columns)
            if absent := [name for name in names if kwargs.get(name) is None]:
                raise ValueError(
                    f"{self.__name__}: no column {absent[0]!r}, which `columns` names; there are {sorted(kwargs)}"
                )
        # What is no list of the rows' values is one value for all
        values = [
            kwargs[name] if isinstance(kwargs[name], (list, tuple)) and len(kwargs[name]) == count
            else [kwargs[name]] * count
            for name in names
        ]  # fmt: skip
        common = hashlib.blake2b(f"{self.identity} {names}".encode("utf-8", "surrogatepass"), digest_size=32).digest()
        # Written by marshal, each value is told from every other: of all that Python has it takes least time. What it
        # writes is never read. Version 0 writes equal values alike
        try:
            return [common + marshal.dumps(row, 0) for row in zip(prompts, completions, *values, strict=True)]
        except ValueError as error:
            if len(prompts) != count:
                raise ValueError(f"{self.__name__}: {len(prompts)} prompts for {count} completions") from error
            raise TypeError(
                f"{self.__name__}: of a column among {names} no key can be made, since it holds other things than "
                "texts, numbers and lists of them: name those that count in `columns`, without it"
            ) from None

    def _normalized(self, text: Any) -> Any:
        if isinstance(text, list):  # messages
            return [{**turn, "content": self._normalized(turn.get("content"))} for turn in text]
        if not isinstance(text, str):
            return text
        if self.normalize == "punctuation":
            text = regex.sub(r"\p{P}+", " ", text)
        return " ".join(text.split())

    # ---- The reward within ----

    def _given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what the reward may see: what is in the key, and what it logs to."""
        hidden = () if self.columns is None else [n for n in kwargs if n not in self.columns and n not in NO_COLUMNS]
        given = {name: value for name, value in kwargs.items() if name not in hidden}
        if given.get("trainer_state") is not None:
            given["trainer_state"] = _Unreadable()
        return given

    def _score(
        self, prompts: list, completions: list, log_metric: Any, kwargs: dict[str, Any], rows: list[int]
    ) -> dict[int, float | None]:
        """Return the scores of these rows by row, NaN where the reward failed."""
        count = len(completions)
        given = of_rows({"prompts": prompts, "completions": completions, **kwargs}, rows, count)
        name = get_callable_name(self.reward)
        try:
            returned = answers_of(self.reward, len(rows), log_metric=log_metric, **given)
        except Exception as error:
            alone = "" if self.columns is None else f" (the cache's `columns` {self.columns} are all it is given)"
            raise failure(name, error, among(rows, count) + alone) from error
        try:
            if any(map(is_by_token, returned)):
                raise TypeError("a cache keeps one score an answer, not one a token; use it without one")
            return {
                row: score if score is None or score is FAILED else finite_number(score, row)
                for row, score in zip(rows, returned, strict=True)
            }
        except (TypeError, ValueError) as error:
            raise failure(name, error) from error

    # ---- Redis ----

    def _client(self) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if self._redis is None:
            password = os.environ[self.redis_password_env] if self.redis_password_env else None
            self._redis = redis.Redis.from_url(
                str(self.redis_url),
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
                retry=Retry(NoBackoff(), 0),  # the next call tries again
                **({"password": password} if password else {}),
            )
        return self._redis

    def _from_redis(self, keys: dict[bytes, str]) -> dict[bytes, float]:
        """Return the scores that are there, by the keys in memory; `keys` has each one's key in Redis."""
        values = self._ask_redis(lambda client: client.mget([*keys.values()])) if keys else None
        numbers = map(_number, values if isinstance(values, list) else [])
        return {key: number for key, number in zip(keys, numbers, strict=False) if number is not None}

    def _to_redis(self, scores: dict[str, float]) -> None:
        def write(client: Any) -> None:
            pipeline = client.pipeline(transaction=False)
            for key, score in scores.items():
                pipeline.set(key, json.dumps(score), ex=self.ttl)
            pipeline.execute()

        self._ask_redis(write)

    def _ask_redis(self, question: Callable[[Any], Any]) -> Any:
        """Return what Redis says, or None: without it the run goes on, as slow as it would be."""
        if time.monotonic() < self._redis_rests_until:
            return None
        import redis

        try:
            answer = question(self._client())
            if self._said:
                logger.warning(f"{self.__name__}: Redis is back.")
                self._said = False
            return answer
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: an answer that is no Redis'
            self._redis_rests_until = time.monotonic() + self.retry_after
            if not self._said:
                logger.warning(
                    f"{self.__name__}: Redis does not answer ({type(error).__name__}: {redacted(str(error))}). The "
                    f"run goes on without it, and it is tried again every {self.retry_after:g} s."
                )
            self._said = True
            return None


class _Unreadable:
    """A trainer's state within a cache: a score that depends on it is another one at each step."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for what is not there
            raise AttributeError(name)
        raise TypeError(
            f"`trainer_state.{name}` is read, which changes while a cache keeps its scores: use the function without "
            "one, or put the cache around what does not read it"
        )


def of_rows(columns: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    """Return what a reward function is given, for these of its `count` rows alone."""
    if rows == [*range(count)]:
        return dict(columns)
    given = {
        name: [values[row] for row in rows] if isinstance(values, (list, tuple)) and len(values) == count else values
        for name, values in columns.items()
    }
    if log_extra := columns.get("log_extra"):  # TRL's table has all rows
        given["log_extra"] = lambda column, values: log_extra(column, _spread(values, rows, count))
    return given


def among(rows: list[int], count: int) -> str:
    """Return, for an error, which completions were asked about: by their places among these it counts."""
    if rows == [*range(count)]:
        return ""
    more = ", …" if len(rows) > 10 else ""
    return f" (counted among completions {', '.join(map(str, rows[:10]))}{more}, which alone were asked about)"


def _spread(values: list, rows: list[int], count: int) -> list:
    of_row = dict(zip(rows, values, strict=True))
    return [of_row.get(row) for row in range(count)]


def _redis_key(written: bytes) -> str:
    """Return the same key in every process, of a hash for which nobody finds two rows with one key."""
    return f"trl-ext:reward:{hashlib.blake2b(written, digest_size=16).hexdigest()}"


def _number(value: Any) -> float | None:
    """Return what Redis holds as a finite number; None if there is nothing, or something else."""
    if not isinstance(value, (bytes, str)) or len(value) > _LONGEST_NUMBER:
        return None
    try:
        number = json.loads(value)
        return finite_number(number, 0) if type(number) in (int, float) else None
    except (ValueError, TypeError):
        return None


def _check_redis(url: str, password_env: str | None) -> None:
    try:
        from redis.connection import parse_url
    except ImportError as error:
        raise ImportError(
            "`redis_url` needs redis, which is not installed: `pip install 'trl-ext[rewards]'`"
        ) from error
    try:
        options = parse_url(url)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"`redis_url` must be redis://, rediss:// or unix://, got {redacted(str(url))!r}") from error
    if options.get("password"):
        raise ValueError(
            "`redis_url` must hold no password: put it into an environment variable, named in `redis_password_env`"
        )
    if password_env is not None and not os.environ.get(password_env):
        raise ValueError(f"`redis_password_env` names {password_env}, which is not set in the environment")
