"""Measures what speculation gains on this machine, in four tables.

    python -m tools.bench speculation --model build/tiny_policy --drafter build/tiny_drafter --dtype both

(a) speed by batch size, for fixed strategies and both selectors; the cost model also with a useless drafter
(b) a long-tailed set of requests end to end
(c) accept length by kind of tree and temperature
(d) the selectors against the strategy that is best over all batch sizes; `tools.bench gate` judges them without noise

It also measures what `rollout.batch_invariant` costs.

`--deepen N` adds N identity layers (attention and MLP output zero) after the policy's own. Its tokens do not change, and its
cost is that of a model N layers deeper: the drafter's one layer should be small beside its target. The tables say so. In the
JSON of `--dtype both`, bfloat16 is at the top level and float32 under its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from tools.bench.accept_length import bench_accept_lengths
from tools.bench.interleaved import mismatch_per_token
from tools.bench.setting import (
    BEG_MAB,
    COST_MODEL,
    add_setting_options,
    make_drafts,
    make_setting,
    make_variants,
)
from tools.bench.speed import (
    bench_batch_invariant,
    bench_batch_sizes,
    bench_long_tail,
    best_fixed,
    compare_selectors,
)

QUICK = {
    "batch_sizes": [1, 8, 64],
    "num_tokens": 40,
    "num_requests": 16,
    "max_new_tokens": 200,
    "rounds": 1,
    "strategies": ["6_1_6", "4_2_8"],
    "temperatures": [1.0],
    "accept_prompts": 8,
    "accept_max_new_tokens": 100,
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_setting_options(add)
    add("--num-requests", type=int, default=128)
    add("--num-samples", type=int, default=8)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--accept-prompts", type=int, default=32)
    add("--accept-max-new-tokens", type=int, default=200)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "both"))


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure and print the tables. Return the values of the JSON."""
    dtypes = ("bfloat16", "float32") if options.dtype == "both" else (options.dtype,)
    result: dict[str, object] = {}
    for dtype in dtypes:
        measured = _bench_one_dtype(options, dtype, console)
        result |= {dtype: measured} if result else measured
    return result | bench_accept_lengths(options, console)


def _bench_one_dtype(
    options: argparse.Namespace, dtype: str, console: Console
) -> dict[str, object]:
    """Run all tables except (c) in one dtype."""
    setting = make_setting(options, dtype)
    drafts = make_drafts(setting, options.drafter)
    variants = make_variants(drafts, options)
    by_batch = bench_batch_sizes(setting, variants, options, console)
    best = best_fixed(by_batch, options.strategies)
    in_tail = {name: variants[name] for name in (best, BEG_MAB, COST_MODEL)}
    tail = bench_long_tail(setting, in_tail, options, console)
    comparisons = [*by_batch.values(), tail]
    return {
        "dtype": dtype,
        "num_layers": setting.policy.num_layers,
        "rounds": options.rounds,
        "speedup_by_batch": {
            str(size): {name: record.ratio for name, record in each.records.items()}
            for size, each in by_batch.items()
        },
        "over_best_single": compare_selectors(by_batch, best, console),
        "long_tail_speedup": {name: record.ratio for name, record in tail.records.items()},
        "mismatch_per_token": {
            name: mismatch_per_token([c.records[name] for c in comparisons if name in c.records])
            for name in variants
        },
        "batch_invariant": bench_batch_invariant(setting, options, console),
    }
