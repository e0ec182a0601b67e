"""Captured graphs on a CPU: a stand-in for those of a GPU, which replays recorded calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt_megatron.models import arithmetic
from tlt_megatron.runtime.device import Device
from tlt_megatron.speculation import sampling

# What a capture may not do on a GPU: read back, or bring numbers from Python.
_FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal")


class RecordedGraphs:
    """Graph memory without a GPU: a graph is the list of calls on tensors that the work made. A
    replay makes these calls again on the very same tensors, and runs no other Python code of the
    work. `graphs` gets a reference to each graph.
    """

    def __init__(self, graphs: list[weakref.ref]) -> None:
        self._graphs = graphs

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `engines.embedded.graph_pool.GraphMemory`. Noise is made by torch as on a GPU,
        because calls of NumPy are not seen.
        """
        with mock.patch.object(sampling, "noise_of_ids", sampling.gumbel_of):
            work()
            with _Recorder() as recorder:
                work()
        self._graphs.append(weakref.ref(recorder))
        return recorder.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in _FORBIDDEN, f"{name} in a captured pass"
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in given]
        if made or func._schema.is_mutable:  # else a view
            self._calls.append((func, args, kwargs, made))
        return out

    def replay(self) -> None:
        """Make the calls again, and overwrite what they made."""
        for func, args, kwargs, made in self._calls:
            out = func(*args, **kwargs)
            if made:
                new = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
                for target, source in zip(made, new, strict=True):
                    target.copy_(source)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingDevice(Device):
    """The CPU, with graphs."""

    graphs: list[weakref.ref] = field(default_factory=list)  # all that were captured

    @property
    def num_alive(self) -> int:
        """Graphs that somebody still holds."""
        return sum(graph() is not None for graph in self.graphs)

    def graph_memory(self) -> RecordedGraphs:
        """See `Device`."""
        return RecordedGraphs(self.graphs)


def seen_arithmetic(device: Device) -> AbstractContextManager[object]:
    """Let models be made of torch's operations for a `RecordingDevice`: it does not see calls of
    numba.
    """
    if isinstance(device, RecordingDevice):
        return mock.patch.object(arithmetic, "has_loops", return_value=False)
    return nullcontext()


def recording_device() -> RecordingDevice:
    """A CPU on which passes are captured and replayed."""
    return RecordingDevice(torch_device=torch.device("cpu"), backend="gloo")
