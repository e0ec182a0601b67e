"""Measures what captured graphs and speculation gain on a GPU, in two tables.

    python -m tools.bench gpu --model build/tiny_policy --drafter build/tiny_drafter

(a) speed by batch size against plain decoding, with graphs: chains, a tree, both selectors
(b) graphs against eager passes, plain and with the first of the strategies

Both are wall time of the embedded engine, without captures. Each variant runs between two runs of plain decoding. `--deepen`
adds identity layers to the policy, as in `tools.bench speculation`. Exits with an error if torch sees no CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping

import torch
from rich.console import Console

from tools.bench.interleaved import Comparison, Variant
from tools.bench.measure import print_table
from tools.bench.setting import (
    GOOD,
    Setting,
    add_setting_options,
    make_drafts,
    make_setting,
    make_variants,
)
from tools.bench.speed import bench_batch_sizes, speedup_by_batch

QUICK = {
    "batch_sizes": [1, 8],
    "num_tokens": 40,
    "max_new_tokens": 200,
    "rounds": 1,
    "strategies": ["6_1_6", "4_2_8"],
}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_setting_options(add)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure and print the tables. Return the values of the JSON."""
    if not torch.cuda.is_available():
        version = torch.__version__
        raise SystemExit(f"tools.bench gpu: needs a CUDA device, torch {version} sees none here")
    name = torch.cuda.get_device_name()
    console.print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    setting = make_setting(options, options.dtype, device="cuda")
    variants = _variants(setting, options)
    by_batch = bench_batch_sizes(setting, variants, options, console)
    eager_setting = make_setting(options, options.dtype, device="cuda", cuda_graphs=False)
    chain = options.strategies[0]
    eager_variants = {chain: _variants(eager_setting, options)[chain]}
    eager = bench_batch_sizes(eager_setting, eager_variants, options, console)
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": options.dtype,
        "num_layers": setting.policy.num_layers,
        "speedup_by_batch": speedup_by_batch(by_batch),
        "plain_tokens_per_s": {str(s): each.plain_tokens_per_s for s, each in by_batch.items()},
        "graphs_over_eager": _graphs_over_eager(by_batch, eager, chain, console),
    }


def _variants(setting: Setting, options: argparse.Namespace) -> dict[str, Variant]:
    """Return fixed strategies and both selectors, with the policy's own drafter."""
    drafts = make_drafts(setting, options.drafter)
    return make_variants({GOOD: drafts[GOOD]}, options)


def _graphs_over_eager(
    graphs: Mapping[int, Comparison],
    eager: Mapping[int, Comparison],
    chain: str,
    console: Console,
) -> dict[str, dict[str, float]]:
    """Return seconds per token of eager passes divided by those of captured passes."""
    result: dict[str, dict[str, float]] = {}
    for size, captured in graphs.items():
        pairs = {
            "plain": (captured.plain, eager[size].plain),
            chain: (captured.records[chain], eager[size].records[chain]),
        }
        result[str(size)] = {
            name: statistics.median(slow.seconds_per_token)
            / statistics.median(fast.seconds_per_token)
            for name, (fast, slow) in pairs.items()
        }
    title = "(b) captured graphs over eager passes, in speed"
    rows = ([size, *by_kind.values()] for size, by_kind in result.items())
    print_table(console, title, ("batch", "plain", chain), rows, num_names=0)
    return result
