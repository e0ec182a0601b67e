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

from tools.bench.interleaved import Comparison
from tools.bench.measure import print_table
from tools.bench.setting import (
    GOOD,
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
    chain = options.strategies[0]
    measured: list[dict[int, Comparison]] = []
    for has_graphs in (True, False):
        setting = make_setting(options, options.dtype, device="cuda", cuda_graphs=has_graphs)
        drafts = {GOOD: make_drafts(setting, options.drafter)[GOOD]}
        variants = make_variants(drafts, options)
        variants = variants if has_graphs else {chain: variants[chain]}
        measured.append(bench_batch_sizes(setting, variants, options, console))
    by_batch, eager = measured
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


def _graphs_over_eager(
    graphs: Mapping[int, Comparison],
    eager: Mapping[int, Comparison],
    chain: str,
    console: Console,
) -> dict[str, dict[str, float]]:
    """Return seconds per token of eager passes divided by those of captured passes."""

    def seconds(comparison: Comparison) -> list[float]:
        records = (comparison.plain, comparison.records[chain])
        return [statistics.median(record.seconds_per_token) for record in records]

    result: dict[str, dict[str, float]] = {}
    for size, captured in graphs.items():
        slow, fast = seconds(eager[size]), seconds(captured)
        result[str(size)] = {"plain": slow[0] / fast[0], chain: slow[1] / fast[1]}
    title = "(b) captured graphs over eager passes, in speed"
    rows = ([size, *by_kind.values()] for size, by_kind in result.items())
    print_table(console, title, ("batch", "plain", chain), rows, num_names=0)
    return result
