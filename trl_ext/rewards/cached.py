"""Cache the scores of a reward function: in this process' memory, and in a Redis server that processes can share."""

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
from ..upstream.packages import need
from .checks import PicklesSettings, check_counts, check_function, check_seconds, checked_name
from .member import (
    FAILED,
    HoldsRewards,
    TellsFailures,
    answers_of,
    failure,
    finite_number,
    log_to,
    policies_within,
)
from .segments import is_by_token

logger = logging.get_logger(__name__)

NO_COLUMNS = ("trainer_state", "log_extra", "log_metric")  # TRL passes these, too; no key contains them
_LONGEST_NUMBER = 32  # characters; Python writes each float in 24 or fewer


class CachedReward(PicklesSettings, TellsFailures, HoldsRewards):
    """
    Score each answer once, and return the stored score when the same answer comes again.

    A score is stored under a key, a hash of all that the score depends on:

    - the reward ([`source_identity`]: name, settings, revision)
    - the prompt and the completion
    - the values of `columns`

    The hash has 128 bits: in memory it is XXH3 with a secret seed, in Redis BLAKE2b. The probability that any two of a
    million scores share a key is 2e-27, and nobody can search for two answers that do. The reward gets no column that
    is not in the key, and reading its `trainer_state` raises an error. None is not stored as a score, nor is the score
    of a row on which the reward failed; if the whole call fails, nothing of it is stored. Do not cache a function
    whose score of one answer depends on the other answers of the batch.

    Logs:

    - `rewards/<name>/cache_hits`: share of answers that needed no scoring, because their score was stored or because
      the same answer stands earlier in the call
    - `rewards/<name>/redis_hits`: with `redis_url`, share of answers whose score came from Redis; of equal answers in
      one call only one counts

    Args:
        reward: a reward function that scores each answer by itself. Its `on_error` must not be a number: the cache
            would store that number as a score.
        capacity: most scores in memory; when it is full, the least recently used one is dropped.
        columns: columns that the score depends on, besides prompt and completion; the reward gets no others. None: all
            that the trainer passes, `completion_ids` among them. Fewer columns give more hits. With `[]`, equal texts
            share one score, however they were tokenised; with `["finished"]`, a cut-off answer and a finished one do
            not share a score even if their texts are equal.
        normalize: which texts share a score. None: equal texts; `"space"`: texts that differ only in white space;
            `"punctuation"`: texts that differ only in white space and punctuation. They all get the score of the one
            that is scored first. With `"space"` and `"punctuation"`, `columns` must be given, without ids of tokens
            such as `completion_ids`.
        redis_url: `redis://[user@]host:port/db`, `rediss://…` with TLS, or `unix://…`. Options of redis-py's client
            go into its query: `?ssl_ca_certs=ca.pem`. None: scores are stored in memory alone.
        redis_password_env: environment variable that holds Redis' password.
        ttl: seconds that Redis keeps a score.
        timeout: most seconds to wait for a connection to Redis, and for each of its answers.
        retry_after: seconds until Redis is asked again after it did not answer. Meanwhile the reward scores all
            answers whose score is not in memory.
        name: key in the logs; by default `cached_<name of the reward>`.

    Examples:
        >>> from trl_ext.rewards import CachedReward
        >>> def slow_reward(completions, **kwargs):
        ...     print("scoring", completions)
        ...     return [float(len(text.split())) for text in completions]
        >>> reward = CachedReward(slow_reward, columns=[])
        >>> reward(prompts=["Tea?"] * 2, completions=["Yes, please.", "Yes, please."])
        scoring ['Yes, please.']
        [2.0, 2.0]
        >>> reward(prompts=["Tea?"], completions=["Yes, please."])
        [2.0]
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
        check_function(reward=reward)
        if isinstance(fallback := getattr(reward, "on_error", None), (int, float)):
            raise ValueError(
                f"`reward` has on_error={fallback}, so the cache would keep {fallback} as the score of each answer "
                f"that `reward` fails on. Give `reward` on_error='raise' or 'skip', and give on_error={fallback} to a "
                "reward around the cache"
            )
        if within := [each for each in policies_within(reward) if each != "raise"]:
            raise ValueError(
                f"`reward` has a member with on_error={within[0]!r}, so the cache could keep scores that lack this "
                "member. Put the cache around that member, or give the member on_error='raise'"
            )
        check_counts(capacity=capacity, ttl=ttl)
        check_seconds(timeout=timeout, retry_after=retry_after)
        if isinstance(columns, str) or columns is not None and not all(isinstance(each, str) for each in columns):
            raise TypeError(f"`columns` must be a list of names, got {columns!r}")
        if normalize not in (None, "space", "punctuation"):
            raise ValueError(f"`normalize` must be 'space', 'punctuation' or None, got {normalize!r}")
        if normalize and (columns is None or not {"completion_ids", "prompt_ids"}.isdisjoint(columns)):
            raise ValueError(
                f"`normalize` has no effect on token ids, and with columns={columns} the cache compares them. Leave "
                "'completion_ids' and 'prompt_ids' out of `columns`; [] compares the texts alone"
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
            raise ValueError(
                f"`redis_password_env` {redis_password_env} has an effect only with `redis_url`: give both, or neither"
            )
        self._set_up()

    def _set_up(self) -> None:
        self._memory: cachetools.LRUCache = cachetools.LRUCache(self.capacity)
        self._lock = threading.Lock()
        self._seed = secrets.randbits(64)  # of the hash in memory: who does not know it cannot make two keys alike
        self._identity: str | None = None
        self._redis: Any = None
        self._redis_rests_until = 0.0
        self._redis_is_down = False

    @property
    def identity(self) -> str:
        """
        Return the cached reward's own identity, `columns` and `normalize` as text, but not where scores are stored.
        """
        if self._identity is None:  # found once: a model's identity takes as long as reading its weights
            self._identity = f"{get_callable_name(self.reward)} {source_identity(self.reward)}"
        return f"cached {self._identity} {self.columns} {self.normalize}"

    def scores_or_nan(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return each completion's score, stored or new; NaN if the reward failed on the row or withheld its score."""
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
            redis_hits = len(shared) / count if self.redis_url else None
            log_to(log_metric, {"cache_hits": (count - len(rows)) / count, "redis_hits": redis_hits}, self)
        return scores

    # ---- Keys ----

    def _written(self, prompts: list, completions: list, kwargs: dict[str, Any]) -> list[bytes]:
        """Return for each row the bytes whose hash is its key: all that the row's score depends on."""
        if self.normalize:
            prompts, completions = ([self._normalized(text) for text in texts] for texts in (prompts, completions))
        count = len(completions)
        if self.columns is None:
            names = sorted(name for name in kwargs if name not in NO_COLUMNS)
        else:
            names = sorted(self.columns)
            if absent := [name for name in names if kwargs.get(name) is None]:
                raise ValueError(
                    f"{self.__name__}: `columns` names {absent[0]!r}, but the data has the columns {sorted(kwargs)}. "
                    "Add the column to the data, or leave it out of `columns`"
                )
        # A column that is not a list with one value a row is one value for all rows
        values = [
            kwargs[name] if isinstance(kwargs[name], (list, tuple)) and len(kwargs[name]) == count
            else [kwargs[name]] * count
            for name in names
        ]  # fmt: skip
        common = hashlib.blake2b(f"{self.identity} {names}".encode("utf-8", "surrogatepass"), digest_size=32).digest()
        # marshal writes different values differently, and is the fastest of Python's writers. Nothing reads its bytes.
        # Version 0 writes equal values alike
        try:
            return [common + marshal.dumps(row, 0) for row in zip(prompts, completions, *values, strict=True)]
        except ValueError as error:
            if len(prompts) != count:
                raise ValueError(
                    f"{self.__name__} got {len(prompts)} prompts for {count} completions: pass one prompt for each"
                ) from error
            raise TypeError(
                f"{self.__name__}: one of the columns {names} holds something other than texts, numbers and lists of "
                "them, so the cache cannot compare it. Name only the other columns in `columns`"
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
        """Return the arguments that the reward may see: those in the key, and the logging functions."""
        hidden = () if self.columns is None else [n for n in kwargs if n not in self.columns and n not in NO_COLUMNS]
        given = {name: value for name, value in kwargs.items() if name not in hidden}
        if given.get("trainer_state") is not None:
            given["trainer_state"] = _Unreadable()
        return given

    def _score(
        self, prompts: list, completions: list, log_metric: Any, kwargs: dict[str, Any], rows: list[int]
    ) -> dict[int, float | None]:
        """Let the reward score `rows`; return a mapping from each row to its score, NaN if the reward failed on it."""
        count = len(completions)
        given = of_rows({"prompts": prompts, "completions": completions, **kwargs}, rows, count)
        name = get_callable_name(self.reward)
        try:
            returned = answers_of(self.reward, len(rows), log_metric=log_metric, **given)
        except Exception as error:
            alone = "" if self.columns is None else f" (it gets only the cache's `columns` {self.columns})"
            raise failure(name, error, among(rows, count) + alone) from error
        try:
            if any(map(is_by_token, returned)):
                raise TypeError(
                    "a cache keeps one score for each answer, but this reward scores each token: use it without a "
                    "cache"
                )
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
        """Return the scores that Redis has, by key in memory; `keys` maps keys in memory to keys in Redis."""
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
        """
        Return what `question` gets from Redis; None if Redis does not answer.

        After that Redis is not asked for `retry_after` seconds, in which None is returned at once.
        """
        if time.monotonic() < self._redis_rests_until:
            return None
        import redis

        try:
            answer = question(self._client())
            if self._redis_is_down:
                logger.warning(f"{self.__name__}: Redis answers again.")
                self._redis_is_down = False
            return answer
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: it is another kind of server
            self._redis_rests_until = time.monotonic() + self.retry_after
            if not self._redis_is_down:
                logger.warning(
                    f"{self.__name__}: Redis does not answer ({type(error).__name__}: {redacted(str(error))}). The "
                    f"run goes on without Redis, and tries it again every {self.retry_after:g} s."
                )
            self._redis_is_down = True
            return None


class _Unreadable:
    """Stand in for the trainer's state, which changes at each step: raise an error if a cached reward reads it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for special methods
            raise AttributeError(name)
        raise TypeError(
            f"the reward reads `trainer_state.{name}`, which changes during training, but a cache keeps old scores. "
            "Use the reward without a cache, or cache only the part that does not read `trainer_state`"
        )


def of_rows(columns: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    """Return a reward function's arguments for `rows` alone, taken from its arguments for all `count` rows."""
    if rows == [*range(count)]:
        return dict(columns)
    given = {
        name: [values[row] for row in rows] if isinstance(values, (list, tuple)) and len(values) == count else values
        for name, values in columns.items()
    }
    if log_extra := columns.get("log_extra"):  # TRL's table wants all rows
        given["log_extra"] = lambda column, values: log_extra(column, _spread(values, rows, count))
    return given


def among(rows: list[int], count: int) -> str:
    """Return the end of an error message, which names the scored `rows`; "" if these are all `count` rows."""
    if rows == [*range(count)]:
        return ""
    more = ", …" if len(rows) > 10 else ""
    return f" (counted among completions {', '.join(map(str, rows[:10]))}{more}: the reward got only these)"


def _spread(values: list, rows: list[int], count: int) -> list:
    of_row = dict(zip(rows, values, strict=True))
    return [of_row.get(row) for row in range(count)]


def _redis_key(written: bytes) -> str:
    """Return a row's key in Redis, the same in every process; nobody can construct two rows with the same key."""
    return f"trl-ext:reward:{hashlib.blake2b(written, digest_size=16).hexdigest()}"


def _number(value: Any) -> float | None:
    """Convert a value from Redis to a finite number; return None if the value is missing or no finite number."""
    if not isinstance(value, (bytes, str)) or len(value) > _LONGEST_NUMBER:
        return None
    try:
        number = json.loads(value)
        return finite_number(number, 0) if type(number) in (int, float) else None
    except (ValueError, TypeError):
        return None


def _check_redis(url: str, password_env: str | None) -> None:
    need("redis", "`redis_url`")
    from redis.connection import parse_url

    try:
        options = parse_url(url)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`redis_url` must begin with redis://, rediss:// or unix://, got {redacted(str(url))!r}"
        ) from error
    if options.get("password"):
        raise ValueError(
            "`redis_url` must not contain a password: put the password into an environment variable, and name the "
            "variable in `redis_password_env`"
        )
    if password_env is not None and not os.environ.get(password_env):
        raise ValueError(
            f"`redis_password_env` names the environment variable {password_env}, which is not set: export it"
        )
