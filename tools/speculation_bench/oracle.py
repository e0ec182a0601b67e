"""The selectors against an oracle that knows the best strategy of each batch size, because all of them were run.

Called by tools/bench_speculation.py with what the speed table measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tools.measure import spread
from tools.speculation_bench.interleaved import PLAIN, Comparison
from tools.speculation_bench.setting import BEG_MAB, COST_MODEL

Spread = dict[str, float]


def best_fixed(comparison: Comparison, fixed: Sequence[str]) -> str:
    """The fixed strategy, plain decoding among them, of the highest median speed."""
    medians = {name: comparison.records[name].ratio["median"] for name in fixed} | {PLAIN: 1.0}
    return max(medians, key=medians.__getitem__)


def live_oracle(
    measured: Mapping[int, Comparison], fixed: Sequence[str], console: Console
) -> dict[str, object]:
    """Selectors over the best fixed strategy of each batch size, which was found by running all of them."""
    table = Table(title="(d) selectors over the best fixed strategy of each batch size, live")
    for column in ("batch", "best", "speed-up", COST_MODEL, BEG_MAB):
        table.add_column(column, justify="right")
    live: dict[str, dict[str, Spread]] = {COST_MODEL: {}, BEG_MAB: {}}
    for size, comparison in measured.items():
        best = best_fixed(comparison, fixed)
        ratio = 1.0 if best == PLAIN else comparison.records[best].ratio["median"]
        for name, by_size in live.items():
            rounds = comparison.records[name].ratios
            by_size[str(size)] = spread([value / ratio for value in rounds[1:] or rounds])
        cells = [f"{by_size[str(size)]['median']:.3f}" for by_size in live.values()]
        table.add_row(str(size), best, f"{ratio:.2f}", *cells)
    # As many passes at each batch size; the harmonic mean of rates over equal work.
    overall = {
        name: statistics.harmonic_mean([each["median"] for each in by_size.values()])
        for name, by_size in live.items()
    }
    table.add_row("all", "", "", *(f"{overall[name]:.3f}" for name in live))
    console.print(table)
    return {"by_batch": live, "overall": overall}
