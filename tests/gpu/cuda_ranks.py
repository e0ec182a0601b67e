"""Marks for tests that need GPUs, and ranks with a GPU each.

Ranks are spawned: CUDA that has been used in the parent cannot be used after a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import free_port

_CHECK_S = 1.0  # between two checks that all ranks are alive


def needs_gpus(count: int = 1) -> list[pytest.MarkDecorator]:
    """For `pytestmark`, or for one test."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    what = "a CUDA device" if count == 1 else f"{count} CUDA devices"
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(found < count, reason=f"needs {what}: torch sees {found}"),
    ]


def run_cuda_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """`function(*args)`, which must be of a module's top level, with the environment of torchrun; results in rank order.

    AssertionError with the traceback of the first rank that fails, or naming those that do not end in time.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_main, args=(rank, world_size, port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        missing = sorted(set(range(len(processes))) - found.keys())
        assert time.monotonic() < deadline, f"ranks {missing} did not end in time"
        try:
            rank, is_ok, value = results.get(timeout=_CHECK_S)
        except queue.Empty:
            dead = {rank: processes[rank].exitcode for rank in missing}
            dead = {rank: code for rank, code in dead.items() if code}
            assert not dead, f"died without a word, with these exit codes: {dead}"
            continue
        assert is_ok, f"rank {rank} failed:\n{value}"
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _main(
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        results.put((rank, True, function(*args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
