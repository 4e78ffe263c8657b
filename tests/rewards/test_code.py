"""Code that a model wrote: its tests decide, and it reaches nothing."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trl_ext.rewards import CodeReward, sandbox

ADD, TEST = "def add(a, b): return a + b", "assert add(1, 2) == 3"


def score(reward, *completions, tests=TEST, **kwargs):
    return reward(prompts=["p"] * len(completions), completions=list(completions), tests=[tests] * len(completions))


@pytest.fixture(scope="module")
def reward():
    reward = CodeReward(timeout=10.0)
    try:
        score(reward, ADD)
    except RuntimeError as error:  # an old kernel, or one that has no Landlock
        pytest.skip(str(error))
    return reward


# ---- Scores ----


def test_the_score_is_the_share_of_tests_that_pass(reward):
    tests = [[TEST, "assert add(2, 2) == 5"], [], TEST, [TEST], None]
    answers = [f"Here:\n```python\n{ADD}\n```\nDone.", ADD, "no code", f"```\nx = 1\n```\n```py\n{ADD}\n```", ADD]
    assert reward(["p"] * 5, answers, tests=tests) == [0.5, None, 0.0, 1.0, None]
    assert score(pickle.loads(pickle.dumps(reward)), ADD) == [1.0]
    assert reward.in_background and reward.__name__ == "code"


def test_a_template_makes_tests_of_columns(reward):
    other = CodeReward(tests="test", template="{test}\ncheck({entry_point})", timeout=10.0)
    check = "def check(f): assert {f(1, 2)} == {3}"  # its braces are its own
    assert other(["p"] * 2, [ADD, ADD.replace("+", "-")], test=[check] * 2, entry_point=["add"] * 2) == [1.0, 0.0]


def test_what_a_program_prints_is_compared_here(reward):
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\nif __name__ == '__main__': print('end')"
    tests = [{"input": "1 2\n", "output": "3\nend"}, {"input": "1 2", "output": "4\nend"}]
    assert score(reward, program, "print(3)\nprint('end')\n1 / 0", tests=tests) == [0.5, 0.0]
    assert score(reward, ADD, tests={"code": "print(add(1, 2))", "output": "3"}) == [1.0]


@pytest.mark.slow
def test_what_comes_of_every_attack(reward, subtests, tmp_path, monkeypatch):
    """Code that does it, or sees that it is refused: then it is right, else it is wrong."""
    monkeypatch.setenv("MY_SECRET", "hunter2")
    secret, target, home = tmp_path / "secret", tmp_path / "target", Path(__file__)
    secret.write_text("hunter2")
    refused = {
        "fork": "os.fork()",
        "a thread": "threading.Thread(target=print).start()",
        "another program": "subprocess.run(['true'])",
        "exec": "os.execv('/bin/true', ['true'])",
        "kill": "os.kill(os.getppid(), 0)",
        "a socket": "socket.socket()",
        "a socket within": "socket.socketpair()",
        "a host's address": "socket.getaddrinfo('localhost', 80)",
        "more of a limit": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "another's environment": "open(f'/proc/{os.getppid()}/environ')",
        "a secret file": f"open({str(secret)!r})",
        "a file's mode": f"os.chmod({str(secret)!r}, 0)",
        "writing elsewhere": f"open({str(target)!r}, 'w')",
        "the repository": f"open({str(home)!r})",
        "a list of the root": "os.listdir('/')",
        "a link": f"os.symlink({str(secret)!r}, 'link')",
        "a folder": "os.mkdir('folder')",
        "a trace": "os.open('/proc/self/mem', os.O_RDWR)",
        "who gets a file's signal": "fcntl.fcntl(os.open('.', 0), fcntl.F_SETOWN, os.getppid())",
        "which signal": "fcntl.fcntl(os.open('.', 0), fcntl.F_SETSIG, 9)",
        "a notice of a change": "fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, 4)",
    }
    imports = "import fcntl, os, resource, socket, subprocess, threading"
    names = {
        name: f"{imports}\n{ADD}\ntry:\n    {line}\nexcept (PermissionError, socket.gaierror, ValueError):\n    pass\n"
        f"except RuntimeError as error:\n    assert 'thread' in str(error)\nelse:\n    add = None"
        for name, line in refused.items()
    }
    names |= {
        "the environment": f"import os\n{ADD}\nassert 'MY_SECRET' not in os.environ and 'HOME' not in os.environ",
        "its own folder": f"import os\n{ADD}\nopen('a', 'w').write('b')\nassert open('a').read() == 'b' and "
        "os.listdir() == ['a']\nos.remove('a')",
        "memory": f"{ADD}\ntry:\n    bytearray(2**31)\nexcept MemoryError:\n    pass\nelse:\n    add = None",
        "a large file": f"{ADD}\ntry:\n    open('a', 'wb').write(bytes(2**22))\nexcept OSError:\n    pass\nelse:\n"
        "    add = None",
        # Which root may do: FS_IMMUTABLE_FL
        "a file that stays": f"import fcntl\n{ADD}\ntry:\n    fcntl.ioctl(open('a', 'w'), 0x40086602, bytes([16, *[0] "
        "* 7]))\nexcept OSError as error:\n    assert error.errno == 25\nelse:\n    add = None",
        "descriptors": f"import os, tempfile\n{ADD}\nwith tempfile.TemporaryFile(dir='.') as file:\n    "
        "os.set_inheritable(os.dup(file.fileno()), True)",
        "the library": f"import ctypes, dataclasses, decimal, hashlib, json, random, ssl, sqlite3, unittest\n{ADD}",
    }
    for (name, code), value in zip(names.items(), score(reward, *names.values()), strict=True):
        with subtests.test(name):
            assert value == 1.0, code
    assert not target.exists() and secret.read_text() == "hunter2" and os.stat(secret).st_mode & 0o400


@pytest.mark.slow
def test_leaving_early_printing_without_end_and_running_on_pass_nothing(reward):
    endless = "\nwhile True: pass"
    logged = {}
    bombs = [
        *("import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "quit()"),
        *("print('x' * 10**9)", "while True: print('x' * 1000)", "def f(): f()\nf()", "(" * 10**5, "\x00", "\ud83d"),
        *("import signal, os\nos.abort()", f"{ADD}\n{'#' * 200_000}"),
    ]
    assert score(reward, *bombs) == [0.0] * len(bombs)
    late = CodeReward(timeout=3.0)
    start = time.monotonic()
    hangs = ["import time; time.sleep(99)", f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN){endless}"]
    tests = [[TEST]] * 3
    assert late(["p"] * 3, [*hangs, ADD], tests=tests, log_metric=logged.__setitem__) == [0.0, 0.0, 1.0]
    assert time.monotonic() - start < 60 and logged == {"rewards/code/timeouts": 2 / 3}


def test_the_token_of_another_test_and_a_printed_one_pass_nothing(reward):
    fakes = ["print('0' * 32)", "import os; os.write(1, b'passed'); os._exit(0)", "print(open(0).read())"]
    assert score(reward, *fakes) == [0.0] * 3


def test_the_lists_of_system_calls_are_those_of_the_headers():
    """Where Linux' headers are: each number is of the call that is meant, on both machines."""
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    if not all(header.exists() for header in headers):
        pytest.skip("no headers of Linux")
    known = []
    for header in headers:
        lines = (line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR"))
        names = ((line[1].removeprefix("__NR3264").removeprefix("__NR"), line[2]) for line in lines if len(line) > 2)
        known.append({int(number): name[1:] for name, number in names if number.isdigit()})
    x86, arm = (
        {table[int(n)] for n in numbers.split()}
        for table, numbers in zip(known, (sandbox._X86_64, sandbox._ARM64), strict=True)
    )
    assert {name.replace("fstatat", "newfstatat") for name in arm - {"newfstatat"}} <= x86
    of_others = "socket clone fork vfork execve kill tkill tgkill ptrace mount unshare prlimit64 setrlimit prctl chmod"
    places = [(known[0], "x86_64"), (known[1], "aarch64")]
    for calls, name in ((sandbox._FCNTL, "fcntl"), (sandbox._IOCTL, "ioctl")):
        assert [table[calls[machine]] for table, machine in places] == [name] * 2 and name not in x86
    assert not x86 & {*of_others.split(), "io_uring_setup", "bpf", "pipe", "process_vm_readv", "landlock_add_rule"}


# ---- Where the system denies less ----


def test_without_its_walls_nothing_runs_unless_it_is_told_to(monkeypatch, tmp_path, caplog):
    text = Path(sandbox.__file__).read_text()
    (tmp_path / "sandbox.py").write_text(text.replace("= 444, 445, 446", "= 1444, 1445, 1446"))
    monkeypatch.setattr("trl_ext.rewards.code._SANDBOX", tmp_path / "sandbox.py")
    with pytest.raises(
        RuntimeError, match=r"cannot fully isolate the code in completions .files: the kernel has no Landlock"
    ):
        score(CodeReward(), ADD)
    assert score(CodeReward(require_isolation=False), ADD) == [1.0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone kills a process when its parent dies")
def test_a_trainer_that_is_killed_leaves_no_code_running(tmp_path, reward):
    trainer = textwrap.dedent("""
        from trl_ext.rewards import CodeReward
        from pathlib import Path
        loop = "import os, time\\nprint(os.getpid(), flush=True)\\nwhile True: time.sleep(1)"
        CodeReward(timeout=300.0)(["p"], [loop], tests=["pass"])
    """)
    run = subprocess.Popen([sys.executable, "-c", trainer], cwd=Path(__file__).parents[2])

    def locked_up():
        """Its process that runs code: under seccomp."""
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in Path(f"/proc/{run.pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text():
                        return int(child)

    try:
        deadline = time.monotonic() + 120
        child = last = None
        while child is None or child != last:  # the one that looks which walls there are ends by itself
            assert time.monotonic() < deadline and run.poll() is None
            last, child = child, locked_up()
            time.sleep(1)
    finally:
        run.kill()
        run.wait()
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("it went on")


@pytest.mark.slow
def test_a_program_that_ends_does_not_wait_for_what_is_left(reward):
    program = textwrap.dedent("""
        import sys, threading, time
        from trl_ext.rewards import CodeReward
        reward = CodeReward(timeout=300.0, workers=2)
        given = {"prompts": ["p"] * 9, "completions": ["import time; time.sleep(999)"] * 9, "tests": ["pass"] * 9}
        threading.Thread(target=reward, kwargs=given, daemon=True).start()
        while not any(thread.name == "trl_ext-rewards" for thread in threading.enumerate()):
            time.sleep(0.1)
        sys.exit("it is over")
    """)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert "it is over" in ended.stderr


@pytest.mark.slow
def test_a_system_without_descriptors_of_processes(reward, monkeypatch):
    def refused(*args):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    late = CodeReward(timeout=2.0)
    assert score(late, ADD, "while True: pass") == [1.0, 0.0]


def test_what_decides_on_a_score_is_in_its_identity():
    options = ({}, {"tests": "t"}, {"template": "a\n{test}"}, {"timeout": 9.0}, {"memory_mb": 9}, {"max_chars": 9})
    assert len({CodeReward(**each).identity for each in options}) == len(options)
    assert CodeReward(workers=3, name="other").identity == CodeReward().identity


def test_bad_arguments(subtests, reward):
    for build, message in [
        (lambda: CodeReward(template="x"), "must contain {test}"),
        (lambda: CodeReward(timeout=0), "more than 0 seconds"),
        (lambda: CodeReward(timeout=1e9), "at most 86400, got"),
        (lambda: CodeReward(workers=0), "`workers` must be a whole number"),
        (lambda: reward(["p"], [ADD], other=[TEST]), r"no column 'tests', which `tests` names; it has \['other'\]"),
        (lambda: score(reward, ADD, tests=[3]), "must be a text, or a mapping with `output`.*3 for completion 0"),
        (lambda: score(reward, ADD, tests=[{"input": "1"}]), "mapping with `output`"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            build()
