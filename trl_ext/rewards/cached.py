"""Cache the scores of a reward function, in this process's memory and in a Redis server that processes can share."""

import functools
import hashlib
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import cachetools
from torch import nn
from transformers.utils import logging

from ..runs.redaction import redacted
from ..upstream.names import get_callable_name
from .member import MarksFailures, Member, checked_name
from .scores import log_to, of_rows

logger = logging.get_logger(__name__)

_UNCOUNTED = ("trainer_state", "log_extra", "environments")  # trainers pass these, too; the reward does not see them
_REST = 10.0  # seconds until a Redis that did not answer is asked again


class CachedReward(MarksFailures):
    """
    Score each completion once, and return the stored score when the same completion comes again.

    The key of a score is a hash of everything that the score depends on: prompt, completion and the values of
    `columns`; in Redis also the reward, see [`reward_identity`]. The reward gets no column that is not in the key, and
    neither `trainer_state` nor `log_extra`. None is not stored, nor is the score of a row on which the reward failed.
    Do not cache a function whose score of one completion depends on the other completions of the batch.

    Logs:

    - `rewards/<name>/cache_hits`: share of completions that needed no scoring, because their score was stored or
      because the same completion occurs earlier in the call
    - `rewards/<name>/redis_hits`: with `redis_url`, share of completions whose score came from Redis; equal
      completions in one call count once

    Args:
        reward: a reward function that scores each completion by itself.
        capacity: most scores in memory; when it is full, the least recently used one is dropped.
        columns: columns that the score depends on, besides prompt and completion; the reward gets no others. None: all
            that the trainer passes, `completion_ids` among them. Fewer columns give more hits: with `[]`, equal texts
            share one score. With `["finished"]`, a cut-off and a finished completion with equal texts have two scores.
        redis_url: `redis://[user@]host:port/db`, `rediss://…` with TLS, or `unix://…`, without a password. Options of
            redis-py's client go into the URL's query: `?ssl_ca_certs=ca.pem`. None: scores are stored in memory alone.
        redis_password_env: environment variable that holds Redis' password.
        ttl: seconds that Redis keeps a score.
        timeout: most seconds to wait for a connection to Redis, and for each of its answers. A Redis that does not
            answer is asked again after ten seconds; until then, the reward scores the completions that are not in
            memory.
        name: key in the logs; by default `cached_<name of the reward>`.

    Raises:
        ValueError: `redis_url` has a password; or the variable `redis_password_env` is not set. With `redis_url` a
            call also raises it, if the reward has no [`reward_identity`], by which Redis could distinguish it from
            other rewards.

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
        redis_url: str | None = None,
        redis_password_env: str | None = None,
        ttl: int = 3600,
        timeout: float = 1.0,
        name: str | None = None,
    ):
        self.reward = reward
        self.capacity = capacity
        self.columns = columns
        self.redis_url = redis_url
        self.redis_password_env = redis_password_env
        self.ttl = ttl
        self.timeout = timeout
        self.__name__ = checked_name(name, f"cached_{get_callable_name(reward)}")
        if redis_url and (urlsplit(redis_url).password or "password=" in redis_url):
            raise ValueError(
                "`redis_url` must not contain a password: name the environment variable that holds it in "
                "`redis_password_env`"
            )
        if redis_url and redis_password_env and redis_password_env not in os.environ:
            raise ValueError(
                f"`redis_password_env`: the environment variable {redis_password_env} is not set: export it"
            )
        self._memory: cachetools.LRUCache = cachetools.LRUCache(capacity)
        self._lock = threading.Lock()
        self._redis: Any = None
        self._rests_until = 0.0

    def held(self) -> list:
        """Return the rewards that this reward calls."""
        return [self.reward]

    def __reduce__(self) -> tuple:  # scores, the lock and the connection do not pickle: they are made again
        connection = self.redis_url, self.redis_password_env, self.ttl, self.timeout
        return type(self), (self.reward, self.capacity, self.columns, *connection, self.__name__)

    @functools.cached_property
    def identity(self) -> str | None:
        """
        Return the cached reward's [`reward_identity`] with `columns`; None if it has none.

        It does not depend on where scores are stored, so that runs can share a Redis.
        """
        identity = reward_identity(self.reward)
        return identity and f"cached {identity} {self.columns}"

    def scores_or_nan(
        self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return each completion's score, stored or new; None if the reward does not apply to it, NaN if the reward
        failed on it or withheld its score.

        The arguments are those of a reward function; `log_metric`, TRL's function that logs, may be None.
        """
        names = self.columns if self.columns is not None else sorted(kwargs.keys() - {*_UNCOUNTED})
        columns = {name: kwargs[name] for name in names}
        identity = self.identity if self.redis_url else None
        count = len(completions)
        if self.redis_url and identity is None:
            raise ValueError(
                f"{self.__name__}: nothing identifies this reward among others in Redis: give the reward an attribute "
                "`identity`, a text that changes whenever its scores change"
            )
        arguments = {"prompts": prompts, "completions": completions, **columns}
        keys = [_key(identity, of_rows(arguments, [row], count)) for row in range(count)]
        with self._lock:
            scores = {key: self._memory[key] for key in keys if key in self._memory}
        rows: dict[str, int] = {}  # key → its first row
        for row, key in enumerate(keys):
            if key not in scores:
                rows.setdefault(key, row)
        answers = self._ask_redis(lambda pipeline: [pipeline.get(key) for key in rows])
        numbers = zip(rows, map(_number, answers), strict=False)
        in_redis = {key: number for key, number in numbers if number is not None}
        new = [key for key in rows if key not in in_redis]
        if new:
            log = {"log_metric": log_metric, "log_extra": lambda *_, **__: None}  # its table wants all rows
            asked = of_rows(arguments, [rows[key] for key in new], count)
            scores |= zip(new, Member(self.reward).scores_or_nan(**asked, **log), strict=True)
        kept = {}
        for key in new:
            score = scores[key]
            if score is not None and not math.isnan(score):
                kept[key] = score
        scores |= in_redis
        with self._lock:
            self._memory.update(in_redis | kept)
        self._ask_redis(lambda pipeline: [pipeline.set(key, score, ex=self.ttl) for key, score in kept.items()])
        if count:
            redis_hits = len(in_redis) / count if self.redis_url else None
            log_to(log_metric, {"cache_hits": 1 - len(new) / count, "redis_hits": redis_hits}, self)
        return [scores[key] for key in keys]

    def _ask_redis(self, ask: Callable[[Any], Any]) -> list[Any]:
        """Return Redis's answers to what `ask` puts into a pipeline; [] if there is no Redis or no answer."""
        if self.redis_url is None or time.monotonic() < self._rests_until:
            return []
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if self._redis is None:
            self._redis = redis.Redis.from_url(
                self.redis_url,
                password=os.environ[self.redis_password_env] if self.redis_password_env else None,
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
                retry=Retry(NoBackoff(), 0),  # the next call tries again
            )
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                ask(pipeline)
                return pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: it is another kind of server
            self._rests_until = time.monotonic() + _REST
            logger.warning_once(
                f"{self.__name__}: Redis does not answer ({type(error).__name__}: {redacted(str(error))}). The run "
                f"continues without it, and asks it again every {_REST:g} s."
            )
            return []


def _key(identity: str | None, row: dict[str, Any]) -> str:
    """Return the key of a row's score: a hash of all that the score depends on."""
    written = json.dumps([identity, row], sort_keys=True).encode()
    return f"trl-ext:reward:{hashlib.blake2b(written, digest_size=16).hexdigest()}"


def _number(value: Any) -> float | None:
    """Return a value from Redis as a float; None if it is missing or not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def reward_identity(reward: Any) -> str | None:
    """
    Return a text that identifies a reward function with its settings.

    This is the attribute `identity`, if that is a text. Otherwise it is the name with a hash. The hash covers the
    source, as `inspect.getsource` finds it, and the values that a function closes over, or an object's public
    attributes. These values must be plain values or reward functions. Code that the function calls is not covered.

    Returns:
        The identity; None if there is no source, or if a value is neither plain nor a reward function, such as a
        model.
    """
    if isinstance(identity := getattr(reward, "identity", None), str):
        return identity
    try:
        description = json.dumps(_described(reward), sort_keys=True)
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    return f"{get_callable_name(reward)} {hashlib.blake2b(description.encode(), digest_size=8).hexdigest()}"


def _described(value: Any) -> Any:
    """Return a reward, or one of its settings, as plain values; another value as it is, for `json` to refuse."""
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _described(each) for key, each in value.items()}
    if not callable(value) or isinstance(value, (nn.Module, functools.partial)):
        return value
    if isinstance(identity := getattr(value, "identity", None), str):
        return identity
    code: Any = value if inspect.isfunction(value) else type(value)
    public = {name: each for name, each in vars(value).items() if not name.startswith("_")}
    held = inspect.getclosurevars(value).nonlocals if code is value else public
    return [code.__qualname__, inspect.getsource(code), _described(held)]
