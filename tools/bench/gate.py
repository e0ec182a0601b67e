"""The gate of a selector: recorded decode passes, replayed with fixed pass costs, so that machine noise does not matter.

    python -m tools.bench.gate record --model build/tiny_policy --drafter build/tiny_drafter --out trace.json
    python -m tools.bench.gate replay trace.json other.json

`record` runs every strategy with the given drafter and with an untrained one, and stores what each pass accepted and the
median seconds of every (strategy, batch size). `replay` gives selectors these passes; the seconds that they see are the
medians with seeded noise. Use a trace of another policy to judge a selector than the one to tune it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.replay import PassTrace, RecordingSelector, TraceTable, replay
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tlt_megatron.types import SamplingParams
from tools.bench.measure import cpu_seconds
from tools.bench.setting import GOOD, RANDOM, long_prompts, make_drafts, make_setting
from tools.load_engine import VERSION

_EPOCHS = 5  # of the replayed rollout; the first is reported apart
_HALVING = 60  # passes in which the batch of that rollout halves
_SEEDS = 3  # of the noise; results are means
_NOISE, _HICCUP, _HICCUP_SHARE = 0.05, 4.0, 0.01  # relative noise of seconds; rare slow passes
_COLLAPSE_AFTER, _COLLAPSE_SHOWN = 100, 40  # passes with the good drafter, and with the bad one
_COLLAPSE_SIZES = (1, 8, 32)

MakeSelector = Callable[[], StrategySelector]


def record(options: argparse.Namespace) -> None:
    """Write the trace of one policy: passes by drafter, each with the median seconds of its kind."""
    torch.set_num_threads(1)
    setting = make_setting(options, options.dtype)
    drafts = make_drafts(setting, options.drafter, None)
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
                    recorder = RecordingSelector(FixedSelector(strategy))
                    setting.engine.set_speculation(Speculation(drafts[name], recorder, strategies))
                    # CPU time of this process alone: wall time would include other processes.
                    seconds = cpu_seconds(
                        partial(setting.engine.generate, batch, params, policy_version=VERSION)
                    )
                    each_s = seconds / sum(each.batch_size for each in recorder.passes) * size
                    found += [dataclasses.replace(p, seconds=each_s) for p in recorder.passes]
    rows = {name: [each.to_json() for each in found] for name, found in passes.items()}
    Path(options.out).write_text(json.dumps(rows))


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
            * (_HICCUP if rng.random() < _HICCUP_SHARE else 1.0),
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
    _decode(selector, good.draws(), size, _COLLAPSE_AFTER)
    num_drafting = 0
    was_off = False
    for strategy in _decode(selector, bad.draws(), size, _COLLAPSE_SHOWN):
        if strategy.is_off and was_off:
            break
        num_drafting += not strategy.is_off
        was_off = strategy.is_off
    return num_drafting


def _decode(
    selector: StrategySelector,
    draws: dict[tuple[SpeculationStrategy, int], Iterator[PassTrace]],
    size: int,
    num_passes: int,
) -> list[SpeculationStrategy]:
    chosen = []
    for _ in range(num_passes):
        strategy = selector.choose(size).strategy
        drawn = next(draws[strategy, size])
        selector.observe(
            strategy, size, drawn.accepted_by_depth, drawn.seconds, drawn.first_by_depth
        )
        chosen.append(strategy)
    return chosen


def compare(options: argparse.Namespace) -> None:
    """Print the table of all fixed strategies and selectors for every trace."""
    for path in options.traces:
        rows = json.loads(Path(path).read_text())
        passes = {name: [PassTrace.from_json(row) for row in of] for name, of in rows.items()}
        sizes = sorted({each.batch_size for each in passes[GOOD]})
        sizes = [size for size in sizes if size & (size - 1) == 0]
        good, bad = (
            [TraceTable(fixed_seconds(passes[name], seed), sizes) for seed in range(_SEEDS)]
            for name in (GOOD, RANDOM)
        )
        strategies = [s for s in good[0].strategies if not s.is_off]
        table = Table(title=f"replayed: {path}")
        columns = (*map(str, sizes), "first", "later", "useless")
        for column in ("", *columns, *(f"collapse {size}" for size in _COLLAPSE_SIZES)):
            table.add_column(column, justify="right" if column else "left")
        for strategy in (OFF, *strategies):
            speeds = [
                good[0].tokens_per_s(strategy, size) / good[0].tokens_per_s(OFF, size)
                for size in sizes
            ]
            values = judge(partial(FixedSelector, strategy), good, bad)[:3]
            cells = [*(f"{x:.2f}" for x in speeds), *(f"{x:.3f}" for x in values)]
            table.add_row(str(strategy), *cells)
        for text in options.selector:
            name, _, path_of = text.partition("=")
            module, _, attribute = path_of.partition(":")
            cls = getattr(importlib.import_module(module), attribute)
            arms = [*strategies, OFF] if "mab" in name else strategies
            values = judge(partial(cls, arms), good, bad)
            cells = [*(f"{x:.3f}" for x in values[:3]), *(f"{x:.1f}" for x in values[3:])]
            table.add_row(name, *[""] * len(sizes), *cells)
        Console(width=140).print(table)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--model", default="build/tiny_policy")
    recording.add_argument("--drafter", default="build/tiny_drafter")
    recording.add_argument("--prompts", default="build/tiny_policy/eval.jsonl")
    recording.add_argument("--deepen", type=int, default=20, help="identity layers")
    recording.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    recording.add_argument(
        "--strategies",
        nargs="+",
        default=["2_1_2", "4_1_4", "6_1_6", "10_1_10", "4_2_8", "6_4_16"],
    )
    recording.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    recording.add_argument("--num-tokens", type=int, default=100, help="of each response")
    recording.add_argument("--max-new-tokens", type=int, default=300)
    recording.add_argument("--num-requests", type=int, default=16, help="at least, per batch size")
    recording.add_argument("--out", required=True)
    replaying = commands.add_parser("replay")
    replaying.add_argument("traces", nargs="+")
    replaying.add_argument(
        "--selector",
        nargs="+",
        default=[
            "cost_model=tlt_megatron.speculation.cost_model:CostModelSelector",
            "beg_mab=tlt_megatron.speculation.beg_mab:BegMabSelector",
        ],
        help="name=module:class; one with mab in its name gets off as a strategy",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parsed = _parse(sys.argv[1:])
    record(parsed) if parsed.command == "record" else compare(parsed)
