"""Offline evaluation of selectors on recorded decode passes instead of a running engine. Used by benchmarks and tests.

A `RecordingSelector` records passes of one strategy. When every strategy has run at every batch size, `replay` lets any selector choose
again. It compares the selector with an oracle that knows the best strategy of every batch size. A selector observes single
noisy passes in recorded order. Its score uses the mean result of each choice, so luck does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector

_MAX_SLOWDOWN = 3.0  # cap on a pass's seconds over the median: longer passes were disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTrace:
    """One decode pass of an engine.

    Example: two requests with strategy 3_1_3 accept 3 and 1 drafted tokens: accepted_by_depth is (2, 1, 1), and 6 tokens
    are committed.
    """

    batch_size: int
    strategy: SpeculationStrategy
    accepted_by_depth: Sequence[int]  # of length `strategy.depth`
    seconds: float
    first_by_depth: Sequence[int] | None = None  # see `StrategySelector.observe`

    @property
    def num_committed(self) -> int:
        """Return the committed tokens: accepted tokens plus one bonus token per request."""
        return self.batch_size + sum(self.accepted_by_depth)

    def to_json(self) -> dict[str, Any]:
        """Return the pass as values that JSON can hold."""
        return dataclasses.asdict(self) | {"strategy": str(self.strategy)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PassTrace:
        """Read the result of `to_json`."""
        strategy = SpeculationStrategy.parse(record["strategy"])
        return cls(**{**record, "strategy": strategy})


class RecordingSelector(FixedSelector):
    """A fixed strategy that records every pass."""

    def __init__(self, strategy: SpeculationStrategy) -> None:
        super().__init__(strategy)
        self.passes: list[PassTrace] = []

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        first_by_depth: Sequence[int] | None = None,
    ) -> None:
        """Record the pass."""
        self.passes.append(
            PassTrace(
                batch_size=batch_size,
                strategy=strategy,
                accepted_by_depth=accepted_by_depth,
                seconds=seconds,
                first_by_depth=first_by_depth,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """All passes of a strategy at a batch size."""

    passes: list[PassTrace]
    tokens: float  # mean per pass
    seconds: float  # mean per pass, each capped at _MAX_SLOWDOWN times the median


Draws = dict[tuple[SpeculationStrategy, int], Iterator[PassTrace]]


class TraceTable:
    """Recorded passes of every strategy, OFF included, at every batch size."""

    def __init__(self, passes: Iterable[PassTrace], batch_sizes: Iterable[int]) -> None:
        """Group `passes` by strategy and batch size; ignore other batch sizes, which occur as a batch shrinks.

        ValueError if OFF is missing, or a strategy was not recorded at one of `batch_sizes`.
        """
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        by_cell: dict[tuple[SpeculationStrategy, int], list[PassTrace]] = {}
        for each in passes:
            if each.batch_size in self.batch_sizes:
                by_cell.setdefault((each.strategy, each.batch_size), []).append(each)
        self.strategies = tuple(dict.fromkeys(strategy for strategy, _ in by_cell))
        if OFF not in self.strategies:
            raise ValueError("passes: no plain pass (strategy off), which all is compared with")
        for cell in itertools.product(self.strategies, self.batch_sizes):
            if cell not in by_cell:
                raise ValueError(
                    f"passes: strategy={cell[0]} was not recorded at batch_size={cell[1]}"
                )
        self._cells = {cell: _make_cell(found) for cell, found in by_cell.items()}

    def tokens_per_s(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Return the mean throughput of the whole batch, in committed tokens per second."""
        cell = self._cells[strategy, batch_size]
        return cell.tokens / cell.seconds

    def tokens_and_seconds(
        self, strategy: SpeculationStrategy, batch_size: int
    ) -> tuple[float, float]:
        """Return the mean committed tokens and seconds of a pass."""
        cell = self._cells[strategy, batch_size]
        return cell.tokens, cell.seconds

    def best(self, batch_size: int) -> SpeculationStrategy:
        """Return the strategy with the highest throughput: the oracle's choice."""
        return max(self.strategies, key=lambda strategy: self.tokens_per_s(strategy, batch_size))

    def nearest(self, batch_size: int) -> int:
        """Return the recorded batch size whose ratio to this one is closest to 1; the larger on a tie."""
        return min(self.batch_sizes, key=lambda b: (max(b, batch_size) / min(b, batch_size), -b))

    def draws(self) -> Draws:
        """Return endless iterators over the passes of every (strategy, batch size), in recorded order."""
        return {key: itertools.cycle(cell.passes) for key, cell in self._cells.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Throughput relative to other ways to decode the same tokens."""

    of_oracle: float  # relative to the best strategy of each batch size
    of_plain: float  # relative to plain decoding


def replay(
    selector: StrategySelector,
    table: TraceTable,
    batch_sizes: Sequence[int],
    draws: Draws | None = None,
) -> ReplayResult:
    """Let `selector` choose for passes of `batch_sizes` and observe recorded ones.

    Several calls go on in the recorded order if they share `draws` (`TraceTable.draws`). ValueError if it chooses a strategy that was not recorded.
    """
    total_s = oracle_s = plain_s = 0.0
    draws = draws or table.draws()
    for batch_size in map(table.nearest, batch_sizes):
        strategy = selector.choose(batch_size).strategy
        if strategy not in table.strategies:
            recorded = ", ".join(map(str, table.strategies))
            raise ValueError(f"strategy={strategy} was chosen, recorded are {recorded}")
        drawn = next(draws[strategy, batch_size])
        selector.observe(
            strategy, batch_size, drawn.accepted_by_depth, drawn.seconds, drawn.first_by_depth
        )
        tokens, spent_s = table.tokens_and_seconds(strategy, batch_size)
        total_s += spent_s
        oracle_s += tokens / table.tokens_per_s(table.best(batch_size), batch_size)
        plain_s += tokens / table.tokens_per_s(OFF, batch_size)
    return ReplayResult(of_oracle=oracle_s / total_s, of_plain=plain_s / total_s)


def _make_cell(passes: list[PassTrace]) -> _Cell:
    limit_s = _MAX_SLOWDOWN * statistics.median(each.seconds for each in passes)
    return _Cell(
        passes=passes,
        tokens=statistics.fmean(each.num_committed for each in passes),
        seconds=statistics.fmean(min(each.seconds, limit_s) for each in passes),
    )
