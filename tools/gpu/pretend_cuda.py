"""A stand-in for a GPU on a machine without one: tensors that say they are on cuda:0 and are
computed on the CPU.

The tested code takes its CUDA branches. What a GPU would refuse is an error here: an operation on
tensors of two devices, and a kernel that exists on CPUs alone. While a pass is captured, it must
not read back or bring numbers from the host, and tensors in a graph's own memory must not be read
outside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tlt_megatron.runtime.device import Device

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_CPU_KERNELS = ("mkldnn", "onednn", "_for_cpu", "quantized")
# Operations that take tensors of two devices, as on a GPU: copies, and a lookup by indices from the
# host.
_BETWEEN_DEVICES = ("copy_", "_to_copy", "to", "_foreach_copy_", "index", "index_put_", "set_")
_READS_BACK = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
)
_TO_PYTHON = (
    Tensor.tolist,
    Tensor.item,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__bool__,
    Tensor.__index__,
)


class PretendTensor(Tensor):
    """`inner` holds the numbers."""

    inner: Tensor
    is_private: bool  # in the memory of a captured graph

    @staticmethod
    def __new__(cls, inner: Tensor, is_private: bool = False) -> PretendTensor:
        # Torch hangs views on the version counter of what they are a view of, which inference
        # tensors do not have.
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=CUDA,
            )
        made.inner = inner
        made.is_private = is_private
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        assert func is not Tensor.numpy, "numpy() of a tensor on a GPU"
        if func in _TO_PYTHON:
            _the_device().note_read_back(func.__name__)
            return func(args[0].inner)
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(args[0].inner)
        # Torch asks for a guard of the device here, which a build without CUDA does not have.
        if func is Tensor.__getitem__ and isinstance(args[0], PretendTensor):
            return _the_device().get_item(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], PretendTensor):
            return _the_device().set_item(*args)
        if func is Tensor.copy_ and isinstance(args[0], PretendTensor):
            return _the_device().__torch_dispatch__(torch.ops.aten.copy_.default, (), args, kwargs)
        if func is Tensor.nonzero:
            return torch.ops.aten.nonzero.default(*args)
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is Tensor.contiguous and not kwargs:
            is_there = args[0].is_contiguous()
            return (
                args[0] if is_there else torch.clone(args[0], memory_format=torch.contiguous_format)
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        return _the_device().__torch_dispatch__(func, types, args, kwargs)


class PretendEvent:
    """A mark in the queue of the pretended GPU, as `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._gpu = _the_device()
        self._position: int | None = None

    def record(self) -> None:
        """Mark the end of what is queued now."""
        self._position = self._gpu.num_launches

    def synchronize(self) -> None:
        """Let the host wait until the GPU is there."""
        assert self._position is not None, "waited for an event that is not recorded"
        self._gpu.wait_until(self._position)


_running: list[PretendGpu] = []


def _the_device() -> PretendGpu:
    assert _running, "a tensor of a pretended GPU outside `with PretendGpu()`"
    return _running[-1]


class PretendGpu(TorchDispatchMode):
    """While it is entered, `torch.device("cuda", 0)` can be used."""

    # Torch then leaves the start of CUDA to the mode, as it does for FakeTensorMode.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import it, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = self._is_replaying = False
        self.num_captures = 0
        self.read_backs: Counter[str] = Counter()  # by operation
        self.num_launches = 0  # operations and graphs that the host has queued
        self.num_nodes = 0  # operations of these graphs
        self.num_done = 0  # launches that the host has waited for
        self.max_ahead = 0  # the most launches that the host was ahead by
        # Copies to the host that it has not waited for: position, source and target.
        self._on_the_way: list[tuple[int, Tensor, Tensor]] = []

    def __enter__(self) -> PretendGpu:
        _running.append(self)
        # torch.tensor makes its tensor on the CPU and moves it, which the mode sees.
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        # Module.to replaces parameters instead of changing what is in them.
        self._overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._event, torch.cuda.Event = torch.cuda.Event, PretendEvent
        return super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        torch.cuda.Event = self._event
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        torch.__future__.set_overwrite_module_params_on_conversion(self._overwrites)
        _running.pop()

    def note_launch(self) -> None:
        """Count an operation that is no view or allocation. The operations of a graph are one
        launch together.
        """
        self.num_launches += not self._is_replaying
        self.num_nodes += self._is_replaying

    def note_read_back(self, name: str) -> None:
        """Let the host wait for the device."""
        assert not self.is_capturing, f"{name} reads back in a captured pass"
        self.read_backs[name] += 1
        self.wait_until(self.num_launches)

    def wait_until(self, position: int) -> None:
        """Let the host wait until the first `position` launches are done."""
        self.num_done = max(self.num_done, position)
        for queued_at, source, target in self._on_the_way:
            if queued_at <= position:
                target.copy_(source)
        self._on_the_way = [copy for copy in self._on_the_way if copy[0] > position]

    def copy_later(self, target: Tensor, source: PretendTensor) -> Tensor:
        """Queue a copy to the host's pinned memory. It is not there before the host has waited."""
        self.num_launches += 1
        target.fill_(torch.nan if target.is_floating_point() else -1)
        self._on_the_way.append((self.num_launches, source.inner.clone(), target))
        return target

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        is_queued = name == "copy_" and (kwargs.get("non_blocking") or args[2:] == (True,))
        if is_queued and not isinstance(args[0], PretendTensor):
            return self.copy_later(args[0], args[1])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ours = [t for t in given if isinstance(t, PretendTensor)]
        devices = [d for d in tree_leaves((args, kwargs)) if isinstance(d, torch.device)]
        asked = devices[0] if devices else None
        if ours:
            self._check(func, name, given)
        if ours and (name in _READS_BACK or (asked is not None and asked.type == "cpu")):
            self.note_read_back(name)
        has_moved = asked is not None and any(t.device.type != asked.type for t in given)
        if has_moved and name not in ("zeros_like", "empty_like", "full_like", "ones_like"):
            assert not self.is_capturing, f"{name} brings numbers from the host in a captured pass"
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if has_moved:  # what is a copy on a GPU must not be the same memory here
            out = out.clone()
        if ours and not (_is_view(func) or "empty" in name):
            self.note_launch()
            self.max_ahead = max(self.max_ahead, self.num_launches - self.num_done)
        is_here = asked.type == "cuda" if asked is not None else self._stays(func, args, ours)
        if not is_here:
            return out
        known = {id(t.inner): t for t in ours}
        return tree_map(lambda value: self._outer(value, known), out)

    def get_item(self, tensor: PretendTensor, index: object) -> PretendTensor:
        """`tensor[index]`."""
        indices = [t for t in tree_leaves(index) if isinstance(t, Tensor)]
        self._check(torch.ops.aten.index.Tensor, "index", [tensor, *indices])
        assert not any(t.dtype == torch.bool for t in indices), "a mask as an index reads back"
        return PretendTensor(tensor.inner[tree_map(_inner, index)], self.is_capturing)

    def set_item(self, tensor: PretendTensor, index: object, value: object) -> None:
        """`tensor[index] = value`."""
        leaves = [t for t in tree_leaves((index, value)) if isinstance(t, Tensor)]
        self._check(torch.ops.aten.index_put_.default, "index_put_", [tensor, *leaves])
        tensor.inner[tree_map(_inner, index)] = _inner(value)

    def _stays(self, func: Callable, args: tuple, ours: list[PretendTensor]) -> bool:
        """Whether results are on the GPU, where the call does not say."""
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            return isinstance(args[0], PretendTensor)
        return bool(ours)

    def _check(self, func: Callable, name: str, given: list[Tensor]) -> None:
        full = str(func)
        assert not any(word in full for word in _CPU_KERNELS), f"{full} exists on CPUs alone"
        others = [t for t in given if not isinstance(t, PretendTensor)]
        if self.is_capturing or self._is_replaying:
            assert not [t for t in others if t.dim() > 0], f"{full} brings numbers from the host"
        else:
            private = [t for t in given if isinstance(t, PretendTensor) and t.is_private]
            assert not private, f"{full} reads what a graph keeps for itself"
        if name in _BETWEEN_DEVICES:
            if others and not isinstance(given[0], PretendTensor):
                self.note_read_back(name)
            return
        shapes = [tuple(t.shape) for t in others if t.dim() > 0]
        assert not shapes, f"{full} on cuda:0 was given tensors on the CPU, of shapes {shapes}"
        if others and torch.Tag.pointwise not in func.tags:
            raise AssertionError(f"{full} on cuda:0 was given a scalar tensor on the CPU")

    def _outer(self, value: object, known: dict[int, PretendTensor]) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:  # changed in place
            return known[id(value)]
        return PretendTensor(value, self.is_capturing)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, False)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `engines.embedded.graph_pool.GraphMemory`. A replay runs the work again."""
        work()
        with self._phase("is_capturing"):
            work()
        self.num_captures += 1

        def replay() -> None:
            self.num_launches += 1
            with self._phase("_is_replaying"):
                work()

        return replay


def _is_view(func: Callable) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return all(info is not None and not info.is_write for info in infos)


def _inner(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.inner
    return _CPU if isinstance(value, torch.device) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PretendDevice(Device):
    """cuda:0, with graphs."""

    gpu: PretendGpu = field(default_factory=PretendGpu)

    def graph_memory(self) -> Any:
        """See `Device`."""
        return self.gpu

    def free_bytes(self) -> int:
        """See `Device`."""
        return 1 << 40

    def synchronize(self) -> None:
        """See `Device`."""


def pretend_device() -> PretendDevice:
    """A GPU that can be used within `with device.gpu:`."""
    return PretendDevice(torch_device=CUDA, backend="cpu:gloo,cuda:nccl")
