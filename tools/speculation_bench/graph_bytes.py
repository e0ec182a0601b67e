"""Counts bytes of captured graphs from the plan that an engine makes before it captures anything.

Called by tools/bench_speculation.py. Naive: every strategy is captured alone, drafting and verifying together, at every batch
size, in separate memory. Single: only the widest strategy, captured like that. Pool: what this engine captures.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.engines.embedded.graph_plan import GraphPlan
from tlt_megatron.models.config import ModelConfig, RopeConfig
from tlt_megatron.speculation.strategy import SpeculationStrategy

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
_REAL_MAX_BATCH_SIZE, _REAL_MAX_LENGTH = 64, 16384


def bench_graph_bytes(plan: GraphPlan, console: Console) -> Mapping[str, Mapping[str, float]]:
    """Return the bytes for the benchmark's own engine, and for a 7B model with the default strategies."""
    strategies = [SpeculationStrategy.parse(text) for text in SpeculationSection().strategies]
    real = GraphPlan(
        QWEN_2_5_7B,
        strategies,
        max_batch_size=_REAL_MAX_BATCH_SIZE,
        max_length=_REAL_MAX_LENGTH,
        item_bytes=2,
    )
    table = Table(title="(e) bytes of captured graphs, counted from the plan")
    for column in ("model", "naive MB", "single MB", "pool MB", "naive / pool"):
        table.add_column(column, justify="left" if column == "model" else "right")
    result = {}
    for name, each in (("benchmark", plan), ("Qwen2.5-7B", real)):
        naive, single, pool = each.bytes_naive(), each.bytes_single(), each.bytes_pool()
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
