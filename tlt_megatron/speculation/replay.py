"""A selector judged off line: it decides over a table of recorded passes instead of a running engine.

Used by the benchmarks and tests. A `RecordingSelector` notes what passes brought; once every strategy has run at every batch
size, `replay` lets any selector choose again, and compares it with the oracle that knows the best strategy of every batch
size. One thing to know: a selector sees single passes, noise and all, in the order in which they were recorded, but is
judged by what its choices bring on average, so luck does not count.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.speculation.selector import Decision, StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

_HICCUP = 3.0  # times the median seconds: a pass that took longer was held up by something else


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTrace:
    """One pass of an engine.

    Example: two requests, strategy 3_1_3, the first accepted 3 drafted tokens and the second 1: accepted_by_depth
    (2, 1, 1), and 6 tokens were committed.
    """

    batch_size: int
    strategy: SpeculationStrategy
    accepted_by_depth: tuple[int, ...]  # `strategy.depth` long
    seconds: float

    @property
    def num_committed(self) -> int:
        """Tokens: what was accepted, and a bonus token for each request."""
        return self.batch_size + sum(self.accepted_by_depth)

    def to_json(self) -> dict[str, object]:
        """JSON-able."""
        return {
            "batch_size": self.batch_size,
            "strategy": str(self.strategy),
            "accepted_by_depth": list(self.accepted_by_depth),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> PassTrace:
        """What `to_json` wrote; more keys than these do no harm."""
        return cls(
            batch_size=record["batch_size"],
            strategy=SpeculationStrategy.parse(record["strategy"]),
            accepted_by_depth=tuple(record["accepted_by_depth"]),
            seconds=record["seconds"],
        )


class RecordingSelector:
    """Passes everything on to another selector and notes it."""

    def __init__(self, selector: StrategySelector) -> None:
        self._selector = selector
        self.passes: list[PassTrace] = []

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """See `StrategySelector`."""
        return self._selector.choose(batch_size)

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """Note it."""
        self.passes.append(
            PassTrace(
                batch_size=batch_size,
                strategy=strategy,
                accepted_by_depth=tuple(accepted_by_depth),
                seconds=seconds,
            )
        )
        self._selector.observe(strategy, batch_size, accepted_by_depth, seconds)

    def decisions(self) -> list[Decision]:
        """See `StrategySelector`."""
        return self._selector.decisions()

    def state_dict(self) -> dict[str, object]:
        """Of the other selector."""
        return self._selector.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Of the other selector."""
        self._selector.load_state_dict(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """All passes of a strategy at a batch size."""

    passes: list[PassTrace]
    tokens: float  # of a pass, mean
    seconds: float  # of a pass, mean without hiccups


class TraceTable:
    """Every strategy at every batch size, OFF included."""

    def __init__(self, passes: Iterable[PassTrace], batch_sizes: Iterable[int]) -> None:
        """Passes of other batch sizes are left out: batches shrink on their way to the end. ValueError if a strategy was
        not recorded at one of `batch_sizes`."""
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
        """Committed by the whole batch, on average."""
        cell = self._cells[strategy, batch_size]
        return cell.tokens / cell.seconds

    def tokens_and_seconds(
        self, strategy: SpeculationStrategy, batch_size: int
    ) -> tuple[float, float]:
        """Of a pass, on average."""
        cell = self._cells[strategy, batch_size]
        return cell.tokens, cell.seconds

    def best(self, batch_size: int) -> SpeculationStrategy:
        """What the oracle would run."""
        return max(self.strategies, key=lambda strategy: self.tokens_per_s(strategy, batch_size))

    def nearest(self, batch_size: int) -> int:
        """The recorded batch size whose ratio to this one is closest to 1; of two, the larger."""
        return min(self.batch_sizes, key=lambda b: (max(b, batch_size) / min(b, batch_size), -b))

    def draws(self) -> dict[tuple[SpeculationStrategy, int], Iterator[PassTrace]]:
        """The passes of every cell in recorded order, again and again."""
        return {key: itertools.cycle(cell.passes) for key, cell in self._cells.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Throughput over that of the same passes' tokens decoded otherwise."""

    of_oracle: float  # by the best strategy of each batch size
    of_plain: float
    of_oracle_by_batch: dict[int, float]
    num_chosen: dict[str, int]  # passes by strategy


def replay(
    selector: StrategySelector, table: TraceTable, batch_sizes: Iterable[int], *, num_first: int = 0
) -> ReplayResult:
    """Let `selector` choose for passes of `batch_sizes` (each taken as the nearest recorded one), of which the first
    `num_first` are not judged. ValueError if it chooses what was not recorded, or nothing is left to judge."""
    draws = table.draws()
    seconds: dict[int, float] = {}
    oracle_s: dict[int, float] = {}
    plain_s = 0.0
    num_chosen: dict[str, int] = {}
    for index, wanted in enumerate(batch_sizes):
        batch_size = table.nearest(wanted)
        strategy = selector.choose(batch_size)
        if strategy not in table.strategies:
            raise ValueError(
                f"strategy={strategy} was chosen, recorded are {', '.join(map(str, table.strategies))}"
            )
        drawn = next(draws[strategy, batch_size])
        selector.observe(strategy, batch_size, drawn.accepted_by_depth, drawn.seconds)
        if index < num_first:
            continue
        tokens, spent_s = table.tokens_and_seconds(strategy, batch_size)
        best_rate = table.tokens_per_s(table.best(batch_size), batch_size)
        seconds[batch_size] = seconds.get(batch_size, 0.0) + spent_s
        oracle_s[batch_size] = oracle_s.get(batch_size, 0.0) + tokens / best_rate
        plain_s += tokens / table.tokens_per_s(OFF, batch_size)
        num_chosen[str(strategy)] = num_chosen.get(str(strategy), 0) + 1
    if not seconds:
        raise ValueError(f"batch_sizes: none behind num_first={num_first}")
    total_s = sum(seconds.values())
    return ReplayResult(
        of_oracle=sum(oracle_s.values()) / total_s,
        of_plain=plain_s / total_s,
        of_oracle_by_batch={size: oracle_s[size] / seconds[size] for size in sorted(seconds)},
        num_chosen=num_chosen,
    )


def _make_cell(passes: list[PassTrace]) -> _Cell:
    limit_s = _HICCUP * statistics.median(each.seconds for each in passes)
    return _Cell(
        passes=passes,
        tokens=statistics.fmean(each.num_committed for each in passes),
        seconds=statistics.fmean(min(each.seconds, limit_s) for each in passes),
    )
