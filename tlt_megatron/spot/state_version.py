"""Identifies the drafter that a rank holds by two numbers: updates and checksum.

session.py and spot_trainer.py compare them before and after a broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.models.hf_io import CHECKSUM_MODULUS, checksum_tensor
from tlt_megatron.runtime.process_groups import Group

UNKNOWN = -1  # a checksum that was not computed


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """Identifies the drafter of a rank: weights and optimizer state."""

    num_updates: int
    checksum: int


def version_of(trainer: DrafterTrainer) -> StateVersion:
    """Return the version of the trainer's state. Only equal states give equal versions, except for 63-bit collisions."""
    checksums = (checksum_tensor(name, t) for name, t in trainer.state_dict().items())
    return StateVersion(num_updates=trainer.num_updates, checksum=sum(checksums) % CHECKSUM_MODULUS)


def gather_versions(own: StateVersion, group: Group, device: torch.device) -> list[StateVersion]:
    """Return the versions of all members in group order, on every member. One small collective."""
    if group.size == 1:
        return [own]
    mine = torch.tensor([own.num_updates, own.checksum], device=device)
    parts = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(parts, mine, group=group.handle)
    pairs = torch.stack(parts).tolist()
    return [StateVersion(num_updates=count, checksum=checksum) for count, checksum in pairs]
