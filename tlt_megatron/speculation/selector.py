"""Who decides, before every step, how to speculate: the protocol, its trace, and the selector that never changes its mind.

The engine calls `choose` before a step and `observe` after it, with numbers it has anyway: no selector makes the device
wait. One thing to know: a step that drafts nothing (`OFF`) is observed too, with no depths, so that selectors learn when
speculation loses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt_megatron.speculation.strategy import SpeculationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice and what came of it."""

    batch_size: int
    strategy: SpeculationStrategy
    reason: str  # "fixed", "only", "exploit", "explore", ...
    tokens_per_s: float | None  # committed by the whole batch; None if the step was not observed


class StrategySelector(Protocol):
    """Chooses a strategy for every step of a batch that shrinks."""

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """The strategy of the next step for `batch_size` >= 1 running requests."""

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """What a step brought. Element d - 1 of `accepted_by_depth` counts the requests that accepted at least d
        drafted tokens (`verify.accepted_by_depth`; empty for OFF). `seconds` is all that the step took, a rebuild of
        the drafter's cache included: it is a part of the price of turning speculation on."""

    def drafter_changed(self) -> None:
        """The learned drafter has been replaced: what was learned about it may be wrong by now."""

    def decisions(self) -> list[Decision]:
        """The decisions since the last call, oldest first; only the latest few thousand are kept."""

    def state_dict(self) -> dict[str, object]:
        """What was learned, JSON-able."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state_dict` stood. ValueError if it belongs to other strategies."""


class DecisionTrace:
    """The latest decisions of a selector."""

    def __init__(self, capacity: int = 4096) -> None:
        self._entries: deque[tuple[int, SpeculationStrategy, str, float | None]] = deque(
            maxlen=capacity
        )

    def chosen(self, batch_size: int, strategy: SpeculationStrategy, reason: str) -> None:
        """Note a choice."""
        self._entries.append((batch_size, strategy, reason, None))

    def observed(self, strategy: SpeculationStrategy, batch_size: int, tokens_per_s: float) -> None:
        """Note what the latest choice brought; a step that was not chosen here is not noted."""
        if not self._entries:
            return
        chosen_size, chosen, reason, earlier = self._entries[-1]
        if earlier is None and chosen_size == batch_size and chosen == strategy:
            self._entries[-1] = (batch_size, strategy, reason, tokens_per_s)

    def take(self) -> list[Decision]:
        """All entries, which are then forgotten."""
        taken = [
            Decision(batch_size=size, strategy=strategy, reason=reason, tokens_per_s=tokens_per_s)
            for size, strategy, reason, tokens_per_s in self._entries
        ]
        self._entries.clear()
        return taken


class FixedSelector:
    """Always the same strategy."""

    def __init__(self, strategy: SpeculationStrategy) -> None:
        self._strategy = strategy
        self._trace = DecisionTrace()

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """The strategy."""
        self._trace.chosen(batch_size, self._strategy, "fixed")
        return self._strategy

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """For the trace alone."""
        self._trace.observed(
            strategy, batch_size, committed_per_s(batch_size, accepted_by_depth, seconds)
        )

    def drafter_changed(self) -> None:
        """Nothing was learned."""

    def decisions(self) -> list[Decision]:
        """See `StrategySelector`."""
        return self._trace.take()

    def state_dict(self) -> dict[str, object]:
        """Nothing is learned."""
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Nothing to restore."""
        check_state(state, "fixed", ())


def committed_per_s(batch_size: int, accepted_by_depth: Sequence[int], seconds: float) -> float:
    """Every request commits what it accepted and one bonus token."""
    return (batch_size + sum(accepted_by_depth)) / max(seconds, 1e-9)


def check_state(
    state: Mapping[str, object], kind: str, strategies: Sequence[SpeculationStrategy]
) -> None:
    """ValueError unless `state` is of a selector of this kind over these strategies."""
    if state.get("kind") != kind:
        raise ValueError(f"selector={kind}, but the state is of selector={state.get('kind')}")
    expected = [str(strategy) for strategy in strategies]
    if state.get("strategies", []) != expected:
        raise ValueError(
            f"strategies={', '.join(expected)}, but the state is of {state.get('strategies')}"
        )
