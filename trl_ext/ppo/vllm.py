"""Check the log-probs of vLLM's answers, and recover when its server goes away."""

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import httpx2
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..runs.marker import IncompleteCheckpoint, read_marker
from ..runs.processes import on_first

_TRIES = 3  # attempts at one rollout with a server that responds, but fails each time
_PATIENCE = 60.0  # seconds to wait for a server's configuration, which takes long while the server generates


class ServerLost(ConnectionError):
    """Say that the vLLM server did not come back in time, that it refuses a request, or that it fails each time."""


def check_logprobs(engine: Any) -> None:
    """
    Wrap `engine.generate`: each call raises a `RuntimeError` unless vLLM returned a log-prob for each sampled token.

    The log-probs are of the sampled distribution, after temperature and truncation (`processed_logprobs`); in greedy
    decoding, of the distribution at temperature 1.
    """
    generate = engine.generate

    @functools.wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> tuple:
        output = generate(*args, **kwargs)
        _, ids, logprobs, of_tokens = output
        if ids:
            sampled_logprobs(ids, logprobs, of_tokens)
        return output

    engine.generate = checked


def sampled_logprobs(
    ids: list[list[int]],
    logprobs: list[list[list[float | None]]] | None,
    of_tokens: list[list[list[int]]] | None,
) -> list[list[float]]:
    """
    Return the log-prob of each token that vLLM sampled.

    Args:
        ids: the tokens of each answer.
        logprobs: for each token of each answer a list that begins with the token's log-prob, nats; TRL returns None
            for NaN.
        of_tokens: likewise, the token that each log-prob belongs to; None if vLLM does not return these tokens.

    Returns:
        One number for each token, nats.

    Raises:
        RuntimeError: a log-prob is missing, not a finite number, or belongs to another token.
    """
    if logprobs is None:
        raise RuntimeError(
            "vLLM returned no log-probs of what it sampled: this version of vLLM or of TRL is not supported."
        )
    for row, (tokens, given) in enumerate(zip(ids, logprobs, strict=True)):
        returned = [each[0] for each in of_tokens[row]] if of_tokens is not None else tokens
        if len(given) != len(tokens) or returned != tokens:
            raise RuntimeError(
                f"vLLM returned log-probs for the wrong tokens of answer {row}: {len(given)} log-probs of "
                f"{returned[:8]} … for the {len(tokens)} tokens {tokens[:8]} …. This version of vLLM or of TRL is not "
                "supported."
            )
        for place, (logprob, *_) in enumerate(given):
            if logprob is None or not math.isfinite(logprob):
                raise RuntimeError(
                    f"vLLM sampled token {tokens[place]} at place {place} of answer {row} with the log-prob "
                    f"{'NaN' if logprob is None else logprob}: the training has diverged, or the dtype of vLLM is too "
                    "narrow for this model."
                )
    return [[float(each[0]) for each in given] for given in logprobs]  # type: ignore[arg-type]


@contextmanager
def plain_errors() -> Iterator[None]:
    """If the block fails because the trainer has no GPU to send weights from, raise an error that says what to do."""
    try:
        yield
    except NotImplementedError as error:
        if "NCCL" not in str(error):
            raise
        raise ValueError(
            "`vllm_mode: server` sends weights over NCCL, so the trainer needs a GPU, too. Train on a GPU, or leave "
            "out `use_vllm`."
        ) from None


def check_loadable(engine: Any) -> None:
    """
    Raise a `ValueError` if vLLM in this process has packed its weights for CPU kernels, and cannot load new ones.

    vLLM's parameters are empty in that case.
    """
    if (llm := getattr(engine, "llm", None)) is None or engine.accelerator.device.type != "cpu":
        return
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model  # as TRL's `sync_weights` reaches it
    if not all(parameter.numel() for parameter in model.parameters()):
        raise ValueError(
            "`use_vllm=True` does not work on a CPU: vLLM cannot load updated weights there, and would go on sampling "
            "from the initial policy. Train on a GPU, or leave out `use_vllm`."
        )


def check_server(args: Any) -> None:
    """
    Wait for the vLLM server, and raise if it is set up wrongly, before any model is loaded.

    Raises:
        ServerLost: the server does not answer within `vllm_server_timeout`.
        ValueError: the server was started without a flag that TRL or PPO needs; the message names the flag.
    """
    if args.use_vllm and args.vllm_mode == "server" and args.process_index == 0:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        _waited(lambda: _configuration(url), url, args.vllm_server_timeout)


def _configuration(url: str) -> dict[str, Any]:
    """Return the configuration of a vLLM server; raise if PPO cannot use it."""
    try:
        answer = httpx2.get(f"{url.rstrip('/')}/server_info", params={"config_format": "json"}, timeout=_PATIENCE)
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
        raise ValueError(
            f"{url!r} is not the address of a vLLM server. Give one such as http://127.0.0.1:8000."
        ) from None
    if answer.status_code == 404:
        raise _restart(url, "does not show its configuration", "VLLM_SERVER_DEV_MODE=1 in its environment")
    try:
        config = answer.raise_for_status().json()["vllm_config"]
        transfer, mode = config["weight_transfer_config"], config["model_config"]["logprobs_mode"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"The server at {url} is not a vLLM server: check host and port.") from None
    if transfer is None:
        flag = """`--weight-transfer-config '{"backend": "nccl"}'`"""
        raise _restart(url, "does not accept new weights, and would keep answering with its first ones", flag)
    if mode != "processed_logprobs":
        what = f"returns {mode}, not the log-probs of the distribution that it samples from"
        raise _restart(url, what, "`--logprobs-mode processed_logprobs`")
    return config


def _restart(url: str, what: str, how: str) -> ValueError:
    return ValueError(f"The vLLM server at {url} {what}: restart it with {how}.")


def _waited(ask: Callable[[], Any], url: str, seconds: float, reason: str | None = None) -> Any:
    """Call `ask` again until the server answers, and return the result; raise [`ServerLost`] after `seconds`."""
    end = time.monotonic() + seconds
    has_printed = False
    while True:
        try:
            return ask()
        except (httpx2.HTTPError, OSError) as error:
            reason = reason or type(error).__name__
        if not has_printed:
            print(
                f"The vLLM server at {url} does not answer ({reason}): waiting for it, up to {seconds:g} s.",
                flush=True,
            )
        has_printed = True
        if time.monotonic() >= end:
            raise ServerLost(
                f"The vLLM server at {url} has not answered for {seconds:g} s (`vllm_server_timeout`): {reason}. "
                "Start the server, then run the same command again."
            )
        time.sleep(min(1.0, seconds / 10))


class ServerGuard:
    """
    Notice that a vLLM server is gone or was restarted, wait for it, and generate the rollout again.

    TRL's calls to its client go through this class. If the server fails, the call returns no answers instead of
    raising, so all processes reach the same point. There they wait for the server, send the weights again and generate
    the rollout again. A restarted server has another `instance_id`; it would answer with the weights on its disk.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._failure: Exception | None = None  # on the first process: why the rollout has no answers
        if not trainer.accelerator.is_main_process:
            return
        from requests.adapters import HTTPAdapter  # vLLM requires it, so it is installed wherever this runs

        self._client = client = trainer.vllm_generation.vllm_client
        # TRL would try again for a minute, in silence, and a server restarted meanwhile would answer with old weights
        client.session.mount(client.base_url, HTTPAdapter(pool_maxsize=64))
        self._instance = _configuration(client.base_url).get("instance_id")
        self._generate, client.generate = client.generate, self._guarded_generate
        self._update, client.update_named_params = client.update_named_params, self._guarded_update
        client.reset_prefix_cache = functools.partial(self._ask, client.reset_prefix_cache)

    def answered(self, draw: Callable[[], tuple]) -> tuple:
        """
        Call `draw`, which sends the weights and generates by TRL, until the server has answered; return its result.

        Raises:
            ServerLost: on all processes: the server does not come back in time, refuses the request, or has failed
                three times.
        """
        for _ in range(_TRIES):
            if (answers := draw())[0]:
                return answers
            self._recover()
        raise ServerLost(f"The vLLM server has failed {_TRIES} times in a row. See its own output for the cause.")

    def _recover(self) -> None:
        try:
            on_first(self._reach_again)
        except ValueError as error:
            raise ServerLost(str(error)) from None
        self.trainer._last_loaded_step = -1  # TRL then sends the weights

    def _reach_again(self) -> None:
        failure, self._failure, url = self._failure, None, self._client.base_url
        if _is_refusal(failure):
            raise ServerLost(f"The vLLM server at {url} refuses the request. {failure}")
        _waited(self._connect, url, self.trainer.args.vllm_server_timeout, type(failure).__name__)

    def _connect(self) -> None:
        """If the server was restarted, connect to it again, so that weights can be sent to it."""
        instance = _configuration(self._client.base_url).get("instance_id")
        if instance != self._instance:
            self._client.close_communicator()
            self._client.init_communicator(device=self.trainer.accelerator.device)
            self._instance = instance
            print(
                f"The vLLM server at {self._client.base_url} was restarted, so it gets the weights again.", flush=True
            )

    def _guarded_generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = self._ask(self._while_alive, *args, **kwargs)
        return {"prompt_ids": [], "completion_ids": [], "logprobs": []} if output is None else output

    def _while_alive(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Wait for the answers; raise once the server no longer responds, since a call to a hung server never ends."""
        answers: Future = Future()

        def ask() -> None:
            try:
                answers.set_result(self._generate(*args, **kwargs))
            except Exception as error:
                answers.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        while not wait([answers], timeout=_PATIENCE).done:
            self._check_instance()
        return answers.result()

    def _guarded_update(self, metadata: list, named_params: Iterator[tuple[str, Tensor]]) -> None:
        self._ask(self._update, metadata, named_params)
        for _ in named_params:  # gathering is for all processes, and at the end adapters are unmerged
            pass

    def _ask(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ask the server by `ask`; return None if the server fails, or has failed since the last recovery."""
        if self._failure is not None:
            return None
        try:
            self._check_instance()  # NCCL would wait for ever for a server that has gone
            output = ask(*args, **kwargs)
            self._check_instance()
            return output
        except Exception as error:
            # What requests raises is an OSError, and TRL a bare Exception for any answer but 200
            if not (isinstance(error, (OSError, ValueError, httpx2.HTTPError)) or type(error) is Exception):
                raise
            self._failure = error
            return None

    def _check_instance(self) -> None:
        if _configuration(self._client.base_url).get("instance_id") != self._instance:
            raise ConnectionResetError("it was restarted")


def _is_refusal(error: Exception | None) -> bool:
    """Return whether TRL's client reports that the server refused the request (HTTP status 4xx)."""
    return type(error) is Exception and str(error).startswith("Request failed: 4")


def save_last_step(trainer: Any) -> str:
    """Save a checkpoint of the last finished step, unless it exists; return a sentence that says where it is."""
    step = trainer.state.global_step
    if not step:
        return "No step was finished."
    checkpoint = os.path.join(trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
    trainer._check_saving(wait=True)  # a save may be under way
    if not _is_complete(checkpoint):
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer._check_saving(wait=True)
    if not _is_complete(checkpoint):  # `save_only_model`, or a full disk with `on_save_failure: continue`
        return "The same command resumes from the newest complete checkpoint, if there is one."
    return f"The training so far is saved: the same command resumes from {checkpoint}."


def _is_complete(checkpoint: str) -> bool:
    try:
        return bool(read_marker(checkpoint))
    except IncompleteCheckpoint:
        return False
