"""The gate of a selector: recorded decode passes, replayed with fixed pass costs, so that machine noise does not matter.

    python -m tools.bench gate trace.json other.json --model build/tiny_policy --drafter build/tiny_drafter

A trace that is not there is recorded first: every strategy runs with the given drafter and with an untrained one, and the
trace has what each pass accepted and the median seconds of every (strategy, batch size). Then each selector chooses again; the
seconds that it sees are the medians with seeded noise. Use a trace of another policy to judge a selector than the one to tune
it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tlt_megatron.types import SamplingParams
from tools.bench.measure import cpu_seconds, print_table
from tools.bench.replay import PassTrace, RecordingSelector, TraceTable, decode, replay
from tools.bench.setting import (
    BEG_MAB,
    COST_MODEL,
    GOOD,
    RANDOM,
    add_setting_options,
    long_prompts,
    make_drafts,
    make_setting,
)

_EPOCHS = 5  # of the replayed rollout; the first is reported apart
_HALVING = 60  # passes in which the batch of that rollout halves
_SEEDS = 3  # of the noise; results are means
_NOISE, _SLOWDOWN, _SLOW_SHARE = 0.05, 4.0, 0.01  # relative noise of seconds; rare slow passes
_COLLAPSE_AFTER, _COLLAPSE_SHOWN = 100, 40  # passes with the good drafter, and with the bad one
_COLLAPSE_SIZES = (1, 8, 32)

MakeSelector = Callable[[], StrategySelector]


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add("traces", nargs="+", type=Path, metavar="TRACE")
    add_setting_options(add)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--num-requests", type=int, default=16, help="at least, per batch size")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Record the traces that are missing, and print the table of every trace. Return the values of the JSON."""
    for path in options.traces:
        if not path.is_file():
            _record(options, path)
    return {str(path): _compare(path, console) for path in options.traces}


def _record(options: argparse.Namespace, path: Path) -> None:
    """Write the trace of one policy: passes by drafter, each with the median seconds of its kind."""
    setting = make_setting(options, options.dtype)
    drafts = make_drafts(setting, options.drafter)
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    prompts = long_prompts(setting, options.num_tokens)
    passes: dict[str, list[PassTrace]] = {GOOD: [], RANDOM: []}
    for size in options.batch_sizes:
        for round_index in range(max(options.num_requests // size, 1)):
            batch = [prompts[(round_index * size + i) % len(prompts)] for i in range(size)]
            for name, found in passes.items():
                if name == RANDOM and round_index > 1:
                    continue  # it accepts next to nothing, whatever the text
                num_tokens = options.num_tokens if name == GOOD else options.num_tokens // 4
                params = SamplingParams(max_new_tokens=num_tokens, seed=round_index)
                for strategy in (OFF, *strategies):
                    recorder = RecordingSelector(strategy)
                    setting.engine.set_speculation(Speculation(drafts[name], recorder, strategies))
                    # CPU time of this process alone: wall time would include other processes.
                    seconds = cpu_seconds(partial(setting.policy.generate, batch, params))
                    each_s = seconds / sum(each.batch_size for each in recorder.passes) * size
                    found += [dataclasses.replace(p, seconds=each_s) for p in recorder.passes]
    rows = {name: [each.to_json() for each in found] for name, found in passes.items()}
    path.write_text(json.dumps(rows), encoding="utf-8")


def fixed_seconds(passes: Sequence[PassTrace], seed: int) -> list[PassTrace]:
    """Replace seconds by the median of the pass's strategy and batch size, times seeded noise."""
    rng = random.Random(seed)
    cells: dict[tuple[SpeculationStrategy, int], list[float]] = {}
    for each in passes:
        cells.setdefault((each.strategy, each.batch_size), []).append(each.seconds)
    medians = {cell: statistics.median(seconds) for cell, seconds in cells.items()}
    return [
        dataclasses.replace(
            each,
            seconds=medians[each.strategy, each.batch_size]
            * math.exp(rng.gauss(0.0, _NOISE))
            * (_SLOWDOWN if rng.random() < _SLOW_SHARE else 1.0),
        )
        for each in passes
    ]


def judge(make: MakeSelector, good: Sequence[TraceTable], bad: Sequence[TraceTable]) -> list[float]:
    """Return the throughput over the oracle's in the first and in later epochs, over plain decoding with a useless
    drafter, and the passes until the drafter's collapse is noticed, by batch size."""
    sizes, left = [], float(max(good[0].batch_sizes))
    while left >= 1.0:
        sizes.append(int(left))
        left *= 0.5 ** (1.0 / _HALVING)
    first = [replay(make(), table, sizes).of_oracle for table in good]
    later = [
        replay(make(), table, sizes * _EPOCHS, num_first=len(sizes)).of_oracle for table in good
    ]
    useless = [replay(make(), table, sizes * 2).of_plain for table in bad]
    collapse = [
        statistics.fmean(_collapse(make(), *pair, size) for pair in zip(good, bad, strict=True))
        for size in _COLLAPSE_SIZES
    ]
    return [*map(statistics.fmean, (first, later, useless)), *collapse]


def _collapse(selector: StrategySelector, good: TraceTable, bad: TraceTable, size: int) -> int:
    """Return the drafting passes before the first two plain passes in a row; a single one may be a probe."""
    for _ in decode(selector, good, [size] * _COLLAPSE_AFTER):
        pass
    num_drafting = 0
    was_off = False
    for strategy, _ in decode(selector, bad, [size] * _COLLAPSE_SHOWN):
        if strategy.is_off and was_off:
            break
        num_drafting += not strategy.is_off
        was_off = strategy.is_off
    return num_drafting


def _compare(path: Path, console: Console) -> dict[str, list[float]]:
    """Print the table of all fixed strategies and selectors. Return its values, see `judge`, by strategy and selector."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    passes = {name: [PassTrace.from_json(row) for row in of] for name, of in recorded.items()}
    sizes = sorted({each.batch_size for each in passes[GOOD]})
    sizes = [size for size in sizes if size & (size - 1) == 0]
    good, bad = (
        [TraceTable(fixed_seconds(passes[name], seed), sizes) for seed in range(_SEEDS)]
        for name in (GOOD, RANDOM)
    )
    strategies = [s for s in good[0].strategies if not s.is_off]
    rows = []
    result: dict[str, list[float]] = {}
    for strategy in (OFF, *strategies):
        plain = [good[0].tokens_per_s(OFF, size) for size in sizes]
        rates = [good[0].tokens_per_s(strategy, size) for size in sizes]
        speeds = [f"{rate / off:.2f}" for rate, off in zip(rates, plain, strict=True)]
        result[str(strategy)] = judge(partial(FixedSelector, strategy), good, bad)[:3]
        shares = [f"{x:.3f}" for x in result[str(strategy)]]
        rows.append([str(strategy), *speeds, *shares, *[""] * len(_COLLAPSE_SIZES)])
    selectors: dict[str, MakeSelector] = {
        COST_MODEL: partial(CostModelSelector, strategies),
        BEG_MAB: partial(BegMabSelector, [*strategies, OFF]),
    }
    for name, make in selectors.items():
        values = judge(make, good, bad)
        cells = [*(f"{x:.3f}" for x in values[:3]), *(f"{x:.1f}" for x in values[3:])]
        rows.append([name, *[""] * len(sizes), *cells])
        result[name] = values
    columns = ["", *map(str, sizes), "first", "later", "useless"]
    columns += [f"collapse {size}" for size in _COLLAPSE_SIZES]
    print_table(console, f"replayed: {path}", columns, rows)
    return result
