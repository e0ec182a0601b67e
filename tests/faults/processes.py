"""Programs under test as processes: real torchrun, or an agent that forks its ranks, and what is left of them.

A schedule runs in a process of its own that adopts every orphan below it (`adopt_orphans`). So whatever a run leaves behind is
found as a descendant, whatever session, group or environment it has given itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tests.faults import probe
from tests.ranks import free_port

REPO = Path(__file__).resolve().parent.parent.parent
PROGRAM = REPO / "launch" / "pretrain_rl.py"
LAUNCHER = REPO / "launch" / "torchrun.py"
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_POLL_S = 0.01


def adopt_orphans() -> None:
    """From now on descendants whose parent dies become children of this process, not of init."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int | None = None) -> dict[int, str]:
    """Every live process below `pid` (default: this one), with its command line."""
    pid = os.getpid() if pid is None else pid
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))) is not None:
            parent, state = status
            if state != "Z" or _num_threads(int(entry)) > 1:
                children.setdefault(parent, []).append(int(entry))
    found: dict[int, str] = {}
    queue = list(children.get(pid, []))
    while queue:
        child = queue.pop()
        found[child] = _command(child)
        queue += children.get(child, [])
    return found


def kill_all(pids: Mapping[int, str] | Sequence[int]) -> None:
    """SIGKILL, those that have ended meanwhile excepted."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _num_threads(pid: int) -> int:
    """A zombie with threads is still ending: they hold its files and file locks."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _status(pid: int) -> tuple[int, str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return int(parent), state


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200]
    except (FileNotFoundError, ProcessLookupError):
        return "?"


@dataclass(kw_only=True)
class Job:
    """One start of the program. `folder` holds terminal.txt, codes.json and the marks of the probe."""

    folder: Path
    agents: Sequence[
        subprocess.Popen | int
    ]  # a process of its own program, or the pid of a forked one
    num_ranks: int
    is_torchrun: bool
    agent_codes: dict[int, int] = field(default_factory=dict)  # by pid; -N: ended by signal N

    @property
    def terminal(self) -> str:
        """What agent and ranks have written to the terminal so far."""
        return (self.folder / "terminal.txt").read_text(errors="replace")

    @property
    def agent_pids(self) -> list[int]:
        """In the order of their start."""
        return [agent if isinstance(agent, int) else agent.pid for agent in self.agents]

    @property
    def has_ended(self) -> bool:
        """Whether the agents have ended. Ranks may be left."""
        for agent, pid in zip(self.agents, self.agent_pids, strict=True):
            if pid not in self.agent_codes and (code := _poll(agent)) is not None:
                self.agent_codes[pid] = code
        return len(self.agent_codes) == len(self.agents)

    @property
    def rank_pids(self) -> dict[int, int]:
        """Of the ranks that have started, by rank."""
        marks = self.folder.glob("pid.*")
        return {int(mark.suffix[1:]): int(mark.read_text()) for mark in marks}

    @property
    def rank_codes(self) -> dict[int, int]:
        """Exit codes of ranks that were forked and have ended."""
        marks = self.folder.glob("code.*")
        return {int(mark.suffix[1:]): int(mark.read_text()) for mark in marks}

    def signal_agent(self, number: int, which: int = 0) -> None:
        """To the agent alone."""
        os.kill(self.agent_pids[which], number)

    def signal_rank(self, rank: int, number: int) -> None:
        """To one rank alone; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rank_pids[rank], number)

    def wait(self, limit_s: float) -> bool:
        """Whether all agents ended within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.has_ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _poll(agent: subprocess.Popen | int) -> int | None:
    """Its exit code, -N for signal N; None while it runs."""
    if not isinstance(agent, int):
        return agent.poll()
    done, status = os.waitpid(agent, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def start_forked(
    folder: Path,
    arguments: Sequence[str],
    plan: probe.Plan | None = None,
    *,
    num_ranks: int = 2,
    shutdown_timeout_s: float = 30.0,
) -> Job:
    """An agent that forks the ranks from this process, where everything is imported already."""
    folder.mkdir(parents=True)
    (folder / "terminal.txt").touch()
    port = free_port()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = _agent(folder, arguments, plan, num_ranks, port, shutdown_timeout_s)
        finally:
            os._exit(code)
    return Job(folder=folder, agents=[pid], num_ranks=num_ranks, is_torchrun=False)


def start_torchrun(
    folder: Path,
    arguments: Sequence[str],
    plan: probe.Plan | None = None,
    *,
    num_ranks: int = 2,
    num_agents: int = 1,
) -> Job:
    """What a user types, but for the script: it is rank.py, which watches the program that it then runs."""
    folder.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "TLT_FAULTS_FOLDER": str(folder),
        "TLT_FAULTS_PLAN": plan.to_json() if plan else "",
    }
    rendezvous = ["--standalone"]
    if num_agents > 1:
        rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        rendezvous += ["--nnodes", str(num_agents)]
    command = ["--nproc-per-node", str(num_ranks // num_agents)]
    command += [str(REPO / "tests" / "faults" / "rank.py"), *arguments]
    with open(folder / "terminal.txt", "ab") as terminal:
        agents = [
            subprocess.Popen(
                [sys.executable, str(LAUNCHER), *rendezvous, "--node-rank", str(node), *command],
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
            for node in range(num_agents)
        ]
    return Job(folder=folder, agents=agents, num_ranks=num_ranks, is_torchrun=True)


def _agent(
    folder: Path,
    arguments: Sequence[str],
    plan: probe.Plan | None,
    num_ranks: int,
    port: int,
    shutdown_timeout_s: float,
) -> int:
    """As torchrun's agent: hand a signal on to the ranks, end the others where one fails, kill what does not end."""
    os.setsid()
    _write_to(folder / "terminal.txt")
    received: list[int] = []
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: received.append(number))
    ranks: dict[int, int] = {}
    for rank in range(num_ranks):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read_end)
            _rank(folder, arguments, plan, rank, num_ranks, port, write_end)
        os.close(write_end)
        os.read(read_end, 1)  # ends when the rank would hear a signal
        os.close(read_end)
        ranks[pid] = rank
    alive, closing, has_failed = dict(ranks), None, False
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in alive:
            code = os.waitstatus_to_exitcode(status)
            (folder / f"code.{alive.pop(pid)}").write_text(str(code))
            has_failed = has_failed or code != 0
            if code and closing is None:
                received.append(signal.SIGTERM)
        for number in received:
            _signal_groups(alive, number)
            closing = closing or time.monotonic() + shutdown_timeout_s
        received.clear()
        if closing is not None and time.monotonic() > closing:
            _signal_groups(alive, signal.SIGKILL)
        if not pid:
            time.sleep(_POLL_S)
    return 1 if has_failed else 0


def _signal_groups(pids: Mapping[int, int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _rank(
    folder: Path,
    arguments: Sequence[str],
    plan: probe.Plan | None,
    rank: int,
    num_ranks: int,
    port: int,
    ready: int,
) -> None:
    """Become rank `rank`, from the top of the program; never returns. Closes `ready` once signals have their default effect."""
    os.setsid()
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(ready)
    atexit._clear()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PYTHONPATH=str(REPO),
        TORCHELASTIC_RUN_ID="faults",  # as under torchrun: somebody supervises the rank
        TLT_AGENT_PID=str(os.getppid()),
    )
    code = 1
    try:
        code = run_program(folder, rank, arguments, plan)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_program(folder: Path, rank: int, arguments: Sequence[str], plan: probe.Plan | None) -> int:
    """Run launch/pretrain_rl.py in this process as its main program, watched; its exit code."""
    with open(folder / f"stack.{rank}", "w") as stacks:
        return _run_watched(folder, rank, arguments, plan, stacks)


def _run_watched(
    folder: Path,
    rank: int,
    arguments: Sequence[str],
    plan: probe.Plan | None,
    stacks: TextIO,
) -> int:
    faulthandler.register(signal.SIGUSR2, file=stacks)  # where it hangs, should it
    (folder / f".pid.{rank}").write_text(str(os.getpid()))
    (folder / f".pid.{rank}").rename(folder / f"pid.{rank}")
    if plan is not None:
        probe.install(plan, folder, rank)
    sys.argv = [str(PROGRAM), *arguments]
    code: object = 0
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    assert code is None or isinstance(code, int)
    return code or 0


def _write_to(path: Path) -> None:
    """Send stdout and stderr of this process there, and take nothing from stdin."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "ab") as file, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def read_json(path: Path) -> object:
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))
