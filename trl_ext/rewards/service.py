"""Ask a server over HTTP for scores, with a bearer token, retries, a deadline, and failures by row."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import httpx2
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, stop_any, stop_before_delay
from tenacity.wait import wait_random_exponential

from ..runs.redaction import HIDDEN, redacted
from .background import in_threads
from .member import MarksFailures, OnError, RewardFailed, checked_on_error, with_failures_as_nan
from .scores import log_to

_FAILURES, _PAUSE = 5, 30.0  # after so many failed requests in a row none is sent for so many seconds
_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class ServiceError(RewardFailed):
    """Raised when a service gave no usable answer, or a request was not sent."""


class RefusedError(ServiceError):
    """Raised when a service refuses a request, but might accept a request with other rows."""


class UnavailableError(ServiceError):
    """
    Raised when a request may succeed later: the service cannot be reached, fails, is too busy or sends no JSON.

    `retry_after` is how many seconds the service asks to wait; None if it does not say.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class WithheldError(ServiceError):
    """Raised when a server withholds its answer, as a content filter does; the row then has no score."""


@dataclass
class Call:
    """
    Record the deadline and the requests of one call of a reward.

    Args:
        until: when to give up, in seconds of `time.monotonic`.
        seconds: the duration of each answered request.
        retried: the wait before each retry, in seconds.

    Examples:
        >>> call = Call(until=time.monotonic() + 60, seconds=[0.5, 1.5])
        >>> call.metrics
        {'latency': 1.0, 'retries': 0.0}
    """

    until: float
    seconds: list[float] = field(default_factory=list)
    retried: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float | None]:
        """
        Return `latency`, the mean seconds of an answered request (None without any), and the number of `retries`.
        """
        return {"latency": fmean(self.seconds) if self.seconds else None, "retries": float(len(self.retried))}


class ServedReward(MarksFailures):
    """
    Ask a service for scores: the base class of [`RemoteReward`] and [`JudgeReward`].

    A request is sent again after a connection error, a timeout, the status 408, 429 or 5xx (but not 501), or an answer
    that is not JSON. If an answer with status 200 is an `error` object, as gateways send it when the server behind
    them fails, its `code` counts as the status. If five requests in a row failed, each with all its retries, requests
    of the next 30 seconds fail without being sent.

    Args:
        url: address of the service, without user, password and query.
        path: added to `url` unless `url` ends with it.
        name: key in the logs.
        timeout: most seconds to wait for a connection, and for each part of an answer.
        deadline: most seconds for a whole call. A row without an answer by then has failed.
        retries: how often a failed request is sent again, after the wait that the server asks for, or after random
            waits of up to 1, 2, 4 … 30 seconds.
        max_concurrency: most requests at once.
        max_characters: most characters of a prompt or completion. A row with a longer text is not sent, and fails.
        api_key_env: environment variable with a bearer token, such as `"OPENAI_API_KEY"`. The token is never written
            to a file or log.
        on_error: what happens if a row fails. `"raise"` raises an error, `"skip"` scores the row None.
    """

    in_background = True

    def __init__(
        self,
        url: str,
        path: str,
        name: str,
        /,
        *,
        timeout: float = 60.0,
        deadline: float = 600.0,
        retries: int = 5,
        max_concurrency: int = 8,
        max_characters: int = 100_000,
        api_key_env: str | None = None,
        on_error: OnError = "raise",
    ):
        if "@" in urlsplit(url).netloc or "?" in url:
            raise ValueError(
                "`url` must not contain credentials or a query (`user:…@`, `?…`): export a token as an environment "
                "variable, and name the variable in `api_key_env`"
            )
        self.url = url.rstrip("/").removesuffix(path)
        self.path = path
        self.timeout = timeout
        self.deadline = deadline
        self.retries = retries
        self.max_concurrency = max_concurrency
        self.max_characters = max_characters
        self.api_key_env = api_key_env
        self.on_error = checked_on_error(on_error)
        self.__name__ = name
        self._key()
        self._failures = 0
        self._paused_until = 0.0

    def ask(self, function: Callable, jobs: Sequence, until: float) -> list[Any]:
        """
        Run `function(job)` for each job, several at once; return in order each job's result, or the error it raised.

        A job that has not ended at `until`, in seconds of `time.monotonic`, gets a `TimeoutError`. If `on_error` is
        `"raise"`, no job begins after one has failed; those left also get a `TimeoutError`.
        """
        return in_threads(function, jobs, self.max_concurrency, until, self._ends_call)

    def _ends_call(self, outcome: Any) -> bool:
        """Return whether a row's outcome, a score or an error, makes the whole call fail."""
        is_mistake = isinstance(outcome, Exception) and not isinstance(outcome, WithheldError)
        return self.on_error == "raise" and is_mistake

    def check(self, outcomes: Sequence[Any]) -> None:
        """
        If `on_error` is `"raise"`, raise a `RewardFailed` for the first error in `outcomes`. A [`WithheldError`] does
        not count, and a `TimeoutError` only if there is no other error. `outcomes`: for each row a score or an error.
        """
        # One that was not asked since another one failed is not the cause
        errors = [(isinstance(each, TimeoutError), row) for row, each in enumerate(outcomes) if self._ends_call(each)]
        if errors:
            row = min(errors)[1]
            raise RewardFailed(f"reward '{self.__name__}': {self._named(row, outcomes[row])}") from outcomes[row]

    def _named(self, row: int, error: Exception) -> str:
        """Return an error's message with the completion and the address, without credentials."""
        return f"completion {row}: {redacted(self.url + self.path)}: {error}"

    def request(
        self,
        call: Call,
        body: dict[str, Any] | None,
        path: str | None = None,
        check: Callable[[Any], Any] = lambda answer: None,
    ) -> Any:
        """
        Send `body` as JSON by POST, or a GET request if it is None; return the answer, read from JSON.

        The request is sent again as the class says, and also if `check(answer)` raises an [`UnavailableError`].

        Args:
            call: has the deadline; records the seconds of an answered request, and the waits before retries.
            path: path at the server; None: the reward's own.
            check: function that takes the answer, and raises an error if the answer cannot be used.

        Raises:
            UnavailableError: the server could not be reached, was too busy or sent no JSON, at every try; or it was
                not asked, since too many earlier requests failed.
            ServiceError: the server refused the request, the answer cannot be used, or the call's deadline has passed.
        """
        if (pause := self._paused_until - time.monotonic()) > 0:
            raise UnavailableError(
                f"the request was not sent, since the last requests failed; requests are sent again in {pause:.1f} s"
            )
        attempts = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_any(
                stop_after_attempt(self.retries + 1), stop_before_delay(max(call.until - time.monotonic(), 0))
            ),
            wait=_wait,
            before_sleep=lambda state: call.retried.append(state.upcoming_sleep),
            reraise=True,
        )
        try:
            answer = attempts(self._send, call, body, self.url + (path or self.path), check)
        except UnavailableError:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._paused_until = time.monotonic() + _PAUSE
            raise
        self._failures = 0
        return answer

    def _send(self, call: Call, body: Any, url: str, check: Callable[[Any], Any]) -> Any:
        """Send one request; return the answer, or raise a [`ServiceError`] that says whether to try again."""
        start = time.monotonic()
        key = self._key()

        def hidden(text: str) -> str:  # error messages quote what the server says
            return text.replace(key, HIDDEN) if key else text

        if (left := call.until - start) <= 0:
            raise ServiceError("the request was not sent, since the call's deadline has passed: raise `deadline`")
        headers = {"accept": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        try:
            response = _client(os.getpid()).request(
                "GET" if body is None else "POST", url, json=body, headers=headers, timeout=min(self.timeout, left)
            )
        except (httpx2.HTTPError, OSError) as error:
            raise UnavailableError(
                hidden(f"the server did not answer: {type(error).__name__}: {error}")[:200]
            ) from error
        text = hidden(response.text)
        wait = response.headers.get("retry-after", "")
        words = redacted(text[:2000]).split()
        reported = "".join(filter(str.isprintable, " ".join(words)))[:200]
        if response.status_code != 200:
            seconds = float(wait) if wait.isdecimal() else None
            raise _failure(response.status_code, f"status {response.status_code}: {reported}", seconds)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnavailableError(f"the server's answer is not JSON (check the URL): {reported}") from error
        if isinstance(answer, dict) and answer.get("error"):
            raise failure_of(answer["error"], f"the server reports an error, though with status 200: {reported}")
        check(answer)
        call.seconds.append(time.monotonic() - start)
        return answer

    def _key(self) -> str:
        """Return the bearer token, "" without one; raise a `ValueError` if its variable is not set."""
        if self.api_key_env and not os.environ.get(self.api_key_env, "").strip():
            raise ValueError(
                f"`api_key_env`: the environment variable {self.api_key_env} is not set or empty: export a token in it"
            )
        return os.environ[self.api_key_env].strip() if self.api_key_env else ""

    def too_long(self, *texts: str) -> ServiceError | None:
        """Return an error if one of a row's texts has more than `max_characters`, else None."""
        longest = max(map(len, texts))
        if longest <= self.max_characters:
            return None
        return ServiceError(
            f"a text has {longest} characters, more than `max_characters` ({self.max_characters}): raise this limit"
        )

    def settle(self, outcomes: Sequence[Any], log_metric: Any, metrics: dict[str, float | None]) -> list[float | None]:
        """
        Return the scores of a call's rows, and log `metrics`.

        `outcomes` has a score or an error for each row. An error is raised if `on_error` is `"raise"`, and replaced by
        NaN if it is `"skip"`. A [`WithheldError`] is always replaced by NaN. `log_metric` is TRL's function that logs;
        None logs nothing.
        """
        self.check(outcomes)
        log_to(log_metric, metrics, self)
        named = [
            ServiceError(self._named(row, outcome)) if isinstance(outcome, Exception) else outcome
            for row, outcome in enumerate(outcomes)
        ]
        # `check` has raised what is to be raised
        return with_failures_as_nan(self.__name__, named, self.on_error, log_metric, may_raise=False)


@cache
def _client(process: int) -> httpx2.Client:
    """Return this process's HTTP client; a forked process gets a new one, since connections do not survive a fork."""
    # A server of this machine is asked without a proxy, whatever the environment says
    return httpx2.Client(limits=httpx2.Limits(max_connections=None), mounts=dict.fromkeys(_LOOPBACK))


def failure_of(error: Any, message: str) -> ServiceError:
    """
    Return an exception with this message for `error`, an object in an answer with status 200. Its class follows from
    the status: the object's `code` if that is 400 or more, else 503.
    """
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return _failure(int(code) if code.isdecimal() and int(code) >= 400 else 503, message)


def _failure(status: int, message: str, retry_after: float | None = None) -> ServiceError:
    """Return the exception for a status: whether to try again, to send fewer rows, or to give up."""
    if status in (408, 429) or (status >= 500 and status != 501):
        return UnavailableError(message, retry_after)
    return (RefusedError if status in (400, 413, 422) else ServiceError)(message)


def _wait(state: RetryCallState) -> float:
    """Return the seconds that the server asks to wait, or random ones that grow with each try."""
    asked = getattr(state.outcome and state.outcome.exception(), "retry_after", None)
    return wait_random_exponential(multiplier=1, max=30)(state) if asked is None else asked
