"""Offline evaluation of selectors on recorded decode passes instead of a running engine. Used by
benchmarks and tests.

A `RecordingSelector` records passes of one strategy. When every strategy has run at every batch
size, `replay` lets any selector choose again. It compares the selector with an oracle that knows
the best strategy of every batch size. A selector observes recorded passes with noisy seconds. Its
score uses the mean tokens and median seconds of each choice, so luck does not count.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector

_NOISE, _SLOWDOWN, _SLOW_SHARE = 0.05, 4.0, 0.01  # relative noise of seconds; rare slow passes


class PassTrace(NamedTuple):
    """One decode pass of an engine.

    Example: two requests with strategy 3_1_3 accept 3 and 1 drafted tokens: accepted_by_depth is
    (2, 1, 1), and 6 tokens are committed.
    """

    strategy: str
    batch_size: int
    accepted_by_depth: Sequence[int]  # of length `depth` of the strategy
    seconds: float
    first_by_depth: Sequence[int] | None = None  # see `StrategySelector.observe`

    @property
    def num_committed(self) -> int:
        """Return the committed tokens: accepted tokens plus one bonus token per request."""
        return self.batch_size + sum(self.accepted_by_depth)


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
        name = str(strategy)
        self.passes.append(PassTrace(name, batch_size, accepted_by_depth, seconds, first_by_depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """All passes of a strategy at a batch size."""

    passes: list[PassTrace]
    tokens: float  # mean per pass
    seconds: float  # median per pass: some were disturbed

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput of the whole batch, in committed tokens per second."""
        return self.tokens / self.seconds


class TraceTable:
    """Recorded passes of every strategy, OFF included, at every batch size."""

    def __init__(self, passes: Iterable[PassTrace], batch_sizes: Iterable[int]) -> None:
        """Group `passes` by strategy and batch size; ignore other batch sizes, which occur as a
        batch shrinks.

        ValueError if OFF is missing, or a strategy was not recorded at one of `batch_sizes`.
        """
        self.batch_sizes = sorted(set(batch_sizes))
        found: dict[tuple[SpeculationStrategy, int], list[PassTrace]] = {}
        for each in passes:
            if each.batch_size in self.batch_sizes:
                cell = SpeculationStrategy.parse(each.strategy), each.batch_size
                found.setdefault(cell, []).append(each)
        self.strategies = list(dict.fromkeys(strategy for strategy, _ in found))
        if OFF not in self.strategies:
            raise ValueError("passes: no plain pass (strategy off), which all is compared with")
        for strategy, size in itertools.product(self.strategies, self.batch_sizes):
            if (strategy, size) not in found:
                raise ValueError(f"passes: {strategy=!s} was not recorded at batch_size={size}")
        self.cells = {
            cell: _Cell(
                passes=of,
                tokens=statistics.fmean(each.num_committed for each in of),
                seconds=statistics.median(each.seconds for each in of),
            )
            for cell, of in found.items()
        }

    def nearest(self, batch_size: int) -> int:
        """Return the recorded batch size whose ratio to this one is closest to 1; the larger on a
        tie.
        """
        return min(self.batch_sizes, key=lambda b: (max(b, batch_size) / min(b, batch_size), -b))


def replay(
    selector: StrategySelector,
    table: TraceTable,
    batch_sizes: Sequence[int],
    seed: int | None = None,
) -> float:
    """Let `selector` choose for passes of `batch_sizes` and observe recorded ones, in recorded
    order.

    Return its throughput over that of the best strategy of each batch size. Seconds have noise if
    there is a `seed`. ValueError if it chooses a strategy that was not recorded.
    """
    total_s = oracle_s = 0.0
    rng = random.Random(seed)
    draws = {key: itertools.cycle(cell.passes) for key, cell in table.cells.items()}
    for batch_size in map(table.nearest, batch_sizes):
        strategy = selector.choose(batch_size).strategy
        if strategy not in table.strategies:
            recorded = ", ".join(map(str, table.strategies))
            raise ValueError(f"{strategy=!s} was chosen, recorded are {recorded}")
        cell, drawn = table.cells[strategy, batch_size], next(draws[strategy, batch_size])
        seconds = cell.seconds if seed is None else cell.seconds * _noise(rng)
        accepted = drawn.accepted_by_depth
        selector.observe(strategy, batch_size, accepted, seconds, drawn.first_by_depth)
        best = max(table.cells[each, batch_size].tokens_per_s for each in table.strategies)
        total_s += cell.seconds
        oracle_s += cell.tokens / best
    return oracle_s / total_s


def _noise(rng: random.Random) -> float:
    return math.exp(rng.gauss(0.0, _NOISE)) * (_SLOWDOWN if rng.random() < _SLOW_SHARE else 1.0)
