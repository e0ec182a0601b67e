"""The device of this rank as a value.

Outside the SGLang and Megatron adapters, only this file names torch.cuda.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

log = logging.getLogger(__name__)
_CONTROL_GROUPS, _OWN_CONTROL_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_STATUS, _CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that this rank computes on, and its communication backend."""

    torch_device: torch.device
    backend: str  # torch.distributed's: gloo | nccl, or both by device type

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def gpu_name(self) -> str:
        """Return torch's name of the GPU; "" on a CPU."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else ""

    def free_bytes(self) -> int:
        """Return the memory this rank can still take: of its GPU, or its share of what the host has
        available.
        """
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch_device)[0]
        return self.host_free_bytes()

    def host_free_bytes(self) -> int:
        """Return this rank's share of what the host has available."""
        return host_available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def process_bytes(self) -> int:
        """Return the host memory this process already holds on a CPU; 0 on a GPU."""
        return 0 if self.is_cuda else psutil.Process().memory_info().rss

    def release_cached(self) -> None:
        """Give cached GPU memory back to the driver, for other processes of the GPU."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Restart the measurement of `peak_bytes`."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        else:
            with suppress(OSError):  # no /proc, or a sandbox that keeps it read-only
                _CLEAR_PEAK.write_text("5")  # proc(5): resets the peak of the resident set

    def peak_bytes(self) -> int:
        """Return the most memory this process held since `reset_peak`; 0 if the system does not
        report it.
        """
        if self.is_cuda:
            return torch.cuda.max_memory_reserved(self.torch_device)
        status = _STATUS.read_text() if _STATUS.exists() else ""
        peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)  # gVisor leaves it out
        return int(peak[1]) * 1024 if peak else 0

    def synchronize(self) -> None:
        """Wait for the device. For timing only, never on a hot path."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def graph_memory(self) -> GraphMemory | None:
        """Return new memory for captured graphs; None if the device cannot capture."""
        return GraphMemory(self.torch_device) if self.is_cuda else None


def gpu_names() -> list[str]:
    """Return a line for each GPU that torch sees: its name and memory."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties]


@functools.cache
def has_triton() -> bool:
    """Return whether kernels for a GPU can be compiled. CUDA builds of torch come with Triton."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_numba() -> bool:
    """Return whether loops for a CPU can be compiled. numba refuses a NumPy that is too new."""
    try:
        importlib.import_module("numba")
    except ImportError as error:
        log.warning("the embedded engine is slower, because numba cannot be imported: %s", error)
        return False
    return True


def has_loops(device: torch.device) -> bool:
    """Return whether operations are compiled loops: on a CPU with numba and one thread."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and has_numba()


def host_available_bytes() -> int:
    """Return what the host can give without swapping, page cache included, or less if a control
    group limits it.
    """
    available: float = psutil.virtual_memory().available
    own = ""
    if _OWN_CONTROL_GROUP.exists():
        groups = [line.split("::") for line in _OWN_CONTROL_GROUP.read_text().splitlines()]
        own = "".join(names[1] for names in groups if names[0] == "0").strip("/")  # version 2
    folder = _CONTROL_GROUPS / own
    for group in (folder, *folder.parents):
        if (group / "memory.max").exists():
            available = min(available, _left_in_control_group(group))
    return int(available)


def _left_in_control_group(group: Path) -> float:
    """Return how many bytes its limit leaves.

    The kernel drops cached files before it refuses memory.
    """
    limit = (group / "memory.max").read_text().strip()
    if limit == "max":
        return math.inf
    lines = (group / "memory.stat").read_text().splitlines()
    numbers = dict(line.split() for line in lines)
    files = int(numbers["inactive_file"]) + int(numbers["active_file"])
    return int(limit) - int((group / "memory.current").read_text()) + files


class GraphMemory:
    """GPU memory that captured graphs share. Only one of the graphs may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` twice to initialize libraries, then capture it. Returns a function that
        replays it.

        Memory that `work` allocates and drops is shared with graphs captured later. Its output
        tensors must exist before the call. The memory is freed when all returned functions are
        dropped.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may use the device during the capture.
        mode = "thread_local"
        capturing = torch.cuda.graph(graph, self._pool, capture_error_mode=mode)
        # Use torch's own capture stream for all captures. Graphs share memory only within one
        # stream, and cuBLAS keeps a 32 MiB workspace on a Hopper for every stream that it was used
        # on.
        stream = capturing.capture_stream
        assert stream is not None
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        caller.wait_stream(stream)
        with capturing:
            work()
        return graph.replay


class HostCopies:
    """Copies of tensors in host memory. From a GPU they are queued, to pinned memory."""

    def __init__(self) -> None:
        self._end: torch.cuda.Event | None = None  # recorded after the last copy

    def add(self, tensor: Tensor) -> Tensor:
        """Return the copy, to be read after `wait`; a CPU tensor itself."""
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._end = torch.cuda.Event()
        self._end.record()
        return host

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._end is not None:
            self._end.synchronize()


class QueueLimit:
    """Keeps the host at most one stretch of kernels ahead of a GPU. Each call ends a stretch."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last: torch.cuda.Event | None = None  # the end of the stretch before this one

    def __call__(self) -> None:
        """Wait until the GPU has finished what was queued before the previous call."""
        if not self._is_cuda:
            return
        last, self._last = self._last, torch.cuda.Event()
        self._last.record()
        if last is not None:
            last.synchronize()


def select_device(name: str) -> Device:
    """Return the device for `auto`, `cpu` or `cuda`. On GPUs the local rank selects the card.

    ValueError for another name, if cuda is requested and absent, or if there are fewer cards than
    ranks.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"run.device={name!r}: must be one of auto, cpu, cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("run.device='cuda': torch sees no CUDA device here; allowed: auto, cpu")
    if name == "cpu" or not available:
        return Device(torch_device=torch.device("cpu"), backend="gloo")
    ranks, cards = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > cards:
        raise ValueError(
            f"--nproc-per-node={ranks}: must be at most {cards}, the GPUs that torch sees here"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Device(torch_device=device, backend="cpu:gloo,cuda:nccl")
