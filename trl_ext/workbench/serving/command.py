"""Serve a reward model, or a reward function, over HTTP, to RemoteReward of any number of trainings.

    trl-ext serve-reward outputs/reward
    trl-ext serve-reward path/to/file.py:function --port 8001

POST /score takes {"prompts": [...], "completions": [...], "finished": [...]} and returns {"scores": [...]}.
Completions of all clients are scored together. GET /health says whether the server runs, GET /metrics has its figures
for Prometheus.
"""

import argparse
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from ...runs import redacted
from ...upstream import need_server


def load(model: str, max_batch_tokens: int | None, dtype: str | None, device: str | None) -> Callable:
    """Return the function that scores: the reward function `file.py:function`, or one that calls a reward model."""
    if ".py:" in model:
        from ...rewards import load_reward

        given = {"--max_batch_tokens": max_batch_tokens, "--dtype": dtype, "--device": device}
        if unread := [flag for flag, value in given.items() if value is not None]:
            raise ValueError(f"{unread[0]} is for a model, and {model} is a function: leave it out")
        return load_reward(model)
    from ...cli.model_names import check_model
    from ...rewards import ModelReward

    check_model("MODEL", model, tokenizer=True)
    budget: dict[str, Any] = {} if max_batch_tokens is None else {"max_batch_tokens": max_batch_tokens}
    return ModelReward(model, dtype=dtype, device=device, **budget)


def listen(host: str, port: int, has_key: bool, without_key: bool = False) -> socket.socket:
    """
    Return a socket that listens at a host and port.

    Args:
        host: address of this machine.
        port: port; 0 takes a free one.
        has_key: whether clients must send a token.
        without_key: whether other machines may send requests without a token.

    Raises:
        ValueError: other machines could send requests without a token although `without_key` is False, or the socket
            cannot listen there.
    """
    if not (has_key or without_key or _is_loopback(host)):
        raise ValueError(
            f"--host {host} lets other machines in: export a token and name its variable by --api_key_env, or give "
            "--without_key if your network keeps others out"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error}; choose another one") from error


def main(arguments: list[str] | None = None) -> None:
    description, _, more = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "trl-ext serve-reward", description=description, epilog=more, formatter_class=form
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a reward model, or file.py:function")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; this machine alone by default")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one, which is printed")
    parser.add_argument("--name", help="name of the model, which clients may ask for; by default its folder's")
    parser.add_argument("--max_batch_size", type=int, default=64, help="completions scored in one call")
    parser.add_argument(
        "--max_wait_ms", type=float, default=10.0, help="milliseconds that a batch waits for more rows"
    )
    parser.add_argument("--max_batch_tokens", type=int, help="tokens in one forward pass, padding included")
    parser.add_argument(
        "--max_queue_rows", type=int, default=4096, help="completions that may wait; more are answered 503"
    )
    parser.add_argument("--max_rows", type=int, default=1024, help="completions in one request")
    parser.add_argument("--max_characters", type=int, default=100_000, help="characters of one prompt or completion")
    parser.add_argument("--max_body_bytes", type=int, default=32 * 2**20, help="bytes of one request")
    parser.add_argument("--api_key_env", help="environment variable with the token that clients must send")
    parser.add_argument("--without_key", action="store_true", help="let others than this machine in without a token")
    parser.add_argument("--dtype", help="dtype of the model's weights, such as bfloat16; by default as saved")
    parser.add_argument("--device", help="device of the model, such as cuda:1")
    args = parser.parse_args(arguments)
    try:
        need_server()
        for flag in ("max_batch_size", "max_queue_rows", "max_rows", "max_characters", "max_body_bytes"):
            if getattr(args, flag) < 1:
                raise ValueError(f"--{flag} must be 1 or more, got {getattr(args, flag)}")
        if not 0 <= args.max_wait_ms <= 60_000:
            raise ValueError(f"--max_wait_ms must be 0 to 60000, got {args.max_wait_ms}")
        key = os.environ.get(args.api_key_env, "").strip() if args.api_key_env else None
        if key == "":
            raise ValueError(
                f"--api_key_env: the environment variable {args.api_key_env} is empty or not set: export a token"
            )
        listening = listen(args.host, args.port, key is not None, args.without_key)
        function = load(args.model, args.max_batch_tokens, args.dtype, args.device)
        identity = identity_of(function)  # now, since the files may change while the server runs
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{parser.prog}: error: {redacted((str(error) or repr(error)).splitlines()[0])}", file=sys.stderr)
        sys.exit(2)
    serve(function, identity, args, key, listening)


def identity_of(function: Callable) -> str:
    """Return a short hash of the weights or the function that are served, from which nothing else can be read."""
    import xxhash

    from ...runs import source_identity

    return f"xxh3:{xxhash.xxh3_128(source_identity(function).encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def serve(function: Callable, identity: str, args: Any, key: str | None, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; then answer the requests that are open, for at most 30 seconds, and return."""
    import uvicorn

    from ...upstream import get_callable_name
    from .app import Batcher, Limits, make_app, scorer

    limits = Limits(
        args.max_batch_size,
        args.max_wait_ms / 1000,
        args.max_queue_rows,
        args.max_rows,
        args.max_characters,
        args.max_body_bytes,
    )
    name = args.name or get_callable_name(function)
    app = make_app(Batcher(scorer(function), limits), name, key, identity)
    config = uvicorn.Config(
        app,
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
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises after it has answered the open requests
        uvicorn.Server(config).run(sockets=[listening])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


if __name__ == "__main__":
    main()
