"""Run a function on several gloo ranks, forked from the test process: 4 ranks cost ~0.1 s.

Fork is safe after torch has run only while no OpenMP pool exists: conftest.py sets OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    killed: Collection[int] = (),
    has_world: bool = True,
) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh gloo world; its results in rank order. Without `has_world` there is
    only the environment of one, as torchrun sets it, and `function` joins.

    `function` may be a closure (it is forked, not pickled); results must pickle. Raises AssertionError with the
    traceback of the first rank that fails, or naming the ranks that do not end in time. The ranks `killed` must die by
    their own hand without a result, None here; the others then do not wait for one another at the end.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(rank, world_size, port, sender, function, args, has_world, not killed),
            daemon=False,
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s, killed)
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Any], deadline: float, killed: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=max(0.0, deadline - time.monotonic())
        )
        assert ready, f"ranks {sorted(waiting.values())} did not end in time"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                is_ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                is_ok = rank in killed
                payload = None if is_ok else "the process died without a word"
            else:
                assert rank not in killed, f"rank {rank} was to die and did not: {payload}"
            assert is_ok, f"rank {rank} failed:\n{payload}"
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    sender: Any,
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
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        if has_world:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
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
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 21_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
