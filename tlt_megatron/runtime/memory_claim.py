"""The memory ledger: the memory each component will take, summed by phase and checked before
anything is allocated.

trainer/before/memory_ledger.py collects the claims. `Device.peak_bytes` gives the measured value. A
rank with a GPU also claims host memory, which is added up and checked apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

_USABLE_SHARE = 0.95  # a share of the free memory: claims exclude fragmentation and buffers
_MIB = 1 << 20


class Phase(StrEnum):
    """The start of a run, or a part of the RL step, with its own memory peak."""

    START = "start"  # models are built and restored while the engine sleeps
    ROLLOUT = "rollout"
    SPOT = "spot"  # drafter training on idle ranks, and the publication of a drafter
    UPDATE = "update"  # log-prob passes included
    WEIGHT_SYNC = "weight_sync"
    CHECKPOINT = "checkpoint"


ALL_PHASES = frozenset(Phase)
STEP_PHASES = ALL_PHASES - {Phase.START}


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """A row of the ledger: the memory that one component takes on a rank, and in which phases.

    Example: `MemoryClaim("kv", 5 << 30, {Phase.ROLLOUT}, lower="rollout.max_batch_size=64")`.
    """

    name: str
    num_bytes: int
    phases: Set[Phase] = ALL_PHASES  # in which it is held
    _: KW_ONLY
    in_host: bool = False  # for a rank with a GPU; on a CPU, host memory is the device's
    lower: str = ""  # settings that make it smaller, with their current values
    is_estimate: bool = False  # not computed from sizes alone: what it takes was measured


class MemoryLedger:
    """The claims of the fullest rank."""

    def __init__(self, claims: Iterable[MemoryClaim]) -> None:
        self.claims = tuple(claim for claim in claims if claim.num_bytes)

    def of_host(self) -> MemoryLedger:
        """Return the host memory of a rank with a GPU as a ledger of its own."""
        return MemoryLedger(replace(c, in_host=False) for c in self.claims if c.in_host)

    def bytes_in(self, phase: Phase) -> int:
        """Return the sum of the claims on the device that are held in `phase`."""
        held = (c for c in self.claims if phase in c.phases and not c.in_host)
        return sum(claim.num_bytes for claim in held)

    @property
    def peak_phase(self) -> Phase:
        """Return the phase that takes most."""
        return max(Phase, key=self.bytes_in)

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that the fullest phase takes."""
        return self.bytes_in(self.peak_phase)

    def lines(self) -> list[str]:
        """Return a table in MiB of 80 columns: one row per claim, and the sums.

        Host memory is below.
        """
        rows = [("MiB of a rank; ~ estimate", *map(str, Phase)), *self._rows()]
        if any(claim.in_host for claim in self.claims):
            rows += [("in host memory",), *self.of_host()._rows()]
        widths = [max(len(phase), 7) + 1 for phase in Phase]
        return [
            f"{name:<25}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
            for name, *cells in rows
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for claim in sorted(self.claims, key=lambda claim: -claim.num_bytes):
            if not claim.in_host:
                shown = f"{'~' * claim.is_estimate}{claim.num_bytes / _MIB:,.0f}"
                rows.append((claim.name, *(shown if p in claim.phases else "-" for p in Phase)))
        return [*rows, ("sum", *(f"{self.bytes_in(phase) / _MIB:,.0f}" for phase in Phase))]

    @staticmethod
    def usable(free_bytes: int) -> int:
        """Return the bytes that claims may take of `free_bytes`."""
        return int(free_bytes * _USABLE_SHARE)

    def headline(self, free_bytes: int) -> str:
        """Return the largest sum in a line."""
        return (
            f"memory of a rank: {self.peak_bytes / _MIB:,.0f} MiB planned in the {self.peak_phase}"
            f" phase, {free_bytes / _MIB:,.0f} MiB free"
        )

    def check(self, free_bytes: int, where: str = "") -> None:
        """Raise ValueError if the fullest phase takes more than is free.

        It names the settings of the largest claims.
        """
        usable = self.usable(free_bytes)
        if self.peak_bytes <= usable:
            return
        held = [c for c in self.claims if self.peak_phase in c.phases and c.lower]
        largest = sorted((c for c in held if not c.in_host), key=lambda c: -c.num_bytes)[:2]
        settings = " or ".join(claim.lower for claim in largest).split(" or ")
        advice = " or ".join(dict.fromkeys(settings))
        raise ValueError(
            f"{where}memory: the {self.peak_phase} phase takes {self.peak_bytes / _MIB:,.0f} MiB of a rank,"
            f" {usable / _MIB:,.0f} MiB are usable: change {advice}"
        )
