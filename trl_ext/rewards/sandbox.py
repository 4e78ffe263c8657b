"""
Restrict what this process can do, then run code that a model wrote. [`CodeReward`] starts this script.

The script imports the standard library alone, and nothing of this package. It sets up three walls. None needs a
privilege, and the code that runs inside cannot take any of them down:

- resource limits: processor time, memory, and the size and number of files
- Landlock: only Python's library and the process' own folder can be read, and only that folder can be written
- seccomp: the kernel refuses system calls that are not on a list. The code can therefore open no socket, start no
  process or thread, send no signal to another process, and change no limit
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2

# The system calls that a program of one thread needs to compute and to read and write files, by their numbers in the
# headers of Linux: of x86-64, and of arm64, which has no number for the older calls
_X86_64 = """
    0 1 19 20 17 18 8 3 32 33 292 77 2 257 21 269 439 89 267 4 6 5 262 332 217 79 80 87 263 82 264 316 74 9 10 11
    25 28 12 202 24 204 13 14 15 131 219 38 36 37 34 228 229 230 35 96 201 100 98 99 63 7 271 23 270 39 110 186 102 107
    104 108 115 111 121 124 318 97 95 60 231
"""
_ARM64 = """
    63 64 65 66 67 68 62 57 23 24 46 56 48 439 78 80 79 291 61 17 49 35 38 276 82 222 226 215 216 233 214 98 124
    123 134 135 139 132 128 103 102 113 114 115 101 169 153 165 179 160 73 72 172 173 178 174 175 176 177 158 155 156
    278 163 166 93 94
"""
# Two calls that do many things: `ioctl` could make a file that nobody can remove, `fcntl` could send a signal
_FCNTL, _IOCTL = {"x86_64": 72, "aarch64": 25}, {"x86_64": 16, "aarch64": 29}
_FCNTL_COMMANDS = (*range(8), 36, 37, 38, 1030)  # descriptors, their flags, locks; no owner, signal, lease or notice
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _ARM64)}

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ = 1 << 2 | 1 << 3  # files, folders
_READ_FILE = 1 << 2
_OWN_FOLDER = _READ | 1 << 1 | 1 << 5 | 1 << 8  # write, remove and make files
_TRUNCATE = 1 << 14
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom")


def limit(cpu_seconds: int, memory: int, file_size: int) -> None:
    """Limit the processor time, memory and files of this process, which cannot raise a limit again."""
    limits = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": file_size,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, most in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (OSError, ValueError):
            if name != "RLIMIT_AS":  # macOS has none that works
                raise


def lock_files(libc: Any, folder: str) -> None:
    """
    Deny all files but Python's library, which can be read, and `folder`, which can also be written.

    Raises:
        OSError: the kernel has no Landlock, or refuses it.
    """
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        raise OSError("the kernel has no Landlock")
    of_abi = [(1 << 13) - 1, 1 << 13 if abi >= 2 else 0, _TRUNCATE if abi >= 3 else 0, 1 << 15 if abi >= 5 else 0]
    handled, tcp, scoped = sum(of_abi), 3 if abi >= 4 else 0, 3 if abi >= 6 else 0
    attributes = struct.pack("QQQ", handled, tcp, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    of_python = (os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"))
    readable = dict.fromkeys((*_LIBRARIES, *of_python), _READ) | dict.fromkeys(_FILES, _READ_FILE)
    for path, access in (*readable.items(), (folder, _OWN_FOLDER | handled & _TRUNCATE)):
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if libc.syscall(LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", access, place), 0):
            raise OSError(ctypes.get_errno(), f"Landlock refuses a rule for {path}")
        os.close(place)
    if libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock cannot be switched on")
    os.close(rules)


def lock_calls(libc: Any) -> None:
    """
    Have the kernel refuse system calls that are not on the list: in Python they then raise a `PermissionError`.

    Raises:
        OSError: there is no list for this kind of machine, or the kernel refuses seccomp.
    """
    name = os.uname().machine
    machine, calls = _MACHINES.get(name, (0, ""))
    numbers = list(map(int, calls.split()))
    if not numbers or sys.maxsize < 2**32:
        raise OSError(f"no list of system calls for {name}")
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load a word, jump if it is equal, return
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    refuse, no_device, go_on = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOTTY, 0x7FFF0000
    program += [(equal, 0, 1, _IOCTL[name]), (give, 0, 0, no_device)]
    program += [(equal, 0, len(_FCNTL_COMMANDS) + 3, _FCNTL[name]), (load, 0, 0, 24)]  # its second argument
    for allowed in (_FCNTL_COMMANDS, numbers):
        program += [(equal, len(allowed) - i, 0, number) for i, number in enumerate(allowed)]
        program += [(give, 0, 0, refuse), (give, 0, 0, go_on)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp cannot be switched on")


def lock(folder: str) -> dict[str, str]:
    """Put up Landlock and seccomp; return name → reason for each of these walls that could not be put up."""
    missing = {}
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except (OSError, AttributeError) as error:
        return dict.fromkeys(("files", "network and processes"), str(error))
    for wall, put_up in (
        ("files", lambda: lock_files(libc, folder)),
        ("network and processes", lambda: lock_calls(libc)),
    ):
        try:
            put_up()
        except OSError as error:
            missing[wall] = str(error)
    return missing


def die_with_the_parent(parent: int) -> None:
    """Have the kernel kill this process when its `parent`, the trainer, ends; exit now if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended before the kernel was asked
        os._exit(1)


def stdin_of(text: bytes) -> None:
    """Make a text the standard input of this process."""
    if hasattr(os, "memfd_create"):
        given = os.memfd_create("input")
    else:
        import tempfile  # importing it takes as long as all else here

        given, name = tempfile.mkstemp()
        os.remove(name)
    with open(given, "wb") as file:
        file.write(text)
        file.seek(0)
        os.dup2(given, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


def main() -> None:
    """Read a task from standard input, restrict this process, and run the task's code and test."""
    task = json.loads(sys.stdin.buffer.read())
    die_with_the_parent(task["parent"])
    stdin_of(task["input"].encode("utf-8", "surrogatepass"))
    verdict = os.dup(1)
    limit(task["cpu_seconds"], task["memory"], task["file_size"])
    missing = lock(os.getcwd())
    if task["probe"]:
        print(json.dumps(missing))
    elif missing and task["require_isolation"]:
        sys.exit(1)
    else:
        run(task["code"], task["test"], task["token"].encode(), verdict)


def run(code: str, test: str, token: bytes, verdict: int) -> None:
    """Run the code, then its test; if both run to their end, write `token` to the descriptor `verdict` as proof."""
    write, leave = os.write, os._exit  # kept before the code can replace them
    module = types.ModuleType("solution" if test else "__main__")
    sys.modules[module.__name__] = module
    for text, name in ((code, "solution.py"), (test, "test.py")):
        exec(compile(text, name, "exec"), vars(module))
    if token:
        write(verdict, token)
        leave(0)


if __name__ == "__main__":
    main()
