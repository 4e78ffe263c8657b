"""Start, watch and feed a second process that generates answers with a copy of the policy."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..upstream.terminal import is_quiet
from . import rollout_worker
from .rollout_worker import Answers, Job, Setup, memory_of

logger = logging.get_logger(__name__)

_RESTARTS = 2  # in a row, without answers in between
_ALIGNED = 64  # bytes
# What a launcher's environment variables begin with; the second process must not see them
_LAUNCHER = ("ACCELERATE_", "FSDP_", "GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_")


def layout_of(weights: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, tuple[torch.Size, torch.dtype, int]], int]:
    """
    Plan a buffer for weights.

    Returns:
        Shape, dtype and place in bytes of each weight, by name; and the size of the buffer in bytes.
    """
    layout, end = {}, 0
    for name, values in weights:
        layout[name] = (values.shape, values.dtype, end)
        end += -(-values.numel() * values.dtype.itemsize // _ALIGNED) * _ALIGNED
    return layout, end


class RolloutProcessLost(RuntimeError):
    """Report that the process which generates rollouts keeps dying; the message says why it died the last time."""


class RolloutProcess:
    """
    Generate rollouts in a second process, in the order of the jobs.

    If the process dies, it is started again with the jobs that it has not answered, whose weights are kept. At the
    third death without an answer in between, all jobs fail with `RolloutProcessLost`. When the trainer's process
    ends, in whatever way, the second process ends, too.

    Args:
        setup: what the process needs to know.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self._memory_file = _shared_file()
        size = setup.slots * setup.slot_bytes
        os.ftruncate(self._memory_file, size)
        self._memory = memory_of(self._memory_file, size)
        self._pending: dict[int, tuple[Job, Future, Callable[[Answers], None]]] = {}  # by the number of the job
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._pipe: Any = None
        self._error = ""  # reported by a process that is about to end
        self._deaths, self._failure = 0, ""
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="rollout process", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of `version` into the shared memory, in place of the weights of `version` − `slots`."""
        slot, seen = self.setup.slot(self._memory, version), set()
        for name, values in weights:
            if name in slot:
                slot[name].copy_(values)
                seen.add(name)
        if missing := slot.keys() - seen:
            raise RuntimeError(f"The policy's weights {sorted(missing)[:3]} are missing, so they cannot be copied.")

    def submit(self, job: Job, arrived: Callable[[Answers], None]) -> Future[Answers]:
        """
        Send a job to the process; return a future of its answers.

        `arrived` is called with the answers, in another thread, before the future is done.
        """
        future: Future[Answers] = Future()
        with self._lock:
            if self._failure:
                future.set_exception(RolloutProcessLost(self._failure))
                return future
            self._pending[job.number] = job, future, arrived
            self._send(job)
        return future

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the process, and drop the jobs that it has not answered."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()
        os.close(self._memory_file)

    # ---- The thread that watches ----

    def _watch(self) -> None:
        try:
            while not (self._is_closed or self._failure):
                try:
                    with self._lock:
                        if not self._is_closed:
                            self._start()
                    while not self._is_closed:
                        self._handle(*self._receive())
                except (EOFError, OSError) as error:
                    if not self._is_closed:
                        self._note_death(error)
        except BaseException as error:  # else the trainer would wait for its answers for ever
            self._fail(f"The thread that watches the rollout process failed: {error!r}.")
        self._end()

    def _start(self) -> None:
        here, there = Pipe()
        quietly = f"from {is_quiet.__module__} import quiet; quiet(); " if is_quiet() else ""
        code = (  # SIGINT is ignored, since on Ctrl-C the trainer ends the process
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
            f"sys.path[:] = {sys.path!r}; {quietly}from {rollout_worker.__name__} import serve; "
            f"serve({there.fileno()}, {self._memory_file}, {os.getpid()})"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        self._pipe = here
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            pass_fds=[there.fileno(), self._memory_file],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal reaches the trainer alone
        )
        there.close()
        here.send_bytes(pickle.dumps(self.setup))
        for job, _, _ in self._pending.values():
            self._send(job)

    def _send(self, job: Job) -> None:
        if self._pipe is None:
            return  # `_start` sends it
        with suppress(OSError):  # the process has died; when the watching thread starts it again, it sends the job
            self._pipe.send_bytes(pickle.dumps(job))

    def _receive(self) -> tuple[int | None, Any]:
        while not self._pipe.poll(1.0):
            if self._process is not None and self._process.poll() is not None and not self._pipe.poll(0):
                raise EOFError
        return pickle.loads(self._pipe.recv_bytes())

    def _handle(self, number: int | None, message: Any) -> None:
        if number is None:
            self._error = message
            return
        _, future, arrived = self._pending[number]
        self._deaths = 0
        arrived(message)
        future.set_result(message)
        with self._lock:
            del self._pending[number]

    def _note_death(self, error: Exception) -> None:
        """Warn that the process died; after more than `_RESTARTS` deaths in a row without answers, fail all jobs."""
        code = self._end()
        with self._lock:
            how, self._error = self._error or (repr(error) if code is None else _exit_reason(code)), ""
            self._deaths += 1
            where = f"The rollout process on {self.setup.device} ended ({how})"
            if self._deaths > _RESTARTS:
                self._fail(
                    f"{where}, for the third time in a row without an answer. Remove the cause, or leave out "
                    "`rollouts_ahead`; the same command resumes from the newest complete checkpoint, if there is one."
                )
                return
            rollouts = ", ".join(map(str, self._pending)) or "none"
            logger.warning(f"{where}. It is started again (rollouts still to generate: {rollouts}).")

    def _fail(self, failure: str) -> None:
        with self._lock:
            self._failure = failure
            pending, self._pending = self._pending, {}
        for _, future, _ in pending.values():
            future.set_exception(RolloutProcessLost(failure))

    def _end(self) -> int | None:
        """End the process, if it runs, and return its exit code."""
        with self._lock:
            process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process is None:
            return None
        pipe.close()  # which ends the process
        try:
            return process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _shared_file() -> int:
    """Open a file without a name, which is deleted when no process has it open any more."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: by a person, or by the system when memory ran out"
    return f"killed by {signal.Signals(-code).name}"
