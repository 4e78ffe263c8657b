"""Code that a model wrote, scored by its unit tests."""

import contextlib
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import regex
from transformers.utils import logging

from .member import log_to
from .naming import checked_name
from .service import StoppedError, in_threads
from .texts import last_block, text_of

logger = logging.get_logger(__name__)

_SANDBOX = Path(__file__).with_name("sandbox.py")
_PARTS = {"code", "input", "output"}


class CodeReward:
    """
    Score an answer's code by the share of its unit tests that pass, from 0.0 to 1.0; None where there are no tests.

    The code is the last fenced block of the answer, or all of it if there is none. Each test runs in a process of its
    own: Python without site-packages, an empty environment, an empty folder that is removed, limits of time, memory
    and size of files. On Linux from 5.13 on the kernel also denies it every other file but Python's library, sockets,
    and other processes and threads; see `trl_ext/rewards/sandbox.py`, and docs/security.md for what remains.

    A test in the dataset's column is a text or a mapping:

    - a text is Python, such as `assert add(1, 2) == 3`, that runs behind the code. It passes if it comes to its end.
      It shares an interpreter with the code, which can be written so that every comparison holds.
    - `{"input": "1 2", "output": "3"}`: the code is a program, gets the input on standard input, ends without an
      error, and prints the output, but for white space at the end of lines. With `"code": "print(add(1, 2))"` that
      runs behind it. The output that is expected is never in the process, so no program can read it there.

    Logged is `rewards/<name>/timeouts`, the share of tests that ran out of time.

    Args:
        tests: the column with each row's tests: a list of them, or one.
        template: what a text of the column becomes. `{test}` stands for it and other names for the row's other
            columns, as in `"{test}\\ncheck({entry_point})"`.
        timeout: seconds that a test may take, Python's start included.
        memory_mb: MiB of address space.
        max_output: bytes of what is printed, and of each file that is written.
        max_chars: characters of code; a longer one scores 0.0.
        workers: processes at a time; None: as many as there are cores.
        require_isolation: refuse to run anything where the kernel does not deny files, network and processes. False
            runs it all the same, and says once what is missing.
        name: in the logs; by default `code`.
    """

    in_background = True

    def __init__(
        self,
        tests: str = "tests",
        template: str = "{test}",
        timeout: float = 5.0,
        memory_mb: int = 512,
        max_output: int = 1_000_000,
        max_chars: int = 100_000,
        workers: int | None = None,
        require_isolation: bool = True,
        name: str | None = None,
    ):
        if "{test}" not in template:
            raise ValueError(f"`template` must have {{test}} in it, got {template!r}")
        if not 0 < timeout <= 86_400:
            raise ValueError(f"`timeout` must be more than 0 seconds, and a day at most, got {timeout!r}")
        numbers = {"memory_mb": memory_mb, "max_output": max_output, "max_chars": max_chars}
        for argument, value in {**numbers, **({} if workers is None else {"workers": workers})}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{argument}` must be a whole number of 1 or more, got {value!r}")
        self.tests = tests
        self.template = template
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.max_chars = max_chars
        self.workers = workers
        self.require_isolation = require_isolation
        self.__name__ = checked_name(name, "code")
        self._probed = False
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_probed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._probed, self._lock = False, threading.Lock()

    @property
    def identity(self) -> str:
        """What the score depends on: the number of workers does not count."""
        counted = (self.tests, self.template, self.timeout, self.memory_mb, self.max_output, self.max_chars)
        return f"code {counted}"

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the share of tests that pass for each completion."""
        given = kwargs.get(self.tests)
        if given is None:
            there = sorted(name for name, values in kwargs.items() if values is not None)
            raise ValueError(f"reward '{self.__name__}': no column {self.tests!r}; there are {there}")
        if not isinstance(given, (list, tuple)) or len(given) != len(completions):
            what = f"{len(given)} entries" if isinstance(given, (list, tuple)) else repr(given)[:80]
            raise ValueError(
                f"reward '{self.__name__}': {self.tests!r} must have the tests of each of {len(completions)} "
                f"completions, got {what}"
            )
        of_row = [self._tests_of(row, kwargs, len(completions)) for row in range(len(completions))]
        self._probe()
        codes = [last_block(text_of(completion)) for completion in completions]
        jobs = [(code, test) for code, tests in zip(codes, of_row, strict=True) for test in tests]
        workers, forever = self.workers or os.cpu_count() or 1, time.monotonic() + threading.TIMEOUT_MAX
        # Of daemonic threads: a program that ends in the middle does not wait for the tests that are left
        found = in_threads(lambda job: self._run(*job), jobs, workers, forever, lambda end: isinstance(end, Exception))
        for error in found:
            if isinstance(error, Exception) and not isinstance(error, StoppedError):
                raise error
        outcomes = iter(found)
        results = [[next(outcomes) for _ in tests] for tests in of_row]
        late = [outcome is None for row in results for outcome in row]
        log_to(log_metric, {f"rewards/{self.__name__}/timeouts": sum(late) / len(late) if late else None})
        return [sum(map(bool, row)) / len(row) if row else None for row in results]

    def _tests_of(self, row: int, columns: dict[str, Any], count: int) -> list[dict[str, str]]:
        """Return the tests of a row, each with code, input, and the output that it expects, if any."""
        tests = columns[self.tests][row]
        tests = [tests] if isinstance(tests, (str, dict)) else [] if tests is None else list(tests)
        told = []
        for test in tests:
            if isinstance(test, str):
                test = {"code": self._filled(test, row, columns, count)}
            elif not isinstance(test, dict) or not isinstance(test.get("output"), str) or not {*test} <= _PARTS:
                raise ValueError(
                    f"reward '{self.__name__}': a test must be a text, or a mapping with `output`, and `input` or "
                    f"`code`; got {repr(test)[:80]} for completion {row}"
                )
            told.append({key: text for key, text in test.items() if text is not None})
        return told

    def _filled(self, test: str, row: int, columns: dict[str, Any], count: int) -> str:
        def value(match: Any) -> str:
            if match[1] == "test":
                return test
            column = columns.get(match[1])
            return str(column[row]) if isinstance(column, list) and len(column) == count else match[0]

        return regex.sub(r"\{(\w+)\}", value, self.template)  # of the template alone: a test may have braces

    def _run(self, code: str, test: dict[str, str]) -> bool | None:
        """Return whether the code passes; None if it ran out of time."""
        if len(code) > self.max_chars:
            return False
        token = "" if "output" in test else secrets.token_hex(16)
        status, printed = self._start(code, test, token)
        if status is None:
            return None
        if token:
            return printed.endswith(token)
        return status == 0 and _lines(printed) == _lines(test["output"])

    def _start(self, code: str, test: dict[str, str], token: str, probe: bool = False) -> tuple[int | None, str]:
        """Return the exit status, None where there was no time left, and what was printed."""
        task = {
            "code": code,
            "test": test.get("code", ""),
            "input": test.get("input", ""),
            "token": token,
            "parent": os.getpid(),
            "cpu_seconds": math.ceil(self.timeout) + 1,
            "memory": self.memory_mb * 2**20,
            "file_size": self.max_output,
            "require_isolation": self.require_isolation,
            "probe": probe,
        }
        # Printed is to a file, which has a limit of size; a pipe would fill this process' memory
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_SANDBOX)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
            )
            assert process.stdin is not None
            try:
                with contextlib.suppress(BrokenPipeError), process.stdin as given:  # it was killed before it read
                    given.write(json.dumps(task).encode())
                in_time = _ends(process, self.timeout)
            finally:
                _kill(process)
            printed.seek(0)
            return process.returncode if in_time else None, printed.read(self.max_output + 1).decode(
                "utf-8", "replace"
            )

    def _probe(self) -> None:
        """See once what the kernel denies to code, before any runs."""
        with self._lock:
            if self._probed:
                return
            status, printed = self._start("", {}, "", probe=True)
            if status != 0:
                raise RuntimeError(
                    f"reward '{self.__name__}': {sys.executable} did not start within {self.timeout:g} s and "
                    f"{self.memory_mb} MiB (exit status {status}); give it more `timeout` or `memory_mb`"
                )
            missing = "; ".join(f"{wall}: {why}" for wall, why in json.loads(printed).items())
            if missing and self.require_isolation:
                raise RuntimeError(
                    f"reward '{self.__name__}': this machine does not deny everything to code that a model wrote "
                    f"({missing}). Run where it does (Linux from 5.13 on), or set `require_isolation` to false"
                )
            if missing:
                logger.warning(f"{self.__name__}: code that a model wrote is not denied everything here ({missing}).")
            self._probed = True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _ends(process: subprocess.Popen, seconds: float) -> bool:
    """Return as soon as a process ends, or after that time; whether it did."""
    with contextlib.suppress(OSError, AttributeError):  # not of Linux, or of one that refuses it
        place = os.pidfd_open(process.pid)
        try:
            ended = select.poll()
            ended.register(place, select.POLLIN)
            return bool(ended.poll(1000 * seconds))  # not reaped: its number stays its own until its group is killed
        finally:
            os.close(place)
    with contextlib.suppress(subprocess.TimeoutExpired):  # looks every 50 ms
        process.wait(seconds)
    return process.returncode is not None


def _kill(process: subprocess.Popen) -> None:
    """Kill what a process has started with it; where nothing else is denied, it may have started something."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
