"""Define the web application of `trl-ext serve-reward`, which scores requests of several clients in one batch."""

import asyncio
import hmac
import json
import logging
import queue
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...rewards import Member, text_of, well_formed
from ...runs import redacted

logger = logging.getLogger("trl_ext.serve_reward")
_SIZES = tuple(2**power for power in range(11))
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True)
class Limits:
    """
    Set the limits of a server. A row is a prompt with its completion.

    Args:
        max_batch_size: most rows scored in one call; a request with more rows is scored in a call of its own.
        max_wait: seconds that a batch waits for more rows after its first request has come.
        max_queue_rows: most rows that wait or are being scored; a request that would exceed it is answered 503.
        max_rows: most rows in one request; a request with more is answered 413.
        max_characters: most characters of a prompt or completion; a request with a longer one is answered 413.
        max_body_bytes: most bytes of a request; a longer one is answered 413.
        body_seconds: seconds in which a request must arrive; a slower one is answered 408.
    """

    max_batch_size: int = 64
    max_wait: float = 0.01
    max_queue_rows: int = 4096
    max_rows: int = 1024
    max_characters: int = 100_000
    max_body_bytes: int = 32 * 2**20
    body_seconds: float = 30.0


class Refusal(Exception):
    """Refuse a request: answer it with an HTTP status and a sentence that says why."""

    def __init__(self, status: int, why: str, **headers: str):
        super().__init__(why)
        self.status, self.headers = status, headers


@dataclass(eq=False)
class Job:
    """Hold a request that waits for its scores."""

    prompts: list
    completions: list
    finished: list[bool] | None
    answer: asyncio.Future
    since: float = field(default_factory=time.monotonic)

    @property
    def kind(self) -> tuple[bool, bool]:
        """
        Return whether the prompts are texts (else messages), and whether `finished` is None.

        Only jobs that agree in both are scored in one call, since a reward function is given texts or messages.
        """
        return isinstance(self.prompts[0], str), self.finished is None


class Meters:
    """
    Hold the Prometheus metrics that `/metrics` shows.

    Args:
        waiting: function that returns how many rows wait or are being scored.
    """

    def __init__(self, waiting: Callable[[], float]):
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "trl_ext_reward"}
        self.requests = Counter("requests", "Requests to score, by status", ["status"], **made)
        self.rows = Counter("rows", "Completions scored", **made)
        self.batch_rows = Histogram("batch_rows", "Completions in one call", buckets=_SIZES, **made)
        self.request_seconds = Histogram("request_seconds", "From request to answer", buckets=_SECONDS, **made)
        self.scoring_seconds = Histogram("scoring_seconds", "Duration of one call", buckets=_SECONDS, **made)
        Gauge("waiting_rows", "Completions that wait or are scored", **made).set_function(waiting)


class Batcher:
    """
    Score the requests of all clients in one thread, those that come at about the same time in one call.

    If a call fails, each of its requests is scored again in a call of its own, so that a bad row of one client does
    not fail the requests of others.

    Args:
        score: function of prompts, completions and finished that returns the scores.
        limits: see [`Limits`].
    """

    def __init__(self, score: Callable[[list, list, Any], list[float | None]], limits: Limits):
        self.score, self.limits = score, limits
        self.waiting = 0  # rows; only the event loop's thread changes it
        self.batches: deque[int] = deque(maxlen=10_000)  # rows of the last calls
        self.meters = Meters(lambda: self.waiting)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # Daemonic: the process can end while a call hangs
        threading.Thread(target=self._run, name="trl_ext-scorer", daemon=True).start()

    @property
    def median_batch(self) -> float:
        """Return the median number of rows of the last 10,000 calls."""
        return statistics.median(self.batches)

    async def scores(self, prompts: list, completions: list, finished: list[bool] | None) -> list[float | None]:
        """Return the scores of one request; raise a [`Refusal`] if too many rows are waiting."""
        if self.waiting and self.waiting + len(prompts) > self.limits.max_queue_rows:
            raise Refusal(503, f"{self.waiting} completions are waiting: try again later", retry_after="1")
        job = Job(prompts, completions, finished, asyncio.get_running_loop().create_future())
        self.waiting += len(prompts)
        self._jobs.put(job)
        try:
            return await job.answer
        finally:
            self.waiting -= len(prompts)

    def _run(self) -> None:
        held: Job | None = None
        while True:
            jobs = [held or self._jobs.get()]
            rows, held = len(jobs[0].prompts), None
            close = jobs[0].since + self.limits.max_wait
            while rows < self.limits.max_batch_size:
                try:
                    job = self._jobs.get(timeout=max(close - time.monotonic(), 0))
                except queue.Empty:
                    break
                if rows + len(job.prompts) > self.limits.max_batch_size:
                    held = job
                    break
                jobs.append(job)
                rows += len(job.prompts)
            kinds = defaultdict(list)
            for job in jobs:
                if not job.answer.done():  # else its client has gone
                    kinds[job.kind].append(job)
            for group in kinds.values():
                self._answer(group)

    def _answer(self, jobs: list[Job]) -> None:
        prompts = [prompt for job in jobs for prompt in job.prompts]
        completions = [completion for job in jobs for completion in job.completions]
        finished = None if jobs[0].finished is None else [end for job in jobs for end in job.finished or ()]
        start = time.monotonic()
        try:
            scores: Any = self.score(prompts, completions, finished)
        except BaseException as error:  # also `sys.exit`: if this thread ended, all clients would wait for ever
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([job])
                return
            scores = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.batches.append(len(prompts))
        self.meters.batch_rows.observe(len(prompts))
        self.meters.scoring_seconds.observe(time.monotonic() - start)
        first = 0
        for job in jobs:
            part = scores if isinstance(scores, Exception) else scores[first : first + len(job.prompts)]
            first += len(job.prompts)
            job.answer.get_loop().call_soon_threadsafe(_settle, job.answer, part)


def _settle(answer: asyncio.Future, scores: Any) -> None:
    if answer.done():
        return
    if isinstance(scores, Exception):
        answer.set_exception(scores)
    else:
        answer.set_result(scores)


def scorer(function: Callable) -> Callable[[list, list, Any], list[float | None]]:
    """Return the function that a [`Batcher`] scores with: it calls a reward function and checks its scores."""
    member = Member(function)

    def score(prompts: list, completions: list, finished: Any) -> list[float | None]:
        known = {} if finished is None else {"finished": finished}
        return member(prompts=prompts, completions=completions, completion_ids=None, **known)

    return score


def make_app(batcher: Batcher, name: str, key: str | None = None, identity: str | None = None) -> Starlette:
    """
    Make the application: POST /score, GET /health, GET /metrics.

    Args:
        batcher: scores the requests.
        name: name of the model; a request that names another one is refused.
        key: bearer token that clients must send, except to `/health`; None demands no token.
        identity: hash of the weights that are served; each answer has it, so that a client notices other weights.
    """
    meters, who = batcher.meters, {"model": name, **({} if identity is None else {"identity": identity})}

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise Refusal(401, "the request needs a bearer token", www_authenticate="Bearer")

    async def answer(request: Request) -> Response:
        check_key(request)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refusal(415, "the content type must be application/json")  # which a page of another site cannot send
        prompts, completions, finished = rows_in(await read_body(request, batcher.limits), batcher.limits, name)
        scoring = asyncio.ensure_future(batcher.scores(prompts, completions, finished))
        leaving = asyncio.ensure_future(_until_gone(request))
        await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not scoring.done():
            scoring.cancel()  # nobody waits for it any more: it need not be scored
            raise Refusal(499, "the client has gone")
        scores = scoring.result()
        meters.rows.inc(len(scores))
        return JSONResponse({"scores": scores, **who})

    async def score(request: Request) -> Response:
        start = time.monotonic()
        try:
            response = await answer(request)
        except Refusal as refusal:
            headers = {header.replace("_", "-"): value for header, value in refusal.headers.items()}
            response = JSONResponse({"error": str(refusal)}, refusal.status, headers)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            cause = error.__cause__ or error
            # Such as a row that the model cannot read, or messages that its chat template refuses
            is_of_a_row = isinstance(cause, (ValueError, TypeError, TemplateError))
            if not is_of_a_row:
                logger.exception("scoring failed")
            message = redacted(str(cause))[:300] if is_of_a_row else f"scoring failed: {type(cause).__name__}"
            response = JSONResponse({"error": message}, 422 if is_of_a_row else 500)
        meters.requests.labels(response.status_code).inc()
        meters.request_seconds.observe(time.monotonic() - start)
        return response

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **who})

    async def metrics(request: Request) -> Response:
        try:
            check_key(request)
        except Refusal as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/score", score, methods=["POST"]), Route("/health", health), Route("/metrics", metrics)]
    )


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limits: Limits) -> Any:
    """Return the JSON in a request's body; raise a [`Refusal`] if the body is too long, too slow, or not JSON."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise Refusal(413, f"the request is longer than {limits.max_body_bytes} bytes")
    except TimeoutError:
        raise Refusal(408, f"the request did not arrive within {limits.body_seconds:g} seconds") from None
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        raise Refusal(422, "the request is not JSON in UTF-8") from None


def rows_in(body: Any, limits: Limits, name: str) -> tuple[list, list, list[bool] | None]:
    """Return the `prompts`, `completions` and `finished` of a request; raise a [`Refusal`] if one of them is wrong."""
    if not isinstance(body, dict) or not isinstance(body.get("prompts"), list):
        raise Refusal(422, "the request must be an object with `prompts` and `completions`, two lists")
    if unknown := body.keys() - {"prompts", "completions", "finished", "model"}:
        raise Refusal(
            422, f"the key {min(unknown)[:40]!r} is not known: give only `prompts`, `completions`, `finished`, `model`"
        )
    prompts, completions, finished = body["prompts"], body.get("completions"), body.get("finished")
    count = len(prompts)
    if not isinstance(completions, list) or len(completions) != count or not count:
        raise Refusal(422, "`prompts` and `completions` must be lists of the same length, 1 or more")
    if count > limits.max_rows:
        raise Refusal(413, f"one request may have {limits.max_rows} completions, got {count}")
    if finished is not None and not (isinstance(finished, list) and list(map(type, finished)) == [bool] * count):
        raise Refusal(422, "`finished` must be null, or a list with true or false for each completion")
    if body.get("model") not in (None, name):
        raise Refusal(404, f"the model here is {name!r}, got `model` {str(body['model'])[:40]!r}")
    rows = prompts + completions
    if not (all(isinstance(row, str) for row in rows) or all(_is_conversation(row) for row in rows)):
        raise Refusal(422, "prompts and completions must be all texts, or all lists of messages with role and content")
    try:
        prompts, completions = well_formed(prompts), well_formed(completions)
    except RecursionError:
        raise Refusal(422, "a message holds lists or objects that are nested too deeply") from None
    for row in rows:
        if (length := len(text_of(row))) > limits.max_characters:
            raise Refusal(413, f"a text of {length} characters is longer than {limits.max_characters}")
    return prompts, completions, finished


def _is_conversation(row: Any) -> bool:
    return (
        isinstance(row, list)
        and bool(row)
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in row
        )
    )
