"""Identifies the drafter that a rank holds by two numbers: updates and checksum.

session.py and spot_trainer.py compare them before and after a broadcast. All ranks wait for the checksum at the phase
boundary, so it works on one flat tensor, in blocks that fit into the cache. It is not stored in files: exported drafters have
the checksum of models/hf_io.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.runtime.process_groups import Group

UNKNOWN = -1  # a checksum that was not computed
_MODULUS = 1 << 63
_ROW = 1 << 15  # 8-byte words per row sum
_ROWS_AT_ONCE = {"cpu": 1}
_DEVICE_ROWS_AT_ONCE = 512  # other devices: fewer kernel launches matter more than memory
_LOW_HALF = (1 << 32) - 1
_MIX = 0x4F1BBCDCBFA53E0B
_BASE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """Identifies the drafter of a rank: weights and optimizer state."""

    num_updates: int
    checksum: int


def version_of(trainer: DrafterTrainer) -> StateVersion:
    """Return the version of the trainer's state. Only equal states give equal versions, except for 63-bit collisions."""
    tensors = trainer.state_dict().values()
    total = _checksum([t for t in tensors if t.is_floating_point()])
    for counter in (t for t in tensors if not t.is_floating_point()):
        total = (_BASE * total + int(counter)) % _MODULUS
    return StateVersion(num_updates=trainer.num_updates, checksum=total)


def gather_versions(own: StateVersion, group: Group, device: torch.device) -> list[StateVersion]:
    """Return the versions of all members in group order, on every member. One small collective."""
    if group.size == 1:
        return [own]
    mine = torch.tensor([own.num_updates, own.checksum], device=device)
    parts = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(parts, mine, group=group.handle)
    pairs = torch.stack(parts).tolist()
    return [StateVersion(num_updates=count, checksum=checksum) for count, checksum in pairs]


def _checksum(tensors: list[Tensor]) -> int:
    """Return a checksum of the exact bits, in order.

    Multiplies each 8-byte word by an odd factor of its place in the row, and XORs its high half into the low half. The row
    sums modulo 2^64 are the digits of the result. A change of one word always shows; other changes show except by chance.
    """
    first = tensors[0]
    row_numel = 8 * _ROW // first.element_size()
    padding = first.new_zeros(-sum(t.numel() for t in tensors) % row_numel)
    flat = torch.cat([*(t.flatten() for t in tensors), padding])
    factors = torch.arange(_ROW, device=flat.device).mul_(_MIX).bitwise_or_(1)
    sums = []
    rows = flat.view(torch.int64).view(-1, _ROW)
    for block in rows.split(_ROWS_AT_ONCE.get(flat.device.type, _DEVICE_ROWS_AT_ONCE)):
        mixed = block * factors  # int64 wraps around
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW_HALF))
        sums.append(mixed.sum(dim=1))
    total = 0
    for digit in torch.cat(sums).tolist():
        total = (_BASE * total + digit) % _MODULUS
    return total
