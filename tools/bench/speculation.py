"""Measures what speculation gains on this machine, in five tables.

    python -m tools.bench speculation --model build/tiny_policy --drafter build/tiny_drafter --dtype both

(a) speed by batch size, for fixed strategies and both selectors; the adaptive one also with useless drafters
(b) a long-tailed set of requests end to end
(c) accept length by kind of tree, temperature and the target's entropy
(d) the selectors against the best strategy of each batch size, live and on a recorded trace
(e) bytes of captured graphs

It also measures what `rollout.batch_invariant` costs.

`--deepen N` adds N identity layers (attention and MLP output zero) after the policy's own. Its tokens do not change, and its
cost is that of a model N layers deeper: the drafter's one layer should be small beside its target. The tables say so. `--quick`
checks within two minutes that everything works; its numbers mean little. Writes build/bench/speculation.json. With `--dtype
both`, bfloat16 is at the top level and float32 under its name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tlt_megatron.speculation.strategy import SpeculationStrategy
from tools.bench.accept_length import bench_accept_lengths
from tools.bench.batch_invariant import bench_batch_invariant
from tools.bench.graph_bytes import bench_graph_bytes
from tools.bench.interleaved import PLAIN, Comparison, Variant, mismatch_per_token
from tools.bench.measure import write_json
from tools.bench.oracle import best_fixed, live_oracle, replayed_oracle
from tools.bench.policies import Policy, make_policies
from tools.bench.setting import (
    BEG_MAB,
    COST_MODEL,
    add_options,
    make_drafts,
    make_setting,
    make_variants,
)
from tools.bench.speed import adaptive_minima, bench_batch_sizes, bench_long_tail

TABLE_WIDTH = 140  # in a file
_QUICK = {
    "batch_sizes": [1, 8, 64],
    "num_tokens": 40,
    "num_requests": 16,
    "max_new_tokens": 200,
    "rounds": 1,
    "fixed_rounds": 1,
    "unhelped_rounds": 1,
    "strategies": ["6_1_6", "4_2_8"],
    "temperatures": [1.0],
    "accept_prompts": 8,
    "accept_max_new_tokens": 100,
}


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables, write JSON."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    policies = make_policies(Path(options.policies))
    dtypes = ("bfloat16", "float32") if options.dtype == "both" else (options.dtype,)
    result: dict[str, object] = {}
    for dtype in dtypes:
        measured = _bench_one_dtype(options, dtype, policies[1].drafter, console)
        result |= {dtype: measured} if result else measured
    model = Path(options.model)
    own = Policy(model=model, drafter=Path(options.drafter), data=model)
    result |= bench_accept_lengths([*policies, own], options, console)
    write_json(options.out, result)


def _bench_one_dtype(
    options: argparse.Namespace, dtype: str, other_drafter: Path, console: Console
) -> dict[str, object]:
    """Run all tables except (c) in one dtype."""
    setting = make_setting(options, dtype)
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    fixed = [str(strategy) for strategy in strategies]
    drafts = make_drafts(setting, options.drafter, other_drafter)
    variants = make_variants(drafts, strategies)
    by_batch = bench_batch_sizes(setting, variants, options, console, options.unhelped_rounds)
    minima = adaptive_minima(by_batch, list(drafts), console)
    live = live_oracle(by_batch, fixed, console)
    tail = bench_long_tail(setting, _for_long_tail(variants, by_batch, fixed), options, console)
    replayed = replayed_oracle(by_batch, strategies, tail.plain.passes[-1], console)
    comparisons = [*by_batch.values(), tail]
    return {
        "dtype": dtype,
        "num_layers": setting.policy.num_layers,
        "rounds": options.rounds,
        "speedup_by_batch": speedup_by_batch(by_batch),
        **minima,
        "selector_vs_oracle": {"live": live, "replayed": replayed},
        "long_tail_speedup": {name: record.ratio for name, record in tail.records.items()},
        "mismatch_per_token": {
            name: mismatch_per_token([c.records[name] for c in comparisons if name in c.records])
            for name in variants
        },
        "batch_invariant": bench_batch_invariant(setting, options, strategies, console),
        "graph_pool_bytes": bench_graph_bytes(
            setting.engine.memory_plan(strategies).graphs, console
        ),
    }


def speedup_by_batch(by_batch: Mapping[int, Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """Return batch size -> variant -> spread of its speed over plain decoding, for JSON."""
    return {
        str(size): {name: record.ratio for name, record in each.records.items()}
        for size, each in by_batch.items()
    }


def _for_long_tail(
    variants: Mapping[str, Variant], by_batch: Mapping[int, Comparison], fixed: Sequence[str]
) -> dict[str, Variant]:
    """Return both selectors, and the best strategy at the batch size nearest to 8."""
    near = min(by_batch, key=lambda size: abs(size - 8))
    best, _ = best_fixed(by_batch[near], fixed)
    names = [BEG_MAB, COST_MODEL] if best == PLAIN else [best, BEG_MAB, COST_MODEL]
    return {name: variants[name] for name in names}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools.bench speculation", description=__doc__.splitlines()[0]
    )
    add_options(parser)
    add = parser.add_argument
    add("--policies", default="build/entropy_policies", help="of (c); made there if absent")
    add("--num-requests", type=int, default=128)
    add("--num-samples", type=int, default=8)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--accept-prompts", type=int, default=32)
    add("--accept-max-new-tokens", type=int, default=200)
    add("--unhelped-rounds", type=int, default=12, help="in which bad drafters run")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "both"))
    add("--out", default="build/bench/speculation.json")
    if "--quick" in arguments:
        parser.set_defaults(**_QUICK)
    return parser.parse_args(arguments)
