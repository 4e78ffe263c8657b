"""Serve a reward model, or a reward function, over HTTP, to the `RemoteReward` of any number of training runs.

    trl-ext serve-reward outputs/reward
    trl-ext serve-reward path/to/file.py:function --port 8001

POST /score takes {"prompts": [...], "completions": [...], "finished": [...]} and returns {"scores": [...]}.
Completions of all clients are scored together. GET /health says whether the server runs, GET /metrics returns metrics
for Prometheus.
"""

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...data import is_messages
from ...rewards import Member, ModelReward, load_reward, reward_identity, well_formed
from ...runs import redacted
from ...upstream import get_callable_name

logger = logging.getLogger("trl_ext.serve_reward")
_SIZES = tuple(2**power for power in range(11))
_HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}


@dataclass(frozen=True)
class Limits:
    """
    Set the limits of a server. A row is a prompt with its completion.

    Args:
        max_batch_size: number of rows at which a batch is scored without waiting for more requests.
        max_wait: seconds that a batch waits for more rows after its first request.
        max_queue_rows: most rows that wait or are being scored. A request that would exceed this gets status 503, and
            a request that has more rows by itself gets 413.
        max_body_bytes: most bytes of a request; a longer request gets status 413.
    """

    max_batch_size: int = 64
    max_wait: float = 0.01
    max_queue_rows: int = 4096
    max_body_bytes: int = 32 * 2**20


class Refusal(Exception):
    """Raised to refuse a request, with the HTTP status of the answer and a sentence that says why."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def check(*rules: tuple[object, int, str]) -> None:
    """Raise a [`Refusal`] for the first broken rule; a rule is a tuple (is it broken, HTTP status, sentence)."""
    for is_broken, status, why in rules:
        if is_broken:
            raise Refusal(status, why)


@dataclass(eq=False)
class Job:
    """Hold a request that arrived at the time `since`, and the future `answer`, whose result will be its scores."""

    prompts: list
    completions: list
    finished: list[bool] | None
    answer: Future = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """
    Score the requests of all clients in one thread. Requests that come at about the same time are scored together.

    If a call of the reward function fails, each of its requests is scored again in a separate call, so that a bad row
    of one client does not make the requests of others fail.

    Args:
        function: reward function with TRL's signature.
        limits: see [`Limits`].
    """

    def __init__(self, function: Callable, limits: Limits):
        self.member = Member(function)
        self.limits = limits
        self.waiting = 0  # rows; only the event loop's thread changes it
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "trl_ext_reward"}
        self.batch_rows = Histogram("batch_rows", "Completions in one call", buckets=_SIZES, **made)
        self.requests = Counter("requests", "Requests, by path and status", ["path", "status"], **made)
        Gauge("waiting_rows", "Completions that wait or are scored", **made).set_function(lambda: self.waiting)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # Daemonic: the process can end while a call hangs
        threading.Thread(target=self._run, name="trl_ext-scorer", daemon=True).start()

    async def scores(self, prompts: list, completions: list, finished: list[bool] | None) -> list[float | None]:
        """
        Return the scores of one request's rows; raise a [`Refusal`] if too many rows are waiting. `finished` says
        whether each completion is finished; None if it is unknown.
        """
        is_full = self.waiting + len(prompts) > self.limits.max_queue_rows
        check((is_full, 503, f"too many completions are waiting ({self.waiting}): try again later"))
        job = Job(prompts, completions, finished)
        self.waiting += len(prompts)
        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(job.answer)
        finally:
            self.waiting -= len(prompts)

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            close = jobs[0].since + self.limits.max_wait
            while sum(len(job.prompts) for job in jobs) < self.limits.max_batch_size:
                try:
                    jobs.append(self._jobs.get(timeout=max(close - time.monotonic(), 0)))
                except queue.Empty:
                    break
            kinds = defaultdict(list)  # a reward function is given texts or messages, and `finished` of all or none
            for job in jobs:
                if job.answer.set_running_or_notify_cancel():  # else its client has gone
                    kinds[isinstance(job.prompts[0], str), job.finished is None].append(job)
            for group in kinds.values():
                self._answer(group)

    def _answer(self, jobs: list[Job]) -> None:
        rows: dict[str, Any] = {
            "prompts": [prompt for job in jobs for prompt in job.prompts],
            "completions": [completion for job in jobs for completion in job.completions],
        }
        if jobs[0].finished is not None:
            rows["finished"] = [end for job in jobs for end in job.finished or ()]
        try:
            scores = iter(self.member(completion_ids=None, **rows))
        except BaseException as error:  # also `sys.exit`: if this thread ended, all clients would wait for ever
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                return
            for job in jobs:
                self._answer([job])
            return
        self.batch_rows.observe(len(rows["prompts"]))
        for job in jobs:
            job.answer.set_result([next(scores) for _ in job.prompts])


def make_app(batcher: Batcher, name: str, key: str | None = None, identity: str | None = None) -> Starlette:
    """
    Make the application: POST /score, GET /health, GET /metrics.

    Args:
        batcher: the [`Batcher`] that scores the requests.
        name: name of the model; a request that names another model is refused.
        key: bearer token that clients must send, except to `/health`; None demands no token.
        identity: hash of the served weights, which each answer contains so that clients notice a change; None for no
            hash.
    """
    who = {"model": name, **({} if identity is None else {"identity": identity})}

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap an endpoint: check the client's token, count the request, and turn exceptions into answers."""

        async def call(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            is_wrong = key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode())
            try:
                check((is_wrong, 401, "the request has no bearer token, or not the token of this server"))
                response = await endpoint(request)
            except Refusal as refusal:
                headers = _HEADERS.get(refusal.status)
                response = JSONResponse({"error": str(refusal)}, refusal.status, headers)
            except Exception as error:
                cause = error.__cause__ or error
                # Such as a row that the model cannot read, or messages that its chat template refuses
                is_of_a_row = isinstance(cause, (ValueError, TypeError, TemplateError))
                if not is_of_a_row:
                    logger.exception("scoring failed")
                message = redacted(str(cause))[:300] if is_of_a_row else f"scoring failed: {type(cause).__name__}"
                response = JSONResponse({"error": message}, 422 if is_of_a_row else 500)
            batcher.requests.labels(request.url.path, response.status_code).inc()
            return response

        return call

    async def score(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        # A page of another site in a browser cannot send this type
        check((kind != "application/json", 415, "the content type must be application/json"))
        rows = rows_in(await read_body(request, batcher.limits), batcher.limits, name)
        scoring = asyncio.ensure_future(batcher.scores(*rows))
        leaving = asyncio.ensure_future(_until_gone(request))
        await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not scoring.done():
            scoring.cancel()  # nobody waits for it any more: it need not be scored
            return Response(status_code=499)
        return JSONResponse({"scores": scoring.result(), **who})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **who})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(batcher.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/score", guarded(score), methods=["POST"]),
            Route("/health", health),
            Route("/metrics", guarded(metrics)),
        ]
    )


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limits: Limits) -> Any:
    """
    Return a request's body, parsed as JSON; None if it is not JSON.

    Raises:
        Refusal: the body is longer than `limits` allows.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        too_long = len(body) > limits.max_body_bytes
        check((too_long, 413, f"the request is longer than {limits.max_body_bytes} bytes"))
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        return None


def rows_in(body: Any, limits: Limits, name: str) -> tuple[list, list, list[bool] | None]:
    """
    Return a request's `prompts`, `completions` and `finished` (None if not given) from its parsed JSON, `body`.

    Raises:
        Refusal: one of the three is invalid, there are more rows than `limits` allows, or the request asks for another
            model than `name`.
    """
    body = body if isinstance(body, dict) else {}
    prompts, completions, finished = (body.get(each) for each in ("prompts", "completions", "finished"))
    rows = prompts + completions if isinstance(prompts, list) and isinstance(completions, list) else []
    count = len(rows) // 2
    ends = [bool] * count if finished is None else [*map(type, finished)] if isinstance(finished, list) else []
    check(
        (
            not rows or len(prompts) != count or len(rows) % 2,
            422,
            "the request must be JSON in UTF-8, with two lists of the same length, `prompts` and `completions`",
        ),
        (count > limits.max_queue_rows, 413, f"a request may have {limits.max_queue_rows} completions at most"),
        (ends != [bool] * count, 422, "`finished` must be null, or a list with true or false for each completion"),
        (body.get("model") not in (None, name), 404, f"this server serves only the model {name!r}"),
        (
            not (all(isinstance(row, str) for row in rows) or all(map(is_messages, rows))),
            422,
            "prompts and completions must be all texts, or all lists of messages with role and content",
        ),
    )
    try:
        return well_formed(prompts), well_formed(completions), finished
    except RecursionError:
        raise Refusal(
            422, "a message nests lists or objects too deeply to be read: send its content as text"
        ) from None


def load(model: str, **settings: Any) -> Callable:
    """
    Return the function that `model` names as `file.py:function`, or a [`ModelReward`] of the folder or hub name.

    `settings` are arguments of [`ModelReward`]; those that are None are left out.
    """
    if ".py:" in model:
        return load_reward(model)
    return ModelReward(model, **{name: value for name, value in settings.items() if value is not None})


def main(arguments: list[str] | None = None) -> None:
    description, _, more = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "trl-ext serve-reward", description=description, epilog=more, formatter_class=form
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub name of a reward model, or path/to/file.py:function")
    add("--host", default="127.0.0.1", help="address to listen on; by default only this machine can connect")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free port, which is printed")
    add("--name", help="name of the model, which clients may ask for; by default the name of its folder")
    add("--max_batch_size", type=int, default=64, help="number of completions at which a batch is full")
    add("--max_wait_ms", type=float, default=10.0, help="milliseconds that a batch waits for more rows")
    add("--max_batch_tokens", type=int, help="tokens in one forward pass, padding included")
    add(
        "--max_queue_rows",
        type=int,
        default=4096,
        help="number of completions that may wait; further requests get status 503",
    )
    add("--max_body_bytes", type=int, default=32 * 2**20, help="most bytes of one request")
    add("--api_key_env", help="environment variable with the token that clients must send")
    add("--without_key", action="store_true", help="let other machines connect without a token")
    add("--dtype", help="dtype of the model's weights, such as bfloat16; by default as saved")
    add("--device", help="device of the model, such as cuda:1")
    args = parser.parse_args(arguments)
    key = os.environ.get(args.api_key_env, "").strip() if args.api_key_env else None
    is_local = args.host in ("127.0.0.1", "::1", "localhost")
    try:
        if key == "":
            raise ValueError(
                f"--api_key_env: the variable {args.api_key_env} is empty or not set: export a token in it"
            )
        if not (is_local or key or args.without_key):
            raise ValueError(
                f"--host {args.host} lets other machines connect: name the environment variable of a token by "
                "--api_key_env, or give --without_key if your network is closed"
            )
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listening = socket.create_server((args.host, args.port), family=family)
        function = load(args.model, max_batch_tokens=args.max_batch_tokens, dtype=args.dtype, device=args.device)
        identity = identity_of(function)  # now, since the files may change while the server runs
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{parser.prog}: error: {redacted((str(error) or repr(error)).splitlines()[0])}", file=sys.stderr)
        sys.exit(2)
    limits = Limits(args.max_batch_size, args.max_wait_ms / 1000, args.max_queue_rows, args.max_body_bytes)
    name = args.name or get_callable_name(function)
    config = uvicorn.Config(
        make_app(Batcher(function, limits), name, key, identity),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        limit_concurrency=2048,
        timeout_graceful_shutdown=30,
    )
    host, port = listening.getsockname()[:2]
    print(f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it", flush=True)
    # SIGINT and SIGTERM end it, after the requests that are open, or 30 seconds
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises after it has answered the open requests
        uvicorn.Server(config).run(sockets=[listening])


def identity_of(function: Callable) -> str:
    """
    Return a short hash that identifies the served weights or function, and reveals nothing else of them; a random one
    if they cannot be identified.
    """
    said = reward_identity(function) or uuid.uuid4().hex  # what has no identity is another at each start
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
