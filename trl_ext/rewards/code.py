"""Run the unit tests of code that a model wrote, and score the code by the share that passes."""

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

from .checks import PicklesSettings, check_counts, check_seconds, checked_name
from .member import log_to
from .service import StoppedError, in_threads
from .texts import last_block, text_of

logger = logging.get_logger(__name__)

_SANDBOX = Path(__file__).with_name("sandbox.py")
_PARTS = {"code", "input", "output"}


class CodeReward(PicklesSettings):
    """
    Score an answer's code by the share of its unit tests that pass, from 0.0 to 1.0; None if the row has no tests.

    The code is the last fenced block of the answer, or the whole answer if it has none. Each test runs in a process of
    its own: Python without site-packages, with an empty environment, in an empty folder that is removed afterwards,
    and with limits of time, memory and file size. On Linux 5.13 and later the kernel also denies the process network
    sockets, other processes and threads, and all files outside Python's library and the process' folder; see
    `trl_ext/rewards/sandbox.py`, and docs/security.md for what the code can still do.

    Each test of a row is a text or a mapping:

    - A text is Python code, such as `assert add(1, 2) == 3`, that runs after the answer's code. The test passes if it
      runs to its end. Answer and test share an interpreter, so the answer can cheat by making every comparison true.
    - With a mapping such as `{"input": "1 2", "output": "3"}` the answer's code runs as a program that gets `input` on
      standard input. The test passes if the program ends without an error and prints `output`; white space at the end
      of lines does not count. If the mapping also has `code`, such as `"print(add(1, 2))"`, that code runs after the
      answer's. The expected output is never in the program's process, so no program can read it there.

    Logs `rewards/<name>/timeouts`, the share of tests that ran out of time.

    Args:
        tests: name of the column with each row's tests: a list of tests, or a single one.
        template: what is run for a test that is a text. `{test}` stands for the text, other names in braces for the
            row's value in the column of that name, as in `"{test}\\ncheck({entry_point})"`.
        timeout: seconds that a test may take, Python's start included.
        memory_mb: MiB of address space that a process may use.
        max_output: most bytes that a process may print, and most that it may write to a file.
        max_chars: most characters of an answer's code; longer code scores 0.0.
        workers: how many processes run at a time; None: one for each core.
        require_isolation: True raises an error, before any answer's code runs, if the kernel cannot deny files,
            network and other processes. False runs the code anyway, and warns once of what is not denied.
        name: key in the logs; by default `code`.

    Examples:
        >>> from trl_ext.rewards import CodeReward
        >>> reward = CodeReward(require_isolation=False)
        >>> answers = ["```python\\ndef add(a, b):\\n    return a + b\\n```", "def add(a, b): return a - b"]
        >>> tests = ["assert add(2, 0) == 2", "assert add(1, 2) == 3"]
        >>> reward(prompts=["Write add(a, b)."] * 2, completions=answers, tests=[tests, tests])
        [1.0, 0.5]
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
            raise ValueError(f"`template` must contain {{test}}, got {template!r}")
        check_seconds(most=86_400, timeout=timeout)
        workers_or_one = 1 if workers is None else workers
        check_counts(memory_mb=memory_mb, max_output=max_output, max_chars=max_chars, workers=workers_or_one)
        self.tests = tests
        self.template = template
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.max_chars = max_chars
        self.workers = workers
        self.require_isolation = require_isolation
        self.__name__ = checked_name(name, "code")
        self._set_up()

    def _set_up(self) -> None:
        self._probed, self._lock = False, threading.Lock()

    @property
    def identity(self) -> str:
        """Return the settings that the score depends on."""
        counted = (self.tests, self.template, self.timeout, self.memory_mb, self.max_output, self.max_chars)
        return f"code {counted}"

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the share of tests that pass for each completion; None for a row without tests."""
        given = kwargs.get(self.tests)
        if given is None:
            columns = sorted(name for name, values in kwargs.items() if values is not None)
            raise ValueError(
                f"reward '{self.__name__}': the data has no column {self.tests!r}, which `tests` names; it has "
                f"{columns}"
            )
        if not isinstance(given, (list, tuple)) or len(given) != len(completions):
            what = f"{len(given)} entries" if isinstance(given, (list, tuple)) else repr(given)[:80]
            raise ValueError(
                f"reward '{self.__name__}': the column {self.tests!r} must have one entry for each of "
                f"{len(completions)} completions, got {what}"
            )
        of_row = [self._tests_of(row, kwargs, len(completions)) for row in range(len(completions))]
        self._probe()
        codes = [last_block(text_of(completion)) for completion in completions]
        jobs = [(code, test) for code, tests in zip(codes, of_row, strict=True) for test in tests]
        workers, forever = self.workers or os.cpu_count() or 1, time.monotonic() + threading.TIMEOUT_MAX
        found = in_threads(lambda job: self._run(*job), jobs, workers, forever, lambda end: isinstance(end, Exception))
        for error in found:
            if isinstance(error, Exception) and not isinstance(error, StoppedError):
                raise error
        outcomes = iter(found)
        results = [[next(outcomes) for _ in tests] for tests in of_row]
        late = [outcome is None for row in results for outcome in row]
        log_to(log_metric, {"timeouts": sum(late) / len(late) if late else None}, self)
        return [sum(map(bool, row)) / len(row) if row else None for row in results]

    def _tests_of(self, row: int, columns: dict[str, Any], count: int) -> list[dict[str, str]]:
        """Return a row's tests, each as a mapping with one or more of the keys `code`, `input` and `output`."""
        tests = columns[self.tests][row]
        tests = [tests] if isinstance(tests, (str, dict)) else [] if tests is None else list(tests)
        found = []
        for test in tests:
            if isinstance(test, str):
                test = {"code": self._filled(test, row, columns, count)}
            elif not isinstance(test, dict) or not isinstance(test.get("output"), str) or not {*test} <= _PARTS:
                raise ValueError(
                    f"reward '{self.__name__}': a test must be a text, or a mapping with `output`, and `input` or "
                    f"`code`; got {repr(test)[:80]} for completion {row}"
                )
            found.append({key: text for key, text in test.items() if text is not None})
        return found

    def _filled(self, test: str, row: int, columns: dict[str, Any], count: int) -> str:
        def value(match: Any) -> str:
            if match[1] == "test":
                return test
            column = columns.get(match[1])
            return str(column[row]) if isinstance(column, list) and len(column) == count else match[0]

        return regex.sub(r"\{(\w+)\}", value, self.template)  # in the template alone: a test may have braces

    def _run(self, code: str, test: dict[str, str]) -> bool | None:
        """Return whether the code passes the test; None if time ran out."""
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
        """Run the sandbox script; return its exit status (None after a timeout) and its output."""
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
        # The code prints to a file, whose size is limited; a pipe would fill this process' memory
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
                with contextlib.suppress(BrokenPipeError), process.stdin as given:  # killed before it read its task
                    given.write(json.dumps(task).encode())
                in_time = _ends(process, self.timeout)
            finally:
                _kill(process)
            printed.seek(0)
            return process.returncode if in_time else None, printed.read(self.max_output + 1).decode(
                "utf-8", "replace"
            )

    def _probe(self) -> None:
        """
        Check once, before any answer's code runs, that the kernel offers all protections.

        If one is missing, raise an error, or only warn if `require_isolation` is False.
        """
        with self._lock:
            if self._probed:
                return
            status, printed = self._start("", {}, "", probe=True)
            if status != 0:
                raise RuntimeError(
                    f"reward '{self.__name__}': {sys.executable} did not start within {self.timeout:g} s and "
                    f"{self.memory_mb} MiB (exit status {status}): raise `timeout` or `memory_mb`"
                )
            missing = "; ".join(f"{wall}: {why}" for wall, why in json.loads(printed).items())
            if missing and self.require_isolation:
                raise RuntimeError(
                    f"reward '{self.__name__}': this machine cannot fully isolate the code in completions "
                    f"({missing}). Use Linux 5.13 or later, or set `require_isolation` to false"
                )
            if missing:
                logger.warning(
                    f"{self.__name__}: this machine cannot fully isolate the code in completions ({missing})."
                )
            self._probed = True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _ends(process: subprocess.Popen, seconds: float) -> bool:
    """Wait at most `seconds` for a process to end; return whether it has ended."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed here
        place = os.pidfd_open(process.pid)
        try:
            ended = select.poll()
            ended.register(place, select.POLLIN)
            return bool(ended.poll(1000 * seconds))  # not reaped: no other process gets its number before `_kill`
        finally:
            os.close(place)
    with contextlib.suppress(subprocess.TimeoutExpired):  # `wait` looks every 50 ms
        process.wait(seconds)
    return process.returncode is not None


def _kill(process: subprocess.Popen) -> None:
    """Kill a process, and the processes that it started if the sandbox let it start any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
