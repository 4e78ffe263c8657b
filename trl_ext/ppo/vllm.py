"""Sample with vLLM: check its log-probs, generate a rollout ahead, and end the run when the server fails."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import httpx2
from torch import Tensor

from ..rewards.background import in_daemon
from ..runs.files import on_first
from ..upstream.statements import refuse, temporarily
from .config import PPOConfig
from .metrics import PPOMetrics
from .reward_calls import DeferredErrors

Completions = tuple[list[list[int]], list[list[float]]]  # the tokens of each completion, and their log-probs

_PATIENCE = 60.0  # seconds to wait for a server's configuration, which takes long while the server generates


class ServerLost(ConnectionError):
    """Raised on all processes when the vLLM server of a running trainer fails, or was restarted."""


def check_logprobs(engine: Any) -> None:
    """
    Make `engine.generate` raise a `RuntimeError` unless vLLM returned a finite log-prob of each sampled token.

    `engine` is TRL's `VLLMGeneration`.
    """
    generate = engine.generate

    @wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> tuple:
        output = generate(*args, **kwargs)
        checked_logprobs(*output[1:])
        return output

    engine.generate = checked


def checked_logprobs(
    ids: list[list[int]],
    logprobs: list[list[list[float | None]]] | None,
    of_tokens: list[list[list[int]]] | None,
) -> list[list[float]]:
    """
    Return the log-prob of each token that vLLM sampled.

    Args:
        ids: the tokens of each completion.
        logprobs: for each token of each completion a list that begins with the token's log-prob, nats; TRL returns
            None for NaN.
        of_tokens: the token ids of these log-probs, in lists of the same shape; None if vLLM does not return the ids.

    Returns:
        One log-prob for each token, nats, under the distribution that was sampled from, after temperature and
        truncation; in greedy decoding, under the distribution at temperature 1.

    Raises:
        RuntimeError: a log-prob is missing, not a finite number, or belongs to another token.
    """
    sampler_logprobs = [[each[0] for each in row] for row in logprobs or []]
    returned = ids if of_tokens is None else [[each[0] for each in row] for row in of_tokens]
    if returned != ids or [len(row) for row in sampler_logprobs] != [len(row) for row in ids]:
        raise RuntimeError(
            "vLLM did not return a log-prob for each token that it sampled: install a vLLM version that TRL supports."
        )
    for row, numbers in enumerate(sampler_logprobs):
        if not all(number is not None and math.isfinite(number) for number in numbers):
            raise RuntimeError(
                f"vLLM returned a log-prob of completion {row} that is not finite. Either training has diverged "
                "(lower `step_kl_target`, or the learning rate if it is 0), or vLLM's dtype is too narrow for the "
                "model (use bfloat16 or float32)."
            )
    return sampler_logprobs  # type: ignore[return-value]


def check_loadable(engine: Any) -> None:
    """
    Raise a `ValueError` if vLLM runs in this process, on a CPU, and cannot load updated weights. `engine` is TRL's
    `VLLMGeneration`.
    """
    if (llm := getattr(engine, "llm", None)) is None or engine.accelerator.device.type != "cpu":
        return
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model  # as TRL's `sync_weights` reaches it
    if not all(parameter.numel() for parameter in model.parameters()):  # empty: packed for CPU kernels
        raise ValueError(
            "`use_vllm=True` does not work on this CPU: vLLM cannot load updated weights here, and would keep "
            "sampling from the initial policy. Train on a GPU, or leave out `use_vllm`."
        )


def _instance_of(url: str) -> str | None:
    """Return an id of the vLLM server at `url` (None if it gives none); refuse one without the flags PPO needs."""
    answer = httpx2.get(f"{url.rstrip('/')}/server_info", params={"config_format": "json"}, timeout=_PATIENCE)
    config = answer.raise_for_status().json()["vllm_config"]
    restart = f"Restart the vLLM server at {url} with"
    refuse(
        (  # else it keeps its first weights
            config["weight_transfer_config"] is None,
            restart + """ `--weight-transfer-config '{"backend": "nccl"}'`, which PPO needs.""",
        ),
        (  # else its log-probs are of another distribution than it samples from
            config["model_config"]["logprobs_mode"] != "processed_logprobs",
            f"{restart} `--logprobs-mode processed_logprobs`, which PPO needs.",
        ),
    )
    return config.get("instance_id")


class ServerGuard:
    """
    End the run on all processes when a vLLM server fails, or was restarted and so has its initial weights again.

    It stands between TRL and TRL's vLLM client. If the server fails, a call returns no completions instead of raising,
    so that all processes reach `answered`, which raises on all of them. `engine` is TRL's `VLLMGeneration`.
    """

    def __init__(self, engine: Any):
        self._failure: Exception | None = None  # on the first process: why the rollout has no completions
        if not engine.accelerator.is_main_process:
            return
        from requests.adapters import HTTPAdapter  # vLLM requires it, so it is installed wherever this runs

        self._client = client = engine.vllm_client
        # TRL would try again for a minute, in silence, and a server restarted meanwhile would answer with old weights
        client.session.mount(client.base_url, HTTPAdapter(pool_maxsize=64))
        self._instance = _instance_of(client.base_url)
        self._generate = client.generate
        client.generate = self._guarded_generate
        self._update = client.update_named_params
        client.update_named_params = self._guarded_update
        client.reset_prefix_cache = partial(self._ask, client.reset_prefix_cache)

    def answered(self, completions: tuple) -> tuple:
        """Return vLLM's `completions`; if a call to the server failed, raise [`ServerLost`] on all processes."""
        if completions[0]:
            return completions
        raise ServerLost(on_first(lambda: f"The vLLM server at {self._client.base_url} failed: {self._failure!r}."))

    def _guarded_generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the server's completions; none if it failed, which `answered` sees on all processes."""
        output = self._ask(self._generate, *args, **kwargs)
        return {"prompt_ids": [], "completion_ids": [], "logprobs": []} if output is None else output

    def _guarded_update(self, metadata: list, named_params: Iterator[tuple[str, Tensor]]) -> None:
        """Send weights; if the server fails, still gather the rest of them."""
        self._ask(self._update, metadata, named_params)
        for _ in named_params:  # gathering is for all processes, and at the end adapters are unmerged
            pass

    def _ask(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `ask` gets from the server; None if the server fails, or has failed before."""
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
        """Raise a `ConnectionResetError` if the server is another one than at the start."""
        if _instance_of(self._client.base_url) != self._instance:
            raise ConnectionResetError("it was restarted, and has its initial weights")


@dataclass
class PendingRollout:
    """Hold a rollout that was requested from the server, until `take` returns it."""

    version: int  # on how many rollouts the weights that generate this one have been trained
    prompts: list[list[int]]  # token ids
    output: Future = field(default_factory=Future)  # on the first process: the server's answer
    completions: Completions | None = None  # on all processes, once they have arrived


@dataclass
class RolloutsAhead:
    """
    Generate one rollout ahead: rollout n is generated with the weights after training on rollout n − 2; the first one
    of a run, or after a resume, with the present weights.

    The prompts of a rollout depend only on the seed and the rollout's number, so they are known before the Trainer
    delivers them. `take` checks that the Trainer delivers the same prompts. See docs/vllm.md.

    TRL's `generate` has collectives, so all processes must call it at the same time. So it is called twice for each
    rollout. The first call starts a thread that sends the request, and returns empty completions. The second call
    returns the completions once they have arrived.
    """

    engine: Any  # TRL's `VLLMGeneration`
    args: PPOConfig
    errors: DeferredErrors
    metrics: PPOMetrics
    prompts_of: Callable[[int], list[list[int]]]  # rollout number → token ids of the prompts of this process's rows
    sync_weights: Callable[[], None]
    pending: dict[int, PendingRollout] = field(default_factory=dict)  # by the rollout's number, from 0

    def take(self, prompt_ids: list[list[int]], step: int, max_steps: int) -> Completions:
        """
        Return each completion's tokens and log-probs of the current rollout, once they have arrived; before that,
        request the next rollout.

        The next rollout is generated with the current weights. The first call requests the current one, too.

        Args:
            prompt_ids: the prompts that the Trainer delivers. If the rollout was generated for other prompts, all
                processes raise a `RuntimeError`.
            step, max_steps: optimizer steps so far, and of the whole run.
        """
        number = step // self.args.steps_per_rollout
        wanted = range(number, min(number + 2, math.ceil(max_steps / self.args.steps_per_rollout)))
        if new := [n for n in wanted if n not in self.pending]:
            self.wait_for_all(step)  # no weights may change under a generation
            with self.metrics.timed("sync_weights"):
                self.sync_weights()
            for n in new:
                self.pending[n] = rollout = PendingRollout(number, self.prompts_of(n))
                self._generate(rollout, partial(_send_in_thread, rollout))
        self._wait_for([self.pending[number]], step)
        rollout = self.pending.pop(number)
        if rollout.prompts != prompt_ids:
            error = RuntimeError(
                "do not replace PPOTrainer's sampler, and use a dataset that returns the same row each time it is read"
            )
            self.errors.add(
                f"rollout {number} was generated ahead for other prompts than the dataloader now returns", error
            )
        self.errors.raise_everywhere(step)
        assert rollout.completions is not None
        self.metrics.train.add("sampling/staleness", float((number - rollout.version) * self.args.steps_per_rollout))
        return rollout.completions

    def wait_for_all(self, step: int) -> None:
        """Wait for the answers of all requests that are still running; `step` is for error messages."""
        self._wait_for(list(self.pending.values()), step)

    def _wait_for(self, rollouts: list[PendingRollout], step: int) -> None:
        """Wait until these rollouts' completions are on all processes; raise vLLM's errors on all."""
        with self.metrics.timed("generate_wait"):
            for rollout in rollouts:
                if self.engine.accelerator.is_main_process and (error := rollout.output.exception()) is not None:
                    self.errors.add("vLLM", error)
        self.errors.raise_everywhere(step)
        for rollout in rollouts:
            if rollout.completions is None:
                _, ids, *logprobs = self._generate(rollout, lambda *_, rollout=rollout, **__: rollout.output.result())
                rollout.completions = ids, checked_logprobs(ids, *logprobs)

    def _generate(self, rollout: PendingRollout, answer: Callable[..., dict[str, Any]]) -> tuple:
        """Call TRL's `generate`, which calls `answer(generate, …)` in place of its client's `generate(…)`."""
        engine = self.engine
        client: Any = nullcontext()
        if engine.accelerator.is_main_process:
            generate = partial(answer, engine.vllm_client.generate)
            client = temporarily(engine, vllm_client=SimpleNamespace(generate=generate))
        with client:  # by its class: `check_logprobs` would refuse the first call's empty completions
            return type(engine).generate(
                engine, prompts=rollout.prompts, images=None, num_generations=self.args.num_generations
            )


def _send_in_thread(rollout: PendingRollout, generate: Callable, **kwargs: Any) -> dict[str, Any]:
    """Send the request of `rollout` by `generate` in a thread, and return empty completions at once."""
    rollout.output = in_daemon(generate, **kwargs)
    return {
        "prompt_ids": kwargs["prompts"],
        "completion_ids": [[]] * len(kwargs["prompts"]) * kwargs["n"],
        "logprobs": None,
    }
