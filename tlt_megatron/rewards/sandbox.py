"""Runs Python code of a model where it can do no harm. For reward workers and `tlt doctor`.

Levels, from the strongest:

- bwrap: bubblewrap. The code sees the interpreter with its packages, and an empty /tmp of its own.
  It may start programs. There is no network, and no process of it survives.
- landlock: Landlock and seccomp. One process that may read the interpreter with its packages: no
  other file, no network, no programs.
- none: limits and an empty environment alone. Only for those who ask for it by name.

Memory (of each process), time, output, and files are bounded at every level.
"""

from __future__ import annotations

import functools
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT_BYTES = 1 << 16
_LIMITS = {"AS": 1 << 30, "FSIZE": 1 << 24, "NOFILE": 64, "CORE": 0}  # of each process
_MAX_PROCESSES = 8
_MAX_FILE_BYTES = 1 << 26  # of /tmp
_FIRST_USER, _NUM_USERS = 61184, 4000  # numbers without an owner; each pid has its own
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
_VARIABLES = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # a resumed run repeats the order of sets
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PROBE, _PROBE_S = "6 * 7", 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """What a piece of code printed, standard output and errors together.

    `failure` is "", "error" (it raised, or a signal ended it), "timeout" or "output" (too much).
    """

    text: str
    failure: str = ""


def run_python(code: str, *, level: str, timeout_s: float) -> PythonResult:
    """Run `code` at `level`, with `timeout_s` of wall time. Never raises for the code's sake."""
    with tempfile.TemporaryFile() as source:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            _command(level, timeout_s),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_VARIABLES,
            cwd="/",
            start_new_session=level == "none",  # a group of its own, to be killed
        )
    assert process.stdout is not None
    with process.stdout as pipe:
        output, failure = _read(pipe.fileno(), time.monotonic() + timeout_s, process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if level == "none" else process.kill()
    status = process.wait()
    text = output[:MAX_OUTPUT_BYTES].decode(errors="replace")
    notes = {
        # without the time, which may be the rest of a turn's: a repetition gives the same text
        "timeout": "it took too long",
        "output": f"more than {MAX_OUTPUT_BYTES} bytes of output",
    }
    if failure:
        note = f"stopped: {notes[failure]}"
    else:
        number = -status if status < 0 else status - 128  # as bwrap passes a signal on
        if number not in set(signal.Signals):
            return PythonResult(text=text, failure="error" if status else "")
        note, failure = f"ended by {signal.Signals(number).name}", "error"
    return PythonResult(text=f"{text}\n[{note}]".lstrip("\n"), failure=failure)


def _read(fd: int, deadline: float, process: subprocess.Popen[bytes]) -> tuple[bytes, str]:
    """Return the output until the process ends, and "timeout" or "output" if it has to be ended."""
    output, exit_fd = b"", os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        selector.register(exit_fd, selectors.EVENT_READ)
        try:
            while len(output) <= MAX_OUTPUT_BYTES:
                ready = {
                    key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))
                }
                if not ready:
                    return output, "timeout"
                data = os.read(fd, 1 << 16) if fd in ready else b""
                output += data
                if not data and exit_fd in ready:  # a process that it left does not delay this
                    return output, ""
                if not data and fd in ready:  # the code closed its output
                    selector.unregister(fd)
        finally:
            os.close(exit_fd)
    return output, "output"


def _command(level: str, timeout_s: float) -> list[str]:
    is_root = os.geteuid() == 0
    limits = {**_LIMITS, "CPU": math.ceil(timeout_s) + 1}
    if level == "bwrap":
        limits["NPROC"] = _MAX_PROCESSES
    user = _FIRST_USER + os.getpid() % _NUM_USERS if level == "bwrap" and is_root else 0
    readable = _readable()
    given = {"level": level, "limits": limits, "readable": readable, "user": user}
    given |= {"parent": os.getpid(), "seconds": math.ceil(timeout_s) + 1}
    program = Path(__file__).with_name("sandbox_inside.py").read_text(encoding="utf-8")
    program += f"\n\nmain(**{given!r})\n"
    # -s -P: neither the user's packages nor files of the working folder. -u: printed text is kept
    python = [sys.executable, "-u", "-s", "-P", "-c", program]
    if level != "bwrap":
        return python
    # The limit on processes does not bind root, so root becomes another user. A user namespace
    # would hold only one user.
    spaces = ["--unshare-all"]
    if is_root:
        kinds = ("ipc", "pid", "net", "uts", "cgroup-try")
        spaces = [f"--unshare-{kind}" for kind in kinds]
        spaces += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    # folders that bwrap makes by itself are closed to others
    parents = dict.fromkeys(str(above) for path in readable for above in Path(path).parents)
    binds = [word for path in sorted(parents) if path != "/" for word in ("--dir", path)]
    binds += [word for path in sorted(readable) for word in ("--ro-bind", path, path)]
    own = ["--perms", "1777", "--size", str(_MAX_FILE_BYTES), "--tmpfs", "/tmp"]
    closed = ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    program_file = shutil.which("bwrap") or "bwrap"
    fixed = ["--die-with-parent", "--new-session", "--dev", "/dev"]
    # its own /tmp first: the interpreter may be in a folder of that name
    return [program_file, *spaces, *fixed, *own, *binds, *closed, "--", *python]


@functools.cache
def _readable() -> list[str]:
    """Return the folders of the interpreter and of its packages."""
    own = [sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)]
    own += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys([*_SYSTEM, *own]) if os.path.exists(path)]


@functools.cache
def find_level() -> tuple[str, str]:
    """Return the strongest level of this machine by running it, and why there is no stronger one.

    "none" if no level works.
    """
    problems = []
    for level in ("bwrap", "landlock"):
        if level == "bwrap" and not shutil.which("bwrap"):
            problems.append("bwrap is not installed")
            continue
        result = run_python(_PROBE, level=level, timeout_s=_PROBE_S)
        if not result.failure and result.text.strip() == "42":
            return level, "; ".join(problems)
        problems.append(f"{level}: {result.text.strip().rpartition(chr(10))[2]}")
    return "none", "; ".join(problems)
