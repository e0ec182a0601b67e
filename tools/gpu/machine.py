"""The GPU that the items of `tools/gpu_check.py` use, real or pretended, and how they time work on
it.

It imports torch only when an item asks for it: an item that needs a missing package ends at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from tlt_megatron.runtime.device import Device

Figures = dict[str, Any]
"""What an item yields: numbers and short texts by name, also nested; the last value of a name."""

_T = TypeVar("_T")


class NothingRan(Exception):
    """The item has measured nothing here, and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an item may use. On a CPU there is a pretended GPU (pretend_cuda.py) and Triton's
    interpreter.
    """

    is_cpu: bool
    is_tiny: bool  # sizes that only show that the code runs
    scratch: Path  # kept between calls

    def pick(self, real: _T, tiny: _T) -> _T:
        """Return a size for this run."""
        return tiny if self.is_tiny else real

    @contextmanager
    def gpu(self) -> Iterator[Device]:
        """Enter the GPU for code that takes its CUDA branches."""
        from tlt_megatron.runtime import device

        if not self.is_cpu:
            yield device.select_device("cuda")
            return
        from tools.gpu.pretend_cuda import pretend_device

        triton = sys.modules.get("triton")
        sys.modules["triton"] = None  # type: ignore[assignment]  # compiles for no pretended GPU
        device.has_triton.cache_clear()
        pretended = pretend_device()
        with pretended.gpu:
            yield pretended
        del sys.modules["triton"]
        if triton is not None:
            sys.modules["triton"] = triton
        device.has_triton.cache_clear()

    def kernel_device(self) -> Device:
        """Return the device for Triton kernels. On a CPU the runner has set TRITON_INTERPRET=1."""
        from tlt_megatron.runtime.device import select_device

        return select_device("cpu" if self.is_cpu else "cuda")


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds of one call: the median of blocks of back-to-back calls, each until the
    device is done.
    """
    from torch.utils.benchmark import Timer

    return Timer("run()", globals={"run": run}).blocked_autorange().median


def kernel_seconds(device: Device, run: Callable[[int], object], *, calls: int = 16) -> float:
    """Return the seconds of one call on the GPU, without the host: `run(0)` to `run(calls - 1)` are
    captured in one graph.

    Let `run` take other inputs for every number if all of them fit into the GPU's cache.
    """

    def work() -> None:
        for number in range(calls):
            run(number)

    memory = device.graph_memory()
    if memory is None:
        return seconds_of(lambda: run(0))
    return seconds_of(memory.capture(work)) / calls


def copies_beyond_cache(num_bytes: int, *, most: int = 16) -> int:
    """Return how many copies of an input of `num_bytes` are larger than the cache of a GPU (60 MB
    on an H200).
    """
    return max(1, min(most, (200 << 20) // max(num_bytes, 1)))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, in float64."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
