"""Ask a service over HTTP for scores: with retries, deadlines, a circuit breaker, and failures by row."""

import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import httpx2
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, stop_any, stop_before_delay
from tenacity.wait import wait_random_exponential

from ..runs.redaction import HIDDEN, redacted
from .checks import OnError, check_counts, check_on_error, check_seconds
from .member import RewardFailed, TellsFailures, finite_number, log_to, report_failures

MAX_RESPONSE_BYTES = 32 * 2**20
_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class ServiceError(RuntimeError):
    """Say that a service gave no usable answer."""


class RefusedError(ServiceError):
    """Say that a service refuses a request, but might accept a request with other rows."""


class UnavailableError(ServiceError):
    """Say that a service could not be reached, is too busy, or broke off: the same request may succeed later."""

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class WithheldError(ServiceError):
    """Say that a server withheld its answer, as a content filter does, so that the row has no score."""


@dataclass
class Call:
    """
    Record the deadline and the requests of one call of a reward.

    Args:
        until: when to give up, in seconds of `time.monotonic`.
        seconds: the duration of each answered request.
        retried: the wait before each retry.

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
        """Return `latency`, an answered request's mean seconds (None if there is none), and the count `retries`."""
        return {"latency": fmean(self.seconds) if self.seconds else None, "retries": float(len(self.retried))}


class Breaker:
    """
    Stop asking a service that keeps failing.

    After `failures` failed requests in a row, [`Breaker.check`] raises an error for `seconds`, so that no request is
    sent. Then it lets one request through as a trial, while the others wait. If the trial succeeds, all are let
    through again; if it fails, the pause begins anew.
    """

    def __init__(self, failures: int, seconds: float):
        self.failures, self.seconds = failures, seconds
        self._in_a_row, self._closed_until = 0, 0.0
        self._tried_until = 0.0  # the deadline of the trial
        self._noted = threading.Condition()

    def check(self, until: float) -> bool:
        """
        Return whether this request is the trial; if another request is the trial, first wait for its outcome.

        Raises:
            UnavailableError: requests are not let through now, or `until` (of `time.monotonic`) has passed.
        """
        with self._noted:
            while self._in_a_row >= self.failures:
                now = time.monotonic()
                if (wait := self._closed_until - now) > 0:
                    raise UnavailableError(
                        f"not asked: the last {self._in_a_row} requests failed; the next one is sent in {wait:.1f} s"
                    )
                if now >= until:
                    raise UnavailableError("not asked: the deadline is over")
                if now >= self._tried_until:
                    self._tried_until = until
                    return True
                self._noted.wait(min(until, self._tried_until) - now)
            return False

    def note(self, failed: bool, tries: bool) -> None:
        """Count a request as failed or not; `tries` says whether it was the trial, as [`Breaker.check`] returned."""
        with self._noted:
            if failed and not tries and time.monotonic() < self._tried_until:
                return  # this request began before the pause: only the trial counts now
            self._in_a_row = self._in_a_row + 1 if failed else 0
            self._closed_until, self._tried_until = time.monotonic() + self.seconds, 0.0
            self._noted.notify_all()


class Service:
    """
    Post JSON to one URL, from several threads at once.

    A request is sent again after a connection error, a timeout, the status 408, 429 or 5xx (but not 501), an answer
    that is not JSON, or an `error` object with status 200, whose `code` counts as the status: so say gateways that the
    server behind them failed. After no other answer is a request sent again, unless `check` asks for it. The wait
    before it is what the server's `Retry-After` asks for, or random, and longer from try to try. Each process makes an
    HTTP client of its own, so that a `Service` can be pickled and works after a fork.

    Args:
        url: address, without user and password.
        timeout: most seconds until the whole answer has come.
        retries: how often a failed request is sent again.
        breaker: `failures` and `seconds` of a [`Breaker`].
        api_key_env: environment variable with a bearer token. The variable must be set.
    """

    def __init__(
        self, url: str, timeout: float, retries: int, breaker: tuple[int, float], api_key_env: str | None = None
    ):
        self.url, self.timeout, self.retries = url, timeout, retries
        self.breaker, self.api_key_env = breaker, api_key_env
        self._connections: dict[int, tuple[httpx2.Client, Breaker]] = {}  # by process
        self._headers()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_connections": {}}

    def ask(
        self,
        call: Call,
        body: dict[str, Any] | None = None,
        url: str | None = None,
        check: Callable[[Any], Any] | None = None,
    ) -> Any:
        """
        Post `body` as JSON, or send a GET request if `body` is None; return the answer, read from JSON.

        `url` takes the place of the service's own. The request is sent again if `check(answer)` raises an
        [`UnavailableError`].

        Raises:
            UnavailableError: the service did not answer, or was not asked: the deadline has passed, or too many
                requests before this one failed.
            ServiceError: the answer is of no use.
        """
        until = call.until
        content = None if body is None else json.dumps(body, default=str).encode()  # ASCII, whatever the texts are
        client, breaker = self._connected()
        if time.monotonic() >= until:
            raise UnavailableError("not asked: the deadline is over")
        tries, failed = breaker.check(until), True
        attempts = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_any(stop_after_attempt(self.retries + 1), stop_before_delay(max(until - time.monotonic(), 0))),
            wait=_wait,
            before_sleep=lambda state: call.retried.append(state.upcoming_sleep),
            reraise=True,
        )

        def send() -> Any:
            answer = self._send(client, url or self.url, content, call)
            if check is not None:
                check(answer)
            return answer

        try:
            answer = attempts(send)
            failed = False
            return answer
        except ServiceError as error:
            failed = isinstance(error, UnavailableError)  # any other error is an answer
            raise
        finally:
            breaker.note(failed, tries)

    def _send(self, client: httpx2.Client, url: str, content: bytes | None, call: Call) -> Any:
        start = time.monotonic()
        limit = min(self.timeout, call.until - start)
        if limit <= 0:
            raise UnavailableError("not asked again: the deadline is over")
        body = bytearray()
        try:
            method = "GET" if content is None else "POST"
            with client.stream(method, url, content=content, headers=self._headers(), timeout=limit) as response:
                encoding = response.headers.get("content-encoding", "identity")
                for part in response.iter_raw() if encoding == "identity" else ():
                    body += part
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise ServiceError(f"the answer is longer than {MAX_RESPONSE_BYTES} bytes")
                    if time.monotonic() - start > limit:  # httpx's own timeout begins anew with each part
                        raise UnavailableError(f"no complete answer within {limit:.0f} s")
        except (httpx2.TransportError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}"[:200]) from error
        except httpx2.HTTPError as error:
            raise ServiceError(f"{type(error).__name__}: {error}"[:200]) from error
        said, wait = self._excerpt(body), _seconds_in(response.headers.get("retry-after"))
        if (status := response.status_code) != 200:
            raise _failure(status, f"status {status}: {said}", wait)
        if encoding != "identity":
            raise ServiceError(f"the answer is compressed ({encoding[:20]!r}), but the request allows no compression")
        try:
            answer = json.loads(self._without_key(body.decode()))  # error messages quote parts of the answer
        except (ValueError, RecursionError) as error:
            kind = ServiceError if content is None else UnavailableError  # a health page may be any text
            raise kind(f"the answer is not JSON: {said}") from error
        if isinstance(answer, dict) and (failure := answer.get("error")):
            raise failure_of(failure, f"an error with status 200: {said}", wait)
        call.seconds.append(time.monotonic() - start)
        return answer

    def _connected(self) -> tuple[httpx2.Client, Breaker]:
        if (here := os.getpid()) not in self._connections:
            client = httpx2.Client(
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                mounts=dict.fromkeys(_LOOPBACK),  # without a proxy, whatever the environment says
            )
            # Of several threads that get here at once, the first one's client is used by all
            self._connections.setdefault(here, (client, Breaker(*self.breaker)))
        return self._connections[here]

    def _headers(self) -> dict[str, str]:
        # Not compressed: a small answer could unpack to an enormous one
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        return headers | ({"authorization": f"Bearer {self._key()}"} if self.api_key_env else {})

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env or "", "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise ValueError(
                f"`api_key_env`: the environment variable {self.api_key_env} is empty, or not printable ASCII: export "
                "a key"
            )
        return key

    def _excerpt(self, body: bytearray) -> str:
        text = " ".join(bytes(body[:2000]).decode(errors="replace").split())
        return "".join(filter(str.isprintable, redacted(self._without_key(text))))[:200] or "nothing"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key(), HIDDEN) if self.api_key_env else text


class ServedReward(TellsFailures):
    """
    Ask a service for scores: the base class of [`RemoteReward`] and [`JudgeReward`].

    Args:
        url: address of the service, without user and password.
        path: added to `url` unless `url` ends with it.
        name: key in the logs.
        timeout: most seconds for one request.
        deadline: most seconds for a whole call. A row without an answer by then has failed.
        retries: how often a failed request is sent again, after the wait that the server asks for, or after random
            waits of up to 1, 2, 4 … 30 seconds.
        max_concurrency: most requests at once.
        max_characters: most characters of a prompt or completion. A row with a longer text is not sent: it has failed.
        breaker_failures, breaker_seconds: if `breaker_failures` requests in a row failed, each with all its retries,
            further requests fail without being sent for `breaker_seconds`. Then one request is sent, and the others
            wait for its outcome.
        api_key_env: environment variable with a bearer token, such as `"OPENAI_API_KEY"`. The token is written
            nowhere.
        on_error: what happens if a row fails. `"raise"` raises an error, `"skip"` scores the row None, a number is the
            row's score.
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
        breaker_failures: int = 5,
        breaker_seconds: float = 30.0,
        api_key_env: str | None = None,
        on_error: OnError = "raise",
    ):
        self.url, self.path = _checked_url(url), path
        check_seconds(timeout=timeout, deadline=deadline, breaker_seconds=breaker_seconds)
        check_counts(max_concurrency=max_concurrency, max_characters=max_characters, breaker_failures=breaker_failures)
        check_counts(least=0, retries=retries)
        self.timeout, self.deadline, self.retries = timeout, deadline, retries
        self.max_concurrency, self.max_characters = max_concurrency, max_characters
        self.breaker_failures, self.breaker_seconds = breaker_failures, breaker_seconds
        self.api_key_env = api_key_env
        self.on_error = check_on_error(on_error)
        self.__name__ = name
        whole = self.url if self.url.endswith(path) else self.url + path
        self._service = Service(whole, timeout, retries, (breaker_failures, breaker_seconds), api_key_env)

    def ask(self, function: Callable, jobs: Sequence, until: float) -> list[Any]:
        """Run `function(job)` for each job, in several threads; return each result or error, see [`in_threads`]."""
        return in_threads(function, jobs, self.max_concurrency, until, self.is_over)

    def is_over(self, outcome: Any) -> bool:
        """Return whether `on_error` is `"raise"`, and an outcome, or one of a list of outcomes, is a row's failure."""
        return self.on_error == "raise" and any(map(_is_mistake, outcome if isinstance(outcome, list) else [outcome]))

    def check(self, outcomes: Sequence[Any]) -> None:
        """If `on_error` is `"raise"`, raise a `RewardFailed` for the first row that failed."""
        errors = [(isinstance(error, StoppedError), row) for row, error in enumerate(outcomes) if _is_mistake(error)]
        if errors and self.on_error == "raise":
            row = min(errors)[1]  # a row that was not asked since another one failed is not the cause
            raise RewardFailed(self._describe(row, outcomes[row])) from outcomes[row]

    def settle(self, outcomes: Sequence[Any], log_metric: Any, metrics: dict[str, float | None]) -> list[float | None]:
        """
        Return the scores of a call's rows, and log `metrics`; raise an error as [`ServedReward.check`] does.

        Each error is replaced by the number `on_error`, or else by NaN; a [`WithheldError`] is always replaced by NaN.
        """
        self.check(outcomes)
        fallback = math.nan if self.on_error in ("skip", "raise") else float(self.on_error)
        failed = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        scores = list(outcomes)
        for row in failed:
            scores[row] = fallback if _is_mistake(outcomes[row]) else math.nan
        if outcomes and (failed or self.on_error != "raise"):
            cause = self._describe(failed[0], outcomes[failed[0]]) if failed else ""
            report_failures(self.__name__, len(failed), len(outcomes), cause, log_metric)
        log_to(log_metric, metrics, self)
        return scores

    def too_long(self, *texts: str) -> ServiceError | None:
        """Return an error if one of a row's texts has more than `max_characters`, else None."""
        longest = max(map(len, texts))
        if longest <= self.max_characters:
            return None
        return ServiceError(
            f"a text has {longest} characters, more than `max_characters` ({self.max_characters}): raise the setting, "
            "or shorten the text"
        )

    def _describe(self, row: int, error: Exception) -> str:
        what = str(error) if isinstance(error, (ServiceError, ValueError, TypeError)) else repr(error)
        return f"reward '{self.__name__}': completion {row}: {redacted(self._service.url)}: {what}"


class StoppedError(ServiceError):
    """Say that no request was sent for a row, since another row failed first."""


def in_threads(
    function: Callable, jobs: Sequence, threads: int, until: float, is_over: Callable[[Any], bool]
) -> list[Any]:
    """
    Run `function(job)` for each job, in several threads; return in order what each returned, or the error it raised.

    Once `is_over` is true of an outcome, no further job begins, and each job that has not ended gets a
    [`StoppedError`]. At `until` (of `time.monotonic`), each job that has not ended gets a [`ServiceError`]. Unlike an
    executor's, these threads are daemonic: neither Ctrl-C nor the end of Python waits for an answer.
    """
    outcomes: list[Any] = [StoppedError("not asked: another request failed")] * len(jobs)
    todo, done = deque(enumerate(jobs)), queue.SimpleQueue[tuple[int, Any]]()

    def work() -> None:
        while todo:
            try:
                i, job = todo.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                outcome = function(job)
            except Exception as error:
                outcome = error
            done.put((i, outcome))

    waiting = set(range(len(jobs)))
    try:
        for _ in range(min(threads, len(jobs))):
            threading.Thread(target=work, name="trl_ext-rewards", daemon=True).start()
        while waiting:
            i, outcomes[i] = done.get(timeout=max(until - time.monotonic(), 0))
            waiting.discard(i)
            if is_over(outcomes[i]):
                break
    except queue.Empty:
        for i in waiting:
            outcomes[i] = ServiceError("no answer before the deadline")
    finally:
        todo.clear()
    return outcomes


def failure_of(error: Any, message: str, wait: float | None = None) -> ServiceError:
    """Return the exception for an `error` in an answer with status 200; its `code`, if it has one, is the status."""
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return _failure(int(code) if code.isdecimal() and int(code) >= 400 else 503, message, wait)


def _failure(status: int, message: str, wait: float | None) -> ServiceError:
    if status in (408, 429) or (status >= 500 and status != 501):
        return UnavailableError(message, wait)
    return (RefusedError if status in (400, 413, 422) else ServiceError)(message)


def well_formed(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot write, by U+FFFD in a text, or in a list's or mapping's texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_score(score: Any, row: int) -> float | None:
    """Return a score that was read from JSON; raise a `TypeError` or `ValueError` unless it is finite or null."""
    if score is None:
        return None
    return finite_number(repr(score) if isinstance(score, bool) else score, row)


def _is_mistake(outcome: Any) -> bool:
    return isinstance(outcome, Exception) and not isinstance(outcome, WithheldError)


def _checked_url(url: Any) -> str:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        well = parts and parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # a port that is no number
        parts, well = None, False
    if not well or parts is None:
        raise ValueError(f"`url` must look like http://127.0.0.1:8000, got {redacted(url)!r}")
    if parts.username or parts.password:
        raise ValueError(
            "`url` must not contain a user or password: export a token, and name its variable in `api_key_env`"
        )
    if parts.query or parts.fragment:
        raise ValueError(f"`url` must not contain `?` or `#`, got {redacted(url)!r}")
    return url.rstrip("/")


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None)
    return asked if asked is not None else wait_random_exponential(multiplier=1, max=30)(state)


def _seconds_in(retry_after: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, as a number or a date; None if it has neither."""
    if retry_after is None:
        return None
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
