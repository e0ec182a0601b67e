"""Run a function on several ranks, forked from the test process: 4 ranks cost ~0.1 s. Or spawned,
for CUDA.

Fork is safe after torch has run only while no OpenMP pool exists: conftest.py sets
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

# Against a hang alone: another job may hold the disk or the CPUs for minutes.
GROUP_TIMEOUT_S = 600.0  # for the world's collectives
LIMIT_S = 900.0  # for a whole test's ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A forked rank, the pipe of its result, and the file where SIGUSR2 makes it write its
    stacks.
    """

    process: multiprocessing.Process
    result: Connection
    stacks: IO[str]

    def stop(self) -> None:
        """Wait for its end, and kill it if that does not come."""
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.result.close()
        self.stacks.close()


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = LIMIT_S,
    killed: Collection[int] = (),
    has_world: bool = True,
    method: str = "fork",
) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh gloo world; its results in rank order.
    Without `has_world` there is only the environment of one, as torchrun sets it, and `function`
    joins.

    `function` may be a closure (unless `method` is "spawn", it is forked, not pickled); results
    must pickle. Raises AssertionError with the traceback of the first rank that fails, or naming
    the ranks that do not end in time. The ranks in `killed` must kill themselves; their result is
    None, and the others then do not wait for one another at the end.
    """
    context = multiprocessing.get_context(method)
    port = free_port()
    ranks: list[_Rank] = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        stacks = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  # closed with its rank
        process = context.Process(
            target=_rank_main,
            args=(
                *(rank, world_size, port, sender, stacks.name, function, args),
                *(has_world, not killed),
            ),
            daemon=False,
        )
        process.start()
        sender.close()
        ranks.append(_Rank(process=process, result=receiver, stacks=stacks))
    try:
        return _collect(ranks, time.monotonic() + timeout_s, killed)
    finally:
        for rank in ranks:
            rank.stop()


def _collect(ranks: list[_Rank], deadline: float, killed: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {
            rank.result: number for number, rank in enumerate(ranks) if number not in results
        }
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, _describe_late({number: ranks[number] for number in waiting.values()})
        for pipe in ready:
            number = waiting[pipe]
            try:
                is_ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                is_ok, payload = number in killed, None
                if not is_ok:
                    ranks[number].process.join(timeout=10)
                    code = ranks[number].process.exitcode
                    payload = f"the process died without a word, exit code {code}"
            else:
                assert number not in killed, f"rank {number} was to die and did not: {payload}"
            if not is_ok and "Timed out" in str(payload):  # another rank stands still
                others = {n: rank for n, rank in enumerate(ranks) if n not in {number, *results}}
                payload = f"{payload}\n{_describe_late(others)}"
            assert is_ok, f"rank {number} failed:\n{payload}"
            results[number] = payload
    return [results[number] for number in range(len(ranks))]


def _describe_late(ranks: dict[int, _Rank]) -> str:
    """Which ranks have not ended in time, and where each of their threads is."""
    for rank in ranks.values():
        for number in (signal.SIGCONT, signal.SIGUSR2):
            os.kill(rank.process.pid, number)
    time.sleep(2.0)
    text = f"ranks {sorted(ranks)} did not end in time"
    for number, rank in ranks.items():
        rank.stacks.seek(0)
        text += f"\nrank {number}:\n{rank.stacks.read()[-4000:]}"
    return text


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    sender: Connection,
    stacks: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    has_world: bool,
    has_last_barrier: bool,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.register(signal.SIGUSR2, file=open(stacks, "w"))  # noqa: SIM115
    torch.set_num_threads(1)
    try:
        if has_world:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
        message = (True, function(*args))
        payload = pickle.dumps(message)
        if has_world and has_last_barrier:
            dist.barrier()
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(payload)
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def free_port() -> int:
    """A port that nothing listens on, below those that the system and SGLang's ranks take.

    A port of the system's own choice may go to another process before its user listens on it.
    Workers of pytest-xdist draw from ports of their own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.SystemRandom().randrange(10_000 + worker % 8, 16_000, 8)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
