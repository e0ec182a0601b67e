"""Strategy selectors: the protocol, the selector with a fixed strategy, and the one that a setting
names.

The engine calls `choose` before a decode pass and `observe` after it. It passes numbers that it has
on the host already, so no selector synchronizes the device. Passes without drafting (`OFF`) are
observed too, with no depths, so that selectors learn when speculation is slower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.config.strategy import SpeculationStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice for one decode pass."""

    strategy: SpeculationStrategy
    reason: str  # "fixed", "only", "best", "explore", "probe", ...


class StrategySelector(Protocol):
    """Chooses a strategy for every decode pass of a shrinking batch."""

    def choose(self, batch_size: int) -> Decision:
        """Return the strategy of the next decode pass for `batch_size` >= 1 running requests."""
        ...

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        first_by_depth: Sequence[int] | None = None,
    ) -> None:
        """Record the result of a decode pass.

        Element d - 1 of `accepted_by_depth` counts the requests that accepted at least d drafted
        tokens (`verify.accepted_by_depth`; empty for OFF). `first_by_depth` counts those of them
        whose token at depth d was the drafter's first candidate (`verify.first_on_path`); None for
        a chain: all. `seconds` covers the whole pass. It includes a rebuild of the drafter's cache,
        which is part of the cost of turning speculation on.
        """

    def drafter_changed(self) -> None:
        """Signal that the learned drafter was replaced, so estimates of the old one may be
        wrong.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state, as values that JSON can hold."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A state of another selector or of other strategies is ignored with
        a warning.
        """


class FixedSelector(StrategySelector):
    """Always chooses the same strategy. It learns nothing: other methods do nothing, as in the
    Protocol.
    """

    def __init__(self, strategy: SpeculationStrategy) -> None:
        self._decision = Decision(strategy=strategy, reason="fixed")

    def choose(self, batch_size: int) -> Decision:  # noqa: ARG002
        """Return the fixed strategy."""
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed"}


def fits(state: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether `state` has all values of `expected` (kind, strategies). If not, warn that
    learning starts anew.
    """
    for name, value in expected.items():
        if state.get(name) != value:
            log.warning(
                "the selector starts anew: the saved state has %s=%s, this run has %s",
                name,
                state.get(name),
                value,
            )
            return False
    return True


def make_selector(
    spec: str, strategies: Sequence[SpeculationStrategy], *, max_batch_size: int
) -> StrategySelector:
    """Return a new selector over `strategies`. A selector that is not built in is called as
    `Selector(strategies)`.

    ValueError for a strategy that is given twice, or names the methods of `StrategySelector` that
    it lacks, or what is wrong with the import path.
    """
    selector = load_extension("speculation.selector", spec)
    if spec == "fixed":
        return selector(strategies[0])
    if len(set(strategies)) != len(strategies):
        raise ValueError(f"strategies={', '.join(map(str, strategies))}: one is given twice")
    if spec == "beg_mab":
        return selector(strategies, max_batch_size=max_batch_size)
    methods = [name for name in vars(StrategySelector) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(selector, name, None))]
    if missing:
        raise ValueError(f"speculation.selector={spec!r}: lacks {', '.join(missing)}")
    return selector(strategies)
