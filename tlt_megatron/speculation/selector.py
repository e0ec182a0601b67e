"""Strategy selectors: the protocol, the trace of decisions, and the selector with a fixed strategy.

The engine calls `choose` before a decode pass and `observe` after it. It passes numbers that it has on the host already, so
no selector synchronizes the device. Passes without drafting (`OFF`) are observed too, with no depths, so that selectors learn
when speculation is slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt_megatron.speculation.strategy import SpeculationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice and its throughput."""

    batch_size: int
    strategy: SpeculationStrategy
    reason: str  # "fixed", "only", "exploit", "explore", ...
    tokens_per_s: float | None  # committed by the whole batch; None if the pass was not observed


class StrategySelector(Protocol):
    """Chooses a strategy for every decode pass of a shrinking batch."""

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """Return the strategy of the next decode pass for `batch_size` >= 1 running requests."""

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """Record the result of a decode pass.

        Element d - 1 of `accepted_by_depth` counts the requests that accepted at least d drafted tokens
        (`verify.accepted_by_depth`; empty for OFF). `seconds` covers the whole pass. It includes a rebuild of the drafter's
        cache, which is part of the cost of turning speculation on.
        """

    def drafter_changed(self) -> None:
        """Signal that the learned drafter was replaced, so estimates of the old one may be wrong."""

    def decisions(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first. Only the latest few thousand are kept."""

    def state_dict(self) -> dict[str, object]:
        """Return the learned state, as values that JSON can hold."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`. ValueError if it belongs to other strategies."""


class DecisionTrace:
    """The latest decisions of a selector."""

    def __init__(self, capacity: int = 4096) -> None:
        self._entries: deque[tuple[int, SpeculationStrategy, str, float | None]] = deque(
            maxlen=capacity
        )

    def chosen(self, batch_size: int, strategy: SpeculationStrategy, reason: str) -> None:
        """Record a choice."""
        self._entries.append((batch_size, strategy, reason, None))

    def observed(self, strategy: SpeculationStrategy, batch_size: int, tokens_per_s: float) -> None:
        """Record the throughput of the latest choice. Ignores a pass that does not match it."""
        if not self._entries:
            return
        chosen_size, chosen, reason, earlier = self._entries[-1]
        if earlier is None and chosen_size == batch_size and chosen == strategy:
            self._entries[-1] = (batch_size, strategy, reason, tokens_per_s)

    def take(self) -> list[Decision]:
        """Return all entries and clear the trace."""
        taken = [
            Decision(batch_size=size, strategy=strategy, reason=reason, tokens_per_s=tokens_per_s)
            for size, strategy, reason, tokens_per_s in self._entries
        ]
        self._entries.clear()
        return taken


class FixedSelector:
    """Always chooses the same strategy."""

    def __init__(self, strategy: SpeculationStrategy) -> None:
        self._strategy = strategy
        self._trace = DecisionTrace()

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """Return the fixed strategy."""
        self._trace.chosen(batch_size, self._strategy, "fixed")
        return self._strategy

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """Record the throughput in the trace."""
        self._trace.observed(
            strategy, batch_size, committed_per_s(batch_size, accepted_by_depth, seconds)
        )

    def drafter_changed(self) -> None:
        """Do nothing: this selector does not learn."""

    def decisions(self) -> list[Decision]:
        """See `StrategySelector`."""
        return self._trace.take()

    def state_dict(self) -> dict[str, object]:
        """Return the kind only: there is no learned state."""
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Check the kind; there is nothing to restore."""
        check_state(state, "fixed", ())


def committed_per_s(batch_size: int, accepted_by_depth: Sequence[int], seconds: float) -> float:
    """Return tokens per second of the batch: each request commits its accepted tokens and one bonus token."""
    return (batch_size + sum(accepted_by_depth)) / max(seconds, 1e-9)


def check_state(
    state: Mapping[str, object], kind: str, strategies: Sequence[SpeculationStrategy]
) -> None:
    """Raise ValueError unless `state` belongs to a selector of this kind with these strategies."""
    if state.get("kind") != kind:
        raise ValueError(f"selector={kind}, but the state is of selector={state.get('kind')}")
    expected = [str(strategy) for strategy in strategies]
    if state.get("strategies", []) != expected:
        raise ValueError(
            f"strategies={', '.join(expected)}, but the state is of {state.get('strategies')}"
        )
