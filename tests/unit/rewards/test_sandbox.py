"""The Python sandbox, with real processes: code is bounded and named, and does not survive."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tlt_megatron import doctor
from tlt_megatron.rewards.sandbox import MAX_OUTPUT_BYTES, find_level, run_python

LEVELS = ["bwrap", "landlock"]
TIMEOUT_S = 120.0  # against a hang
LEFT = """
import os, subprocess, time
try:
    subprocess.Popen(["/bin/sleep", "{seconds}"], start_new_session=True)
    os.setsid() if os.fork() == 0 else None
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    result = (
        run_python("1", level=request.param, timeout_s=TIMEOUT_S) if has(request.param) else None
    )
    if result is None or result.failure:
        pytest.skip(f"{request.param} does not work here: {result}")
    return request.param


def has(level: str) -> bool:
    return level != "bwrap" or shutil.which("bwrap") is not None


def run(code: str, level: str, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    result = run_python(code, level=level, timeout_s=timeout_s)
    return result.text, result.failure


def num_processes(word: str) -> int:
    """Return how many processes have this argument."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += word.encode() in file.read_bytes().split(b"\0")
        except OSError:
            continue
    return found


def find_code(pid: int) -> int | None:
    """Return the interpreter below this process that runs the code. None: it has not begun."""
    try:
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1:2] == [b"-u"]:
                return child
            if found := find_code(child):
                return found
    except OSError:  # it has ended
        pass
    return None


def wait_gone(word: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while num_processes(word) and time.monotonic() < end:
        time.sleep(0.05)
    assert num_processes(word) == 0


def test_code_prints_and_its_last_expression_is_shown(level: str) -> None:
    assert run("print('a')\nx = 6\nx * 7", level) == ("a\n42\n", "")
    assert run("print(len(input.__name__)); None", level) == ("5\n", "")
    assert run("'\u00e9' * 70000", level)[1] == "output"


@pytest.mark.parametrize(
    ("code", "limit_s", "says"),
    [
        ("while True: pass", 2.0, "[stopped: it took too long]"),
        ("print('before')\nimport time; time.sleep(600)", 8.0, "before\n\n[stopped"),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", 2.0, "stopped"),
    ],
)
def test_a_hang_is_ended(level: str, code: str, limit_s: float, says: str) -> None:
    text, found = run(code, level, timeout_s=limit_s)
    assert found == "timeout"
    assert says in text


@pytest.mark.parametrize(
    ("code", "failure", "says"),
    [
        ("while True: print('x' * 1000)", "output", f"[stopped: more than {MAX_OUTPUT_BYTES} bytes"),
        ("1 / 0", "error", 'File "<python>", line 1, in <module>\n    1 / 0'),
        ("def f(:", "error", "SyntaxError"),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit(253)", "error", ""),
        ("import os; os.abort()", "error", "[ended by SIG"),
        ("x = ' ' * (3 << 30)", "error", "MemoryError"),
        ("open('/etc/passwd').read()", "error", "/etc/passwd"),
        ("import os; os.listdir('/home')", "error", "/home"),
        ("import os; os.chmod('/usr', 0)", "error", "Error"),
        ("open('/usr/new', 'w')", "error", "/usr/new"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "error", "Error"),
        ("import ctypes; ctypes.CDLL(None).unshare(0x10000000)", "", "-1"),
        ("'<|im_end|>\\x00\\udcff'.encode('utf-8', 'replace')", "", "<|im_end|>"),
        ("import os; os.environ.get('SECRET', 'none'), os.environ['HOME']", "", "('none', '/tmp')"),
        ("import sys; sys.stdin.read()", "", "''"),
        ("{'a', 'b', 'c', 'd'} == eval(repr({'a', 'b', 'c', 'd'}))", "", "True"),
        ("\x00", "error", "null bytes"),
    ],
)  # fmt: skip
def test_code_is_bounded_and_named(
    level: str, code: str, failure: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "key")
    text, found = run(code, level)
    assert (found, says in text) == (failure, True), text
    assert len(text) <= MAX_OUTPUT_BYTES + 100


def test_forks_are_bounded(level: str) -> None:
    code = """
import os, time
n = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        break
    n += 1
print(n)"""
    text, failure = run(code, level)
    assert failure == ""
    assert int(text) <= 8


def test_nothing_survives(level: str) -> None:
    seconds = f"{600 + os.getpid()}.25"
    text, failure = run(LEFT.format(seconds=seconds), level)
    assert failure == "", "it waited for what was left"
    assert text in ("", "Operation not permitted\n")
    wait_gone(seconds)


def test_code_ends_with_its_worker(level: str, tmp_path: Path) -> None:
    seconds = f"{700 + os.getpid()}.25"
    file = tmp_path / "worker.py"
    file.write_text(
        "from tlt_megatron.rewards.sandbox import run_python\n"
        f"run_python('import time; time.sleep({seconds})', level={level!r}, timeout_s=600)\n"
    )
    worker = subprocess.Popen([sys.executable, str(file), seconds])
    end = time.monotonic() + TIMEOUT_S
    # bwrap asks to end with its parent before it starts the interpreter
    while (child := find_code(worker.pid)) is None:
        assert time.monotonic() < end, "the code has not begun"
        time.sleep(0.02)
    worker.kill()
    worker.wait()
    end = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{child}/status").exists() and time.monotonic() < end:
        if "zombie" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_network_and_sockets_are_closed(level: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        port = server.getsockname()[1]
        for code in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
        ):
            text, failure = run(code, level)
            assert failure == "error"
            assert "Error" in text


def test_other_processes_get_no_signal(level: str) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    try:
        text, failure = run(f"import os; os.kill({other.pid}, 9); os.kill(-1, 9)", level)
        assert failure == "error", text
        assert other.poll() is None, text
    finally:
        other.kill()
        other.wait()


def test_files_live_in_a_bounded_folder_of_their_own() -> None:
    if not has("bwrap"):
        pytest.skip("no bwrap")
    write = "open('a', 'w').write('x' * 100); open('a').read(2)"
    assert run(write, "bwrap") == ("'xx'\n", "")
    assert "[Errno 2]" in run("open('a')", "bwrap")[0], "each call has a new folder"
    assert run("import shutil; shutil.rmtree('/tmp', ignore_errors=True); 1", "bwrap") == (
        "1\n",
        "",
    )
    fill = "\n".join(
        ["n = 0", "for i in range(40):", "    n += open(f'{i}', 'wb').write(bytes(15 << 20))"]
    )
    assert "No space left" in run(fill, "bwrap")[0]
    assert "File too large" in run("open('a', 'wb').write(bytes(17 << 20))", "bwrap")[0]
    for folder in ("/dev/shm", "/dev", "/", "/etc"):
        assert run(f"open('{folder}/a', 'w')", "bwrap")[1] == "error"


def test_code_whose_worker_is_gone_ends_by_itself(level: str) -> None:
    assert run("import signal; 0 < signal.alarm(0) <= 31", level, timeout_s=30.0) == ("True\n", "")


def test_without_a_sandbox_limits_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("6 * 7", "none") == ("42\n", "")
    assert run("import time; time.sleep(60)", "none", timeout_s=1.0)[1] == "timeout"
    assert "MemoryError" in run("x = ' ' * (3 << 30)", "none")[0]


def test_doctor_names_the_level() -> None:
    level, why = find_level()
    finding = next(f for f in doctor.examine() if f.name == "Python sandbox")
    assert finding.found.startswith(level), why
    assert bool(finding.advice) == (level != "bwrap"), why
