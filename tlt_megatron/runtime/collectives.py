"""The few collectives outside Megatron. Every member of the given group must call them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from tlt_megatron.runtime.process_groups import Group

T = TypeVar("T")
Name = TypeVar("Name", bound=str)


def gather_objects(value: T, group: Group) -> list[T]:
    """Return the value of every member, in group order, on every member.

    Values are pickled, among our own ranks only.
    """
    if group.size == 1:
        return [value]
    values: list[T] = [None] * group.size  # type: ignore[list-item]
    dist.all_gather_object(values, value, group=group.of_torch)
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the value of member `source` (a rank within the group) on every member."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.global_ranks[source], group=group.of_torch)
    return box[0]


def call_on_first(function: Callable[[], T], group: Group) -> T:
    """Return on every member what `function` returns on the first one.

    Its ValueError or OSError is a ValueError with the same text on every member.
    """
    value, error = None, None
    if group.is_first:
        try:
            value = function()
        except (ValueError, OSError) as cause:
            error = str(cause)
    value, error = broadcast_object((value, error), group)
    if error is not None:
        raise ValueError(error)
    return value  # type: ignore[return-value]


def call_on_each(function: Callable[[], T], group: Group) -> T:
    """Return what `function` returns here. A ValueError of any member is one with the same text on
    every member, so that none waits for it.
    """
    value, error = None, None
    try:
        value = function()
    except ValueError as cause:
        error = str(cause)
    errors = [each for each in gather_json(error, group) if each is not None]
    if errors:
        raise ValueError(errors[0])
    return value  # type: ignore[return-value]


def agree_any(flag: bool, group: Group) -> bool:
    """Return whether `flag` is True on any member. The answer is the same on all."""
    return any(gather_objects(flag, group))


def sum_metrics(metrics: Mapping[str, float], group: Group) -> dict[str, float]:
    """Sum by key over the members. A key that a member lacks counts as zero."""
    parts = gather_json({name: float(value) for name, value in metrics.items()}, group)
    names = sorted(set().union(*parts))
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def max_by_name(values: Mapping[Name, float], group: Group) -> dict[Name, float]:
    """Return the maximum of each value over the members, which have the same names."""
    parts = gather_json({str(name): float(value) for name, value in values.items()}, group)
    return {name: max(part[name] for part in parts) for name in values}  # as this member has them


def barrier(group: Group) -> None:
    """Wait until every member has called this."""
    if group.size > 1:
        dist.barrier(group=group.of_torch)


def gather_bytes(value: bytes, group: Group) -> list[bytes]:
    """Return the bytes of every member, in group order, on every member."""
    if group.size == 1:
        return [value]
    device = _device_of(group)
    size = torch.tensor([len(value)], device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size)]
    dist.all_gather(sizes, size, group=group.of_torch)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(value)] = _as_tensor(value).to(device)
    found = [torch.empty_like(padded) for _ in range(group.size)]
    dist.all_gather(found, padded, group=group.of_torch)
    return [
        each[: int(size)].cpu().numpy().tobytes() for each, size in zip(found, sizes, strict=True)
    ]


def gather_tensor(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tensors of all members, of one shape, stacked in group order on the CPU."""
    if group.size == 1:
        return tensor[None].cpu()
    own = tensor.to(_device_of(group))
    found = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(found, own, group=group.of_torch)
    return torch.stack(found).cpu()


def sum_tensor(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the members' tensors on the CPU."""
    total = tensor.to(_device_of(group), copy=True) if group.size > 1 else tensor
    if group.size > 1:
        dist.all_reduce(total, group=group.of_torch)
    return total.cpu()


def broadcast_bytes(value: bytes, group: Group) -> bytes:
    """Return the bytes of the first member on every member. All have equally many."""
    if group.size == 1:
        return value
    tensor = _as_tensor(value).to(_device_of(group))
    dist.broadcast(tensor, src=group.global_ranks[0], group=group.of_torch)
    return tensor.cpu().numpy().tobytes()


def gather_json(value: T, group: Group) -> list[T]:
    """Return the value of every member, in group order, on every member. It consists of JSON
    types: what belongs to a batch is never pickled. It travels compressed, to a third or less.
    """
    if group.size == 1:
        return [value]
    sent = zlib.compress(json.dumps(value).encode(), 1)
    return [json.loads(zlib.decompress(each)) for each in gather_bytes(sent, group)]


def exchange_bytes(outgoing: Sequence[bytes], group: Group) -> list[bytes]:
    """Send `outgoing[i]` to member i. Return what each member sent to this one, in group order."""
    device = _device_of(group)
    sent = torch.tensor([len(each) for each in outgoing], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.of_torch)
    sizes = received.tolist()
    incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        incoming,
        _as_tensor(bytearray().join(outgoing)).to(device),
        output_split_sizes=sizes,
        input_split_sizes=sent.tolist(),
        group=group.of_torch,
    )
    return [each.numpy().tobytes() for each in incoming.cpu().split(sizes)]


def _as_tensor(value: bytes | bytearray) -> torch.Tensor:
    if not value:
        return torch.empty(0).byte()
    writable = value if isinstance(value, bytearray) else bytearray(value)
    return torch.frombuffer(writable, dtype=torch.uint8)


def _device_of(group: Group) -> torch.device:
    """Return where the group's collectives take tensors."""
    return torch.device("cuda" if dist.get_backend(group.of_torch) == "nccl" else "cpu")
