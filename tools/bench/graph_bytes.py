"""Counts bytes of captured graphs from the plan that an engine makes before it captures anything.

Called by roofline.py.

Naive: every strategy is captured alone, drafting and verifying together, at every batch size, in
separate memory. Single: only the widest strategy, captured like that. Pool: what this engine
captures. The model is Qwen2.5-7B, with the default strategies and with those of the paper (arXiv
2511.16665, table 5: naive 30.39 GB, single 7.81, pool 10.69, so 2.84x).
"""

from __future__ import annotations

import dataclasses
from functools import partial

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphKey, GraphPlan, Role
from tools.bench.measure import print_table
from tools.gpu.shapes import QWEN_2_5_7B

_MAX_BATCH_SIZE, _MAX_LENGTH = 64, 16384
_SETS = {
    "default": tuple(SpeculationSection().strategies),
    # The default of the paper's code. It counts the root as a token to verify; we do not.
    "paper": ("8_4_47", "8_4_31", "8_4_15", "8_4_8"),
}


def bytes_naive(plan: GraphPlan) -> int:
    """Return the bytes if each strategy of the plan, and plain decoding, were captured alone."""
    return sum(_bytes_alone(plan, strategy) for strategy in (OFF, *plan.strategies))


def bytes_single(plan: GraphPlan) -> int:
    """Return the bytes of plain decoding and the widest strategy of the plan, captured alone."""
    widest = max(plan.strategies, key=lambda s: s.num_rows, default=OFF)
    return sum(_bytes_alone(plan, each) for each in {OFF, widest})


def _bytes_alone(plan: GraphPlan, strategy: SpeculationStrategy) -> int:
    """Return the bytes if drafting and verifying are captured together at every batch size, in
    memory of their own.
    """
    make = partial(GraphKey, num_rows=strategy.num_rows, depth=strategy.depth)
    keys = [
        make(role=Role.TARGET, batch_size=size, length=length)
        for size in plan.batch_sizes
        for length in plan.lengths
    ]
    if strategy.is_learned:
        drafts = (dataclasses.replace(k, role=Role.DRAFT, strategy=strategy) for k in keys)
        keys += [dataclasses.replace(k, num_rows=strategy.depth + 1, depth=0) for k in drafts]
    return plan.graph_bytes(keys) + max(plan.cost(k).activation_bytes for k in keys)


def bench_graph_bytes() -> dict[str, dict[str, object]]:
    """Return, by set of strategies, bytes by way to capture and their ratio."""
    rows = []
    result: dict[str, dict[str, object]] = {}
    for name, strategies in _SETS.items():
        plan = GraphPlan(
            QWEN_2_5_7B,
            [SpeculationStrategy.parse(text) for text in strategies],
            max_batch_size=_MAX_BATCH_SIZE,
            max_length=_MAX_LENGTH,
            item_bytes=2,
        )
        sizes = {
            "naive": bytes_naive(plan),
            "single": bytes_single(plan),
            "pool": plan.bytes_pool(),
        }
        ratio, num_captures = sizes["naive"] / sizes["pool"], len(plan.keys)
        megabytes = (round(value / 1e6) for value in sizes.values())
        rows.append([f"{name}: {' '.join(strategies)}", num_captures, *megabytes, ratio])
        result[name] = {**sizes, "naive_over_pool": ratio, "num_captures": num_captures}
    title = (
        f"graphs of Qwen2.5-7B in bfloat16, batches of 1-{_MAX_BATCH_SIZE}, counted from the plan"
    )
    columns = ("strategies", "captures", "naive MB", "single MB", "pool MB", "naive / pool")
    print_table(title, columns, rows)
    return result
