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
from tools.bench.interleaved import PLAIN, Comparison, Record, Variant
from tools.bench.measure import write_json
from tools.bench.oracle import best_fixed, live_oracle, replayed_oracle
from tools.bench.policies import Policy, make_policies
from tools.bench.setting import (
    BEG_MAB,
    COST_MODEL,
    make_drafts,
    make_setting,
    make_variants,
)
from tools.bench.speed import (
    adaptive_minima,
    bench_batch_sizes,
    bench_long_tail,
)

_WIDTH = 140  # of tables in a file
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
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    policies = make_policies(Path(options.policies), console)
    dtypes = ("bfloat16", "float32") if options.dtype == "both" else (options.dtype,)
    result: dict[str, object] = {}
    for dtype in dtypes:
        measured = _bench_one_dtype(options, dtype, policies, console)
        result |= {dtype: measured} if result else measured
    own = Policy(
        model=Path(options.model),
        drafter=Path(options.drafter),
        train=Path(options.model) / "train.jsonl",
        eval=Path(options.model) / "eval.jsonl",
    )
    result |= bench_accept_lengths([*policies, own], options, console)
    write_json(Path(options.out), result)


def _bench_one_dtype(
    options: argparse.Namespace, dtype: str, policies: Sequence[Policy], console: Console
) -> dict[str, object]:
    """Run all tables except (c) in one dtype."""
    setting = make_setting(options, dtype)
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    drafts = make_drafts(setting, options.drafter, policies[1].drafter)
    variants = make_variants(drafts, strategies)
    by_batch = bench_batch_sizes(setting, variants, options, console)
    fixed = [str(strategy) for strategy in strategies]
    minima = adaptive_minima(by_batch, list(drafts), console)
    live = live_oracle(by_batch, fixed, console)
    tail = bench_long_tail(setting, _for_long_tail(variants, by_batch, fixed), options, console)
    replayed = replayed_oracle(by_batch, strategies, tail.plain.passes[-1], console)
    return {
        "dtype": dtype,
        "num_layers": setting.num_layers,
        "rounds": options.rounds,
        "speedup_by_batch": {
            str(size): {name: record.ratio for name, record in each.records.items()}
            for size, each in by_batch.items()
        },
        **minima,
        "selector_vs_oracle": {"live": live, "replayed": replayed},
        "long_tail_speedup": {name: record.ratio for name, record in tail.records.items()},
        "mismatch_per_token": _mismatch([*by_batch.values(), tail]),
        "batch_invariant": bench_batch_invariant(setting, options, strategies, console),
        "graph_pool_bytes": bench_graph_bytes(setting.engine.graph_plan(strategies), console),
    }


def _mismatch(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Return mismatches per token by variant, over everything that it decoded."""
    records: dict[str, list[Record]] = {}
    for comparison in comparisons:
        for name, record in comparison.records.items():
            records.setdefault(name, []).append(record)
    return {
        name: sum(r.num_differing for r in of) / max(sum(r.num_compared for r in of), 1)
        for name, of in records.items()
    }


def _for_long_tail(
    variants: Mapping[str, Variant], by_batch: Mapping[int, Comparison], fixed: Sequence[str]
) -> dict[str, Variant]:
    """Return both selectors, and the best strategy at the batch size nearest to 8."""
    near = min(by_batch, key=lambda size: abs(size - 8))
    best = best_fixed(by_batch[near], fixed)
    names = [BEG_MAB, COST_MODEL] if best == PLAIN else [best, BEG_MAB, COST_MODEL]
    return {name: variants[name] for name in names}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools.bench speculation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="build/tiny_policy")
    parser.add_argument("--drafter", default="build/tiny_drafter")
    parser.add_argument("--prompts", default="build/tiny_policy/eval.jsonl")
    parser.add_argument(
        "--policies", default="build/entropy_policies", help="made there if they are not"
    )
    parser.add_argument(
        "--deepen", type=int, default=20, help="identity layers put behind the policy"
    )
    parser.add_argument(
        "--strategies", nargs="+", default=["3_1_3", "6_1_6", "10_1_10", "14_1_14", "4_2_8"]
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--num-tokens", type=int, default=120, help="of each response, by batch size"
    )
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--accept-prompts", type=int, default=32)
    parser.add_argument("--accept-max-new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="after one that warms up")
    parser.add_argument(
        "--fixed-rounds", type=int, default=3, help="in which fixed strategies run too"
    )
    parser.add_argument("--unhelped-rounds", type=int, default=12, help="in which bad drafters run")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "both"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="build/bench/speculation.json")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(_QUICK)
    return options
