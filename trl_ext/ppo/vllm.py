"""Check the log-probs of vLLM's answers, and end a run with a checkpoint when its server goes away."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..runs.marker import read_marker
from ..runs.processes import on_first

_PATIENCE = 60.0  # seconds to wait for a server's configuration, which takes long while the server generates


class ServerLost(ConnectionError):
    """Raised on all processes when the vLLM server fails, is gone, or was restarted."""


def check_logprobs(engine: Any) -> None:
    """Wrap `engine.generate`: each call raises unless vLLM returned the log-prob of each sampled token."""
    generate = engine.generate

    @functools.wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> tuple:
        output = generate(*args, **kwargs)
        sampled_logprobs(*output[1:])
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
        One number for each token, nats, of the sampled distribution, after temperature and truncation; in greedy
        decoding, of the distribution at temperature 1.

    Raises:
        RuntimeError: a log-prob is missing, not a finite number, or belongs to another token.
    """
    sampled = [[each[0] for each in row] for row in logprobs or []]
    returned = ids if of_tokens is None else [[each[0] for each in row] for row in of_tokens]
    if returned != ids or [len(row) for row in sampled] != [len(row) for row in ids]:
        raise RuntimeError("vLLM returned log-probs of other tokens than it sampled: its version is not supported.")
    for row, numbers in enumerate(sampled):
        if not all(number is not None and math.isfinite(number) for number in numbers):
            raise RuntimeError(
                f"vLLM returned a log-prob of answer {row} that is not finite: the training has diverged, or the "
                "dtype of vLLM is too narrow for this model."
            )
    return sampled  # type: ignore[return-value]


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


def _instance_of(url: str) -> str | None:
    """Return what identifies a running vLLM server; raise if it was started without a flag that PPO needs."""
    answer = httpx2.get(f"{url.rstrip('/')}/server_info", params={"config_format": "json"}, timeout=_PATIENCE)
    config = answer.raise_for_status().json()["vllm_config"]
    if config["weight_transfer_config"] is None:  # it would keep its first weights
        raise ValueError(
            f"""Restart the vLLM server at {url} with `--weight-transfer-config '{{"backend": "nccl"}}'`."""
        )
    if config["model_config"]["logprobs_mode"] != "processed_logprobs":  # of another distribution than it samples from
        raise ValueError(f"Restart the vLLM server at {url} with `--logprobs-mode processed_logprobs`.")
    return config.get("instance_id")


class ServerGuard:
    """
    End the run on all processes when a vLLM server fails, or was restarted and has its first weights again.

    TRL's calls to its client go through this class. If the server fails, the call returns no answers instead of
    raising, so that all processes reach `answered`, which raises on all of them.
    """

    def __init__(self, trainer: Any):
        self._failure: Exception | None = None  # on the first process: why the rollout has no answers
        if not trainer.accelerator.is_main_process:
            return
        from requests.adapters import HTTPAdapter  # vLLM requires it, so it is installed wherever this runs

        self._client = client = trainer.vllm_generation.vllm_client
        # TRL would try again for a minute, in silence, and a server restarted meanwhile would answer with old weights
        client.session.mount(client.base_url, HTTPAdapter(pool_maxsize=64))
        self._instance = _instance_of(client.base_url)
        self._generate, client.generate = client.generate, self._guarded_generate
        self._update, client.update_named_params = client.update_named_params, self._guarded_update
        client.reset_prefix_cache = functools.partial(self._ask, client.reset_prefix_cache)

    def answered(self, answers: tuple) -> tuple:
        """Return the answers; if there are none, raise [`ServerLost`] on all processes."""
        if answers[0]:
            return answers
        raise ServerLost(on_first(lambda: f"The vLLM server at {self._client.base_url} failed: {self._failure!r}."))

    def _guarded_generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = self._ask(self._generate, *args, **kwargs)
        return {"prompt_ids": [], "completion_ids": [], "logprobs": []} if output is None else output

    def _guarded_update(self, metadata: list, named_params: Iterator[tuple[str, Tensor]]) -> None:
        self._ask(self._update, metadata, named_params)
        for _ in named_params:  # gathering is for all processes, and at the end adapters are unmerged
            pass

    def _ask(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ask the server by `ask`; return None if the server fails, or has failed before."""
        if self._failure is None:
            try:
                self._check_instance()  # NCCL would wait for ever for a server that has gone
                output = ask(*args, **kwargs)
                self._check_instance()
                return output
            except Exception as error:
                self._failure = error
        return None

    def _check_instance(self) -> None:
        if _instance_of(self._client.base_url) != self._instance:
            raise ConnectionResetError("it was restarted")


def save_last_step(trainer: Any) -> str:
    """Save a checkpoint of the last finished step, unless it exists; return a sentence that says where it is."""
    step = trainer.state.global_step
    if not step:
        return "No step was finished."
    checkpoint = os.path.join(trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
    trainer._check_saving(wait=True)  # a save may be under way
    if read_marker(checkpoint) is None:
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer._check_saving(wait=True)
    if read_marker(checkpoint) is None:  # `save_only_model`, or a full disk with `on_save_failure: continue`
        return "The same command resumes from the newest complete checkpoint, if there is one."
    return f"The training so far is saved: the same command resumes from {checkpoint}."
