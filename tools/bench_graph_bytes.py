"""Counts bytes of captured graphs: every strategy captured alone, one strategy alone, and the embedded engine's pool.

    python tools/bench_graph_bytes.py

Counted from the capture plan (engines/embedded/graph_plan.py) for a 7B policy, without a GPU, for several sets of strategies
and longest responses. Table (e) of tools/bench_speculation.py has the default set. The paper's figures (arXiv 2511.16665, table
5): naive 30.39 GB, single 7.81, pool 10.69, so 2.84x. The memory that a driver keeps per kernel of a graph depends on the
version, so two values are shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.engines.embedded.graph_plan import GraphPlan
from tlt_megatron.engines.embedded.memory_plan import PAGE_TOKENS
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tools.measure import write_json
from tools.speculation_bench.graph_bytes import QWEN_2_5_7B

MAX_BATCH_SIZE = 64
_SETS = {
    "default": tuple(SpeculationSection().strategies),
    # The default of the paper's code. It counts the root as a token to verify; we do not.
    "paper": ("8_4_47", "8_4_31", "8_4_15", "8_4_8"),
}
_RESPONSES = {"2k": 2048, "32k": 32768}  # longest response, after 1024 tokens of prompt
_MAX_PROMPT_TOKENS = 1024
_KERNEL_KIB = (64, 16)
_KINDS = ("naive", "single", "ours")


def bench_graph_bytes(console: Console) -> dict[str, object]:
    """Print the table and return {set: {longest response: {KiB a kernel: bytes by kind and their ratios}}}, and the smallest
    ratio.
    """
    table = Table(
        title=f"(e) bytes of captured graphs, 7B in bfloat16, batches of 1-{MAX_BATCH_SIZE} (GiB, from the plan)"
    )
    for column in ("strategies", "longest response", "KiB a kernel", "captures"):
        table.add_column(column, justify="left" if column == "strategies" else "right")
    for column in ("naive", "single", "ours", "naive / ours", "single / ours"):
        table.add_column(column, justify="right")
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, strategies in _SETS.items():
        for response, num_tokens in _RESPONSES.items():
            for kernel_kib in _KERNEL_KIB:
                plan = _make_plan(strategies, num_tokens, kernel_kib)
                figures = _figures(plan)
                by_kernel = result.setdefault(name, {}).setdefault(response, {})
                by_kernel[str(kernel_kib)] = figures
                sizes = (f"{figures[f'{kind}_bytes'] / 2**30:.2f}" for kind in _KINDS)
                table.add_row(
                    f"{name}: {' '.join(strategies)}",
                    response,
                    str(kernel_kib),
                    str(len(plan.keys)),
                    *sizes,
                    f"{figures['naive_over_ours']:.2f}x",
                    f"{figures['single_over_ours']:.2f}x",
                )
    console.print(table)
    smallest = min(
        figures["naive_over_ours"]
        for by_response in result.values()
        for by_kernel in by_response.values()
        for figures in by_kernel.values()
    )
    console.print(f"naive / ours is at least {smallest:.2f}x")
    return {"model": "qwen2.5-7b", **result, "min_naive_over_ours": smallest}


def _make_plan(strategies: tuple[str, ...], num_tokens: int, kernel_kib: int) -> GraphPlan:
    longest = _MAX_PROMPT_TOKENS + num_tokens + PAGE_TOKENS  # a page for drafted tokens
    return GraphPlan(
        QWEN_2_5_7B,
        [SpeculationStrategy.parse(text) for text in strategies],
        max_batch_size=MAX_BATCH_SIZE,
        max_length=longest,
        item_bytes=2,
        bytes_per_kernel=kernel_kib << 10,
    )


def _figures(plan: GraphPlan) -> dict[str, float]:
    sizes = {
        "naive_bytes": plan.bytes_naive(),
        "single_bytes": plan.bytes_single(),
        "ours_bytes": plan.bytes_pool(),
    }
    return sizes | {
        "num_captures": len(plan.keys),
        "naive_over_ours": sizes["naive_bytes"] / sizes["ours_bytes"],
        "single_over_ours": sizes["single_bytes"] / sizes["ours_bytes"],
    }


def main() -> None:
    """Print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench/graph_bytes.json"))
    options = parser.parse_args()
    write_json(options.out, {"graph_pool_bytes": bench_graph_bytes(Console())})


if __name__ == "__main__":
    main()
