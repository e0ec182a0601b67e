"""What the simulation asks about a machine and a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt_megatron.config.strategy import SpeculationStrategy

# The phases of a step after its rollouts, and "rest", which is what no phase names.
PHASES = (
    *("reward", "publish_drafter", "values", "old_log_prob", "update_critic"),
    *("update_actor", "update_weights", "rest"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a request gains from one pass."""

    tokens: float  # the bonus token included
    by_depth: Sequence[float] = ()  # share of requests that accept at least depth d, [d - 1]


class Machine(Protocol):
    """Recorded (recorded_machine.py) or computed (computed_machine.py)."""

    source: str  # where its numbers are from
    max_updates: float  # optimizer steps of the drafter at the end of the recordings
    updates_per_idle_s: float  # optimizer steps that an idle rank-second brings; 0.0: no training

    def check(self, strategies: Sequence[SpeculationStrategy]) -> None:
        """ValueError for strategies that the machine knows nothing about."""
        ...

    def pass_seconds(self, strategy: SpeculationStrategy, batch_size: int, cached: float) -> float:
        """Return the seconds of a pass whose requests have `cached` response tokens in all."""
        ...

    def accepted(self, strategy: SpeculationStrategy, updates: float) -> Accepted:
        """Return what a request gains from a pass with a drafter of so many optimizer steps."""
        ...

    def phase_seconds(self, phase: str, tokens: float) -> float:
        """Return the seconds of a phase with so many response tokens of a replica.

        "gen_rest" is what a rollout takes besides decode passes.
        """
        ...
