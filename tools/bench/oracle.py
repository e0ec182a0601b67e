"""Compares the selectors with an oracle that knows the best strategy of each batch size, because all of them were run.

Live, noise counts against the selectors: the best of several strategies is partly the luckiest, and a pass is measured once. On
the recorded trace this does not apply.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.replay import PassTrace, TraceTable, replay
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tools.bench.interleaved import PLAIN, Comparison
from tools.bench.measure import make_table, spread
from tools.bench.setting import BEG_MAB, COST_MODEL

_NUM_EPOCHS = 5  # of the rollout whose batch sizes are replayed


def best_fixed(comparison: Comparison, fixed: Sequence[str]) -> tuple[str, float]:
    """Return the fixed strategy with the highest median speed over plain decoding, which may itself be the best."""
    medians = {name: comparison.records[name].ratio["median"] for name in fixed} | {PLAIN: 1.0}
    return max(medians.items(), key=lambda item: item[1])


def live_oracle(
    measured: Mapping[int, Comparison], fixed: Sequence[str], console: Console
) -> dict[str, object]:
    """Compare selectors with the best fixed strategy of each batch size, found by running all of them."""
    table = make_table(
        "(d) selectors over the best fixed strategy of each batch size, live",
        *("batch", "best", "speed-up", COST_MODEL, BEG_MAB),
        num_names=0,
    )
    live: dict[str, dict[str, dict[str, float]]] = {COST_MODEL: {}, BEG_MAB: {}}
    for size, comparison in measured.items():
        best, ratio = best_fixed(comparison, fixed)
        for name, by_size in live.items():
            rounds = comparison.records[name].ratios
            by_size[str(size)] = spread([value / ratio for value in rounds[1:] or rounds])
        cells = [f"{by_size[str(size)]['median']:.3f}" for by_size in live.values()]
        table.add_row(str(size), best, f"{ratio:.2f}", *cells)
    # Equal weight for each batch size: the harmonic mean of rates over equal work.
    overall = {
        name: statistics.harmonic_mean([each["median"] for each in by_size.values()])
        for name, by_size in live.items()
    }
    table.add_row("all", "", "", *(f"{overall[name]:.3f}" for name in live))
    console.print(table)
    return {"by_batch": live, "overall": overall}


def replayed_oracle(
    measured: Mapping[int, Comparison],
    strategies: Sequence[SpeculationStrategy],
    rollout: Sequence[PassRecord],
    console: Console,
) -> dict[str, object]:
    """Run fresh selectors over recorded passes of the fixed strategies and plain decoding.

    They follow the batch sizes of the `rollout`, repeatedly. The first epoch and all later ones are judged separately.
    """
    passes = [
        _trace_of(record)
        for comparison in measured.values()
        for records in (comparison.plain, *(comparison.records[str(s)] for s in strategies))
        for of_round in records.passes
        for record in of_round
    ]
    trace = TraceTable(passes, measured)
    batch_sizes = [record.batch_size for record in rollout]
    makers: dict[str, Callable[[], StrategySelector]] = {
        COST_MODEL: lambda: CostModelSelector(strategies),
        BEG_MAB: lambda: BegMabSelector([*strategies, OFF]),
    }
    table = make_table(
        "(d) selectors over the best strategy of each batch size, replayed",
        *("selector", "first epoch", "later epochs", "later, over plain"),
    )
    result: dict[str, object] = {}
    for name, make in makers.items():
        first = replay(make(), trace, batch_sizes)
        later = replay(make(), trace, batch_sizes * _NUM_EPOCHS, num_first=len(batch_sizes))
        cells = (f"{first.of_oracle:.3f}", f"{later.of_oracle:.3f}", f"{later.of_plain:.2f}")
        table.add_row(name, *cells)
        result[name] = {
            "first_epoch": first.of_oracle,
            "later_epochs": later.of_oracle,
            "later_over_plain": later.of_plain,
            "later_by_batch": later.of_oracle_by_batch,
            "num_chosen": later.num_chosen,
        }
    console.print(table)
    return result


def _trace_of(record: PassRecord) -> PassTrace:
    return PassTrace(
        batch_size=record.batch_size,
        strategy=SpeculationStrategy.parse(record.strategy),
        accepted_by_depth=record.accepted_by_depth,
        seconds=record.seconds,
    )
