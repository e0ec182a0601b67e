"""Measures what captured graphs and speculation gain on a GPU, in three tables.

    python -m tools.bench gpu --model build/tiny_policy --drafter build/tiny_drafter

(a) speed by batch size against plain decoding, with graphs: chains, a tree, both selectors
(b) bytes of the graph pool, measured: every strategy captured alone, each graph in its own memory, against ours
(c) graphs against eager passes, plain and speculative

(a) and (c) are wall time of the embedded engine, without captures. Each variant runs between two runs of plain decoding.
`--deepen` adds identity layers to the policy, as in tools/bench/speculation.py. (b) has the widths of Qwen2.5-7B and fewer
layers. Writes build/bench/gpu.json. Exits with an error if torch sees no CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tools.bench.graph_bytes import QWEN_2_5_7B
from tools.bench.interleaved import Comparison, Variant
from tools.bench.measure import write_json
from tools.bench.pool_bytes import Sizes, bench_pool_bytes
from tools.bench.setting import GOOD, Setting, make_drafts, make_setting, make_variants
from tools.bench.speed import bench_batch_sizes

_WIDTH = 140  # of tables in a file
_QUICK = {
    "batch_sizes": [1, 8],
    "num_tokens": 40,
    "max_new_tokens": 200,
    "rounds": 1,
    "fixed_rounds": 1,
    "strategies": ["6_1_6", "4_2_8"],
    "bytes_layers": 1,
    "bytes_max_batch_size": 8,
    "bytes_max_length": 1024,
}


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables, write JSON."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(
            f"tools/bench/gpu.py needs a CUDA device: torch {torch.__version__} sees none here"
        )
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    device = select_device("cuda")
    name = torch.cuda.get_device_name(device.torch_device)
    console.print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    sizes = Sizes(
        config=dataclasses.replace(QWEN_2_5_7B, num_layers=options.bytes_layers),
        max_batch_size=options.bytes_max_batch_size,
        max_length=options.bytes_max_length,
        dtype=torch.bfloat16,
    )
    pool = bench_pool_bytes(sizes, strategies, device, console)
    setting = make_setting(options, options.dtype, device="cuda")
    variants = _variants(setting, options)
    by_batch = bench_batch_sizes(setting, variants, options, console)
    eager_setting = make_setting(options, options.dtype, device="cuda", cuda_graphs=False)
    chain = options.strategies[0]
    eager_variants = {chain: _variants(eager_setting, options)[chain]}
    eager = bench_batch_sizes(eager_setting, eager_variants, options, console)
    result = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": options.dtype,
        "num_layers": setting.num_layers,
        "speedup_by_batch": {
            str(size): {name: record.ratio for name, record in each.records.items()}
            for size, each in by_batch.items()
        },
        "plain_tokens_per_s": {
            str(size): each.plain_tokens_per_s for size, each in by_batch.items()
        },
        "graph_pool": pool,
        "graphs_over_eager": _graphs_over_eager(by_batch, eager, chain, console),
    }
    write_json(Path(options.out), result)


def _variants(setting: Setting, options: argparse.Namespace) -> dict[str, Variant]:
    """Return fixed strategies and both selectors, with the policy's own drafter."""
    drafts = make_drafts(setting, options.drafter, None)
    strategies = [SpeculationStrategy.parse(text) for text in options.strategies]
    return make_variants({GOOD: drafts[GOOD]}, strategies)


def _graphs_over_eager(
    graphs: Mapping[int, Comparison],
    eager: Mapping[int, Comparison],
    chain: str,
    console: Console,
) -> dict[str, dict[str, float]]:
    """Return seconds per token of eager passes divided by those of captured passes."""
    table = Table(title="(c) captured graphs over eager passes, in speed")
    for column in ("batch", "plain", chain):
        table.add_column(column, justify="right")
    result: dict[str, dict[str, float]] = {}
    for size, captured in graphs.items():
        pairs = {
            "plain": (captured.plain, eager[size].plain),
            chain: (captured.records[chain], eager[size].records[chain]),
        }
        ratios = {
            name: statistics.median(slow.seconds_per_token)
            / statistics.median(fast.seconds_per_token)
            for name, (fast, slow) in pairs.items()
        }
        table.add_row(str(size), *(f"{ratio:.2f}" for ratio in ratios.values()))
        result[str(size)] = ratios
    console.print(table)
    return result


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="build/tiny_policy")
    parser.add_argument("--drafter", default="build/tiny_drafter")
    parser.add_argument("--prompts", default="build/tiny_policy/eval.jsonl")
    parser.add_argument("--deepen", type=int, default=20, help="identity layers behind the policy")
    parser.add_argument(
        "--strategies", nargs="+", default=["6_1_6", "3_1_3", "10_1_10", "14_1_14", "4_2_8"]
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--num-tokens", type=int, default=120, help="of each response")
    parser.add_argument("--max-new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4, help="after one that warms up")
    parser.add_argument(
        "--fixed-rounds", type=int, default=3, help="in which fixed strategies run too"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--bytes-layers", type=int, default=4, help="of the model of (b)")
    parser.add_argument("--bytes-max-batch-size", type=int, default=32)
    parser.add_argument("--bytes-max-length", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="shows that all works")
    parser.add_argument("--out", default="build/bench/gpu.json")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(_QUICK)
    return options
