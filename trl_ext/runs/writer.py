"""Write the files of a checkpoint in a thread, from copies in memory, while training goes on."""

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..upstream.names import WRITERS, _get_default_store
from ..upstream.temporarily import temporarily

OTHERS_PART = "another process could not write its part"

_OF_PYTORCH = "inline_container.cc"  # in the message of an error that `torch.save` raises
PAUSE = 0.05  # seconds between two looks at what the other processes have written
_PATIENCE = 10.0  # seconds that a run waits for the other processes after it has raised an error


class NotSaved(RuntimeError):
    """Say that a checkpoint could not be written; the message is one sentence, with the cause and the folder."""


class CheckpointWriter:
    """
    Collect the files that are saved within [`~CheckpointWriter.deferring`], and write them in a thread.

    PyTorch's [`~torch.distributed.checkpoint.staging.DefaultStager`] copies the data: it keeps views and shared
    storages as they are, and reuses its buffers from the second checkpoint on.

    Args:
        pins: whether to pin the memory of the copies, which makes copies from a GPU fast.
    """

    def __init__(self, pins: bool = False):
        self.pins = pins
        self.error: Exception | None = None  # of the newest checkpoint
        self._writes: list[Callable[[], Any]] = []
        self._thread: threading.Thread | None = None
        self._deadline = math.inf
        self._stager: Any = None

    @contextmanager
    def deferring(self, copies: bool = True) -> Iterator[None]:
        """
        Keep back what this thread writes by `torch.save` and `safetensors` in the block, until `start` writes it.

        `upstream.names.WRITERS` lists the functions. Only a dict that is written to a path is kept back. Other data,
        and a dict that cannot be copied, is written at once; if that fails, an `OSError` is raised.

        Args:
            copies: whether to copy the data; data that is not copied must not change until it is written.
        """
        self._writes.clear()
        with ExitStack() as stack:
            for path, name in WRITERS.items():
                module = import_module(path)
                stack.enter_context(temporarily(module, **{name: self._deferred(getattr(module, name), copies)}))
            yield

    def _deferred(self, write: Callable[..., Any], copies: bool) -> Callable[..., Any]:
        caller = threading.get_ident()

        def keep_back(contents: Any, path: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_path = isinstance(path, (str, os.PathLike))
            if threading.get_ident() != caller or not is_path or not isinstance(contents, dict):
                return _as_os_error(write, contents, *([] if path is None else [path]), *args, **kwargs)
            try:
                copy = self._copied(contents) if copies else contents
            except Exception:
                return _as_os_error(write, contents, path, *args, **kwargs)
            self._writes.append(partial(write, copy, path, *args, **kwargs))

        return keep_back

    def _copied(self, contents: dict) -> Any:
        if self._stager is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # takes a while

            pins = self.pins and torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=pins,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=pins,
                )
            )
        return self._stager.stage(contents)

    def start(
        self,
        complete: Callable[[], None] | None,
        processes: int = 1,
        rank: int = 0,
        error: Exception | None = None,
        name: str = "",
    ) -> None:
        """
        Write the deferred files in a thread, and call `complete` when all processes have written their files.

        Each process calls this once for each checkpoint.

        Args:
            complete: function that marks the checkpoint as complete; None on all processes but one.
            processes: number of processes.
            rank: number of this process.
            error: earlier failure of this process, if any. Nothing is then written, and the others are told.
            name: name of this checkpoint, the same on all processes.
        """
        self.error, self._deadline = error, math.inf
        writes, self._writes = [] if error else self._writes, []

        def work() -> None:
            try:
                try:
                    while writes:
                        writes.pop(0)()  # so that each copy goes when it is written
                except Exception as failure:
                    self.error = failure
                if processes > 1:
                    self._exchange(name, processes, rank, waits=complete is not None)
                if self.error is None and complete is not None:
                    complete()
            except Exception as failure:
                self.error = failure

        # No daemon, which a daemon thread's threads are by default: a program that ends waits until all is written
        self._thread = threading.Thread(target=work, name="checkpoint writer", daemon=False)
        self._thread.start()

    def _exchange(self, name: str, processes: int, rank: int, waits: bool) -> None:
        """
        Tell the other processes that this one is done and, if it `waits`, wait for them.

        This goes through torch's store, not through a collective. If another process has failed, or is not done before
        the deadline, an `OSError` is raised.
        """
        store = _get_default_store()
        store.set(f"trl_ext/saved/{name}/{rank}", "failed" if self.error else "written")
        keys = [f"trl_ext/saved/{name}/{other}" for other in range(processes)]
        while waits and self.error is None:
            if store.check(keys):
                if any(store.get(key) != b"written" for key in keys):
                    raise OSError(OTHERS_PART)
                return
            if time.monotonic() > self._deadline:
                raise OSError("another process has not written its part yet")
            time.sleep(PAUSE)

    @property
    def is_busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write_now(self) -> None:
        """Write the files that were deferred so far, in the calling thread."""
        while self._writes:
            self._writes.pop(0)()

    def wait(self, seconds: float | None = None, after_an_error: bool = False) -> None:
        """
        Wait until this process' thread has ended, but no longer than `seconds`.

        `after_an_error` means that the run has failed: the thread then waits for other processes for 10 seconds only.
        """
        if after_an_error:
            self._deadline = time.monotonic() + _PATIENCE
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Free the memory of the copies."""
        self._stager, self._writes = None, []


def is_of_writing(error: BaseException) -> bool:
    """
    Return whether an error means that a file could not be written.

    Every `OSError` and every error of safetensors counts, and the `RuntimeError` that PyTorch raises on a full disk.
    """
    return isinstance(error, (OSError, SafetensorError)) or _OF_PYTORCH in str(error)


def not_saved(checkpoint: str, error: BaseException) -> str:
    """Return half a sentence: which checkpoint could not be written, where, why, and how much disk space is free."""
    cause = str(getattr(error, "strerror", None) or error)
    if _OF_PYTORCH in cause:  # the message only says at which line of PyTorch's source
        cause = "a write to the disk failed"
    folder = Path(checkpoint).parent
    try:
        room = f"; {shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there"
    except OSError:
        room = ""
    return (
        f"{Path(checkpoint).name} could not be written to {folder} ({cause.strip().splitlines()[0].rstrip('.')}{room})"
    )


def _as_os_error(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return write(*args, **kwargs)
    except Exception as error:
        if isinstance(error, OSError) or not is_of_writing(error):
            raise
        raise OSError(str(error)) from error
