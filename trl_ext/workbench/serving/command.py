"""Serve a reward model, or a reward function, over HTTP, to RemoteReward of any number of trainings.

    trl-ext serve-reward outputs/reward
    trl-ext serve-reward path/to/file.py:function --port 8001

POST /score takes {"prompts": [...], "completions": [...], "finished": [...]} and returns {"scores": [...]}.
Completions of all clients are scored together. GET /health says whether the server runs, GET /metrics has its figures
for Prometheus.
"""

import argparse
import contextlib
import hashlib
import os
import socket
import sys
import uuid
from collections.abc import Callable
from typing import Any

from ...runs import redacted
from ...upstream import get_callable_name, need_server


def load(model: str, **settings: Any) -> Callable:
    """Return the function that scores: the reward function `file.py:function`, or one that calls a reward model."""
    from ...cli.arguments import check_model
    from ...rewards import ModelReward, load_reward

    if ".py:" in model:
        return load_reward(model)
    check_model("MODEL", model)
    return ModelReward(model, **{name: value for name, value in settings.items() if value is not None})


def main(arguments: list[str] | None = None) -> None:
    description, _, more = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "trl-ext serve-reward", description=description, epilog=more, formatter_class=form
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub name of a reward model, or file.py:function")
    add("--host", default="127.0.0.1", help="where to listen; this machine alone by default")
    add("--port", type=int, default=8000, help="0 takes a free one, which is printed")
    add("--name", help="name of the model, which clients may ask for; by default its folder's")
    add("--max_batch_size", type=int, default=64, help="completions at which a batch is full")
    add("--max_wait_ms", type=float, default=10.0, help="milliseconds that a batch waits for more rows")
    add("--max_batch_tokens", type=int, help="tokens in one forward pass, padding included")
    add("--max_queue_rows", type=int, default=4096, help="completions that may wait; more are answered 503")
    add("--max_body_bytes", type=int, default=32 * 2**20, help="bytes of one request")
    add("--api_key_env", help="environment variable with the token that clients must send")
    add("--without_key", action="store_true", help="let others than this machine in without a token")
    add("--dtype", help="dtype of the model's weights, such as bfloat16; by default as saved")
    add("--device", help="device of the model, such as cuda:1")
    args = parser.parse_args(arguments)
    key = os.environ.get(args.api_key_env, "").strip() if args.api_key_env else None
    is_local = args.host in ("127.0.0.1", "::1", "localhost")
    try:
        need_server()
        if key == "":
            raise ValueError(f"--api_key_env: the variable {args.api_key_env} is empty or not set: export a token")
        if not (is_local or key or args.without_key):
            raise ValueError(
                f"--host {args.host} lets other machines in: name a token's variable by --api_key_env, or give "
                "--without_key if your network keeps others out"
            )
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listening = socket.create_server((args.host, args.port), family=family)
        function = load(args.model, max_batch_tokens=args.max_batch_tokens, dtype=args.dtype, device=args.device)
        identity = identity_of(function)  # now, since the files may change while the server runs
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{parser.prog}: error: {redacted((str(error) or repr(error)).splitlines()[0])}", file=sys.stderr)
        sys.exit(2)
    import uvicorn

    from .app import Batcher, Limits, make_app

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
    """Return a short hash of the weights or the function that are served, from which nothing else can be read."""
    from ...rewards import reward_identity

    said = reward_identity(function) or uuid.uuid4().hex  # what has no identity is another at each start
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
