"""Counts bytes of captured graphs from the plan that an engine makes before it captures anything; needs no GPU.

    python -m tools.bench graph-bytes

Naive: every strategy is captured alone, drafting and verifying together, at every batch size, in separate memory. Single: only
the widest strategy, captured like that. Pool: what this engine captures. `graph-bytes` compares sets of strategies and longest
responses for a 7B policy. The paper's figures (arXiv 2511.16665, table 5): naive 30.39 GB, single 7.81, pool 10.69, so 2.84x.
The memory that a driver keeps per kernel of a graph depends on its version, so two values are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.engines.embedded.graph_plan import GraphKey, GraphPlan, Role
from tlt_megatron.engines.embedded.memory_plan import PAGE_TOKENS
from tlt_megatron.models.config import ModelConfig, RopeConfig
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tools.bench.measure import make_table, write_json

# Values from its config.json.
QWEN_2_5_7B = ModelConfig(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    ffn_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    has_qkv_bias=True,
    has_qk_norm=False,
)
_MAX_BATCH_SIZE, _MAX_LENGTH = 64, 16384
_SETS = {
    "default": tuple(SpeculationSection().strategies),
    # The default of the paper's code. It counts the root as a token to verify; we do not.
    "paper": ("8_4_47", "8_4_31", "8_4_15", "8_4_8"),
}
_RESPONSES = {"2k": 2048, "32k": 32768}  # longest response, after 1024 tokens of prompt
_MAX_PROMPT_TOKENS = 1024
_KERNEL_KIB = (64, 16)


def bytes_naive(plan: GraphPlan) -> int:
    """Return the bytes if each strategy of the plan, and plain decoding, were captured alone."""
    return sum(_bytes_alone(plan, strategy) for strategy in (OFF, *plan.strategies))


def bytes_single(plan: GraphPlan, strategy: SpeculationStrategy | None = None) -> int:
    """Return the bytes of plain decoding and one strategy of the plan, the widest by default, captured alone."""
    if strategy is None:
        strategy = max(plan.strategies, key=lambda s: s.num_rows, default=OFF)
    return sum(_bytes_alone(plan, each) for each in {OFF, strategy})


def _bytes_alone(plan: GraphPlan, strategy: SpeculationStrategy) -> int:
    """Return the bytes if drafting and verifying are captured together at every batch size, in memory of their own."""
    shapes = [(Role.TARGET, strategy.num_rows)]
    if strategy.is_learned:
        depths = [(Role.DRAFT, strategy.topk)] * (strategy.num_steps - 1)
        shapes += [(Role.DRAFT, strategy.depth + 1), *depths]
    keys = [
        GraphKey(role=role, num_rows=num_rows, batch_size=size, length=length)
        for size in plan.batch_sizes
        for length in plan.lengths
        for role, num_rows in shapes
    ]
    static = max(plan.cost(key).static_bytes for key in keys if key.role is Role.TARGET)
    return plan.graph_bytes(keys) + static + max(plan.cost(k).activation_bytes for k in keys)


def bench_graph_bytes(plan: GraphPlan, console: Console) -> Mapping[str, Mapping[str, object]]:
    """Return the bytes of `plan`, the benchmark's own engine, and of a 7B model with the default strategies."""
    table = make_table(
        "(e) bytes of captured graphs, counted from the plan",
        *("model", "naive MB", "single MB", "pool MB", "naive / pool"),
    )
    result = {}
    real = _qwen_plan(_SETS["default"], _MAX_LENGTH)
    for name, each in (("benchmark", plan), ("Qwen2.5-7B", real)):
        naive, single, pool = bytes_naive(each), bytes_single(each), each.bytes_pool()
        cells = [f"{value / 1e6:,.0f}" for value in (naive, single, pool)]
        table.add_row(name, *cells, f"{naive / pool:.2f}")
        result[name] = {
            "naive": naive,
            "single": single,
            "pool": pool,
            "naive_over_pool": naive / pool,
            "strategies": [str(s) for s in each.strategies],
        }
    console.print(table)
    return result


def main(arguments: Sequence[str]) -> None:
    """Print the table of all sets, write JSON."""
    parser = argparse.ArgumentParser(
        prog="tools.bench graph-bytes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/graph_bytes.json"))
    options = parser.parse_args(arguments)
    write_json(options.out, {"graph_pool_bytes": _bench_sets(Console())})


def _bench_sets(console: Console) -> dict[str, object]:
    """Return {set: {longest response: {KiB a kernel: bytes by kind and their ratios}}}, and the smallest ratio."""
    table = make_table(
        f"bytes of captured graphs, 7B in bfloat16, batches of 1-{_MAX_BATCH_SIZE} (GiB, from the plan)",
        *("strategies", "longest response", "KiB a kernel", "captures"),
        *("naive", "single", "ours", "naive / ours", "single / ours"),
    )
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    ratios = []
    for name, strategies in _SETS.items():
        for response, num_tokens in _RESPONSES.items():
            for kernel_kib in _KERNEL_KIB:
                # a page for drafted tokens
                longest = _MAX_PROMPT_TOKENS + num_tokens + PAGE_TOKENS
                plan = _qwen_plan(strategies, longest, bytes_per_kernel=kernel_kib << 10)
                naive, single, ours = bytes_naive(plan), bytes_single(plan), plan.bytes_pool()
                ratios.append(naive / ours)
                result.setdefault(name, {}).setdefault(response, {})[str(kernel_kib)] = {
                    "naive_bytes": naive,
                    "single_bytes": single,
                    "ours_bytes": ours,
                    "num_captures": len(plan.keys),
                    "naive_over_ours": naive / ours,
                    "single_over_ours": single / ours,
                }
                table.add_row(
                    f"{name}: {' '.join(strategies)}",
                    response,
                    str(kernel_kib),
                    str(len(plan.keys)),
                    *(f"{value / 2**30:.2f}" for value in (naive, single, ours)),
                    f"{naive / ours:.2f}x",
                    f"{single / ours:.2f}x",
                )
    console.print(table)
    console.print(f"naive / ours is at least {min(ratios):.2f}x")
    return {"model": "qwen2.5-7b", **result, "min_naive_over_ours": min(ratios)}


def _qwen_plan(strategies: Sequence[str], max_length: int, **options: int) -> GraphPlan:
    return GraphPlan(
        QWEN_2_5_7B,
        [SpeculationStrategy.parse(text) for text in strategies],
        max_batch_size=_MAX_BATCH_SIZE,
        max_length=max_length,
        item_bytes=2,
        **options,
    )
