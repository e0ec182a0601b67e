"""Computes from bytes, without a GPU, tokens per second and the size of the graph pool.

    python -m tools.bench roofline

Tokens per second: a pass takes the longer of its bytes over the bandwidth and its operations over
the peak. Counted are weights, KV and, for the plain torch form of attention, its copies of KV and
its scores. Launches, activations, logits, sampling and communication are not, so real speed is
lower.

Graph pool: bytes of captured graphs, from the plan that an engine makes before it captures
anything. Naive: every strategy is captured alone, drafting and verifying together, at every batch
size, in separate memory. Single: only the widest strategy, captured like that. Pool: what this
engine captures. The model is Qwen2.5-7B, with the default strategies and with those of the paper
(arXiv 2511.16665, table 5: naive 30.39 GB, single 7.81, pool 10.69, so 2.84x).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.drafter.drafter_memory import drafter_parameters
from tlt_megatron.engines.embedded.graph_plan import GraphKey, GraphPlan
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.sizes import ModelSizes
from tools.bench.measure import print_table
from tools.gpu.shapes import QWEN_2_5_7B

QWEN_2_5_32B = replace(
    QWEN_2_5_7B, hidden_size=5120, num_heads=40, num_kv_heads=8, num_layers=64, ffn_size=27648
)
ITEM_BYTES = 2  # bfloat16
# models/attention/kernels.py without a fused kernel: keys and values are read, copied and read;
# passes over float32 scores.
_TORCH_KV_READS, _TORCH_SCORE_BYTES = 3, 72
_CONTEXTS, _BATCHES, _ACCEPT_LENGTHS = (2048, 16384), (1, 8, 64), (2.0, 3.0, 4.0, 5.0)
_ENGINES: dict[str, dict[str, Any]] = {
    "7B": {"model": QWEN_2_5_7B, "num_gpus": 1},
    "7B, torch attention": {"model": QWEN_2_5_7B, "num_gpus": 1, "has_kernel": False},
    "32B, TP 4": {"model": QWEN_2_5_32B, "num_gpus": 4},
}
_CHAIN, _PAPER_DEPTHS = 6, (4, 6, 8, 10)  # draft depths of both tables
PAPER: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("paper_tables.yaml").read_text(encoding="utf-8")
)
_GRAPH_STRATEGIES = {
    "default": tuple(SpeculationSection().strategies),
    # The default of the paper's code. It counts the root as a token to verify; we do not.
    "paper": ("8_4_47", "8_4_31", "8_4_15", "8_4_8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet values of the SXM variants; bfloat16 without sparsity."""

    bandwidth: float  # bytes per second
    peak: float  # operations per second
    num_bytes: float


GPUS = {
    "H100": Gpu(bandwidth=3.35e12, peak=989e12, num_bytes=80e9),
    "H200": Gpu(bandwidth=4.8e12, peak=989e12, num_bytes=141e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A model on `num_gpus` tensor-parallel GPUs that decodes `batch` sequences of `context`
    tokens.
    """

    model: ModelConfig
    num_gpus: int
    batch: int
    context: int
    has_kernel: bool = True  # attention reads KV once and writes no scores

    def fits(self, gpu: Gpu) -> bool:
        """Return whether weights, drafter and KV fit into the GPUs."""
        sizes = ModelSizes(self.model)
        kv = self.batch * self.context * sizes.kv * (sizes.num_layers + 1)
        held = sizes.total + drafter_parameters(sizes) + kv
        return held * ITEM_BYTES <= gpu.num_bytes * self.num_gpus

    def pass_s(self, gpu: Gpu, rows: int, *, is_draft: bool = False) -> float:
        """Return the seconds of a pass with `rows` tokens per sequence, of the target or the
        drafter.
        """
        return max(self.parts_s(gpu, rows, is_draft=is_draft))

    def parts_s(self, gpu: Gpu, rows: int, *, is_draft: bool = False) -> tuple[float, float]:
        """Return the seconds that the bytes of such a pass take, and those of its operations."""
        sizes = ModelSizes(self.model)
        num_layers = 1 if is_draft else sizes.num_layers
        layers = drafter_parameters(sizes) if is_draft else num_layers * sizes.layer
        weights = layers + sizes.table + sizes.hidden  # the LM head; of the embedding only rows
        cached = self.batch * self.context * num_layers
        num_bytes = ITEM_BYTES * (weights + cached * sizes.kv)
        if not self.has_kernel:
            num_bytes += ITEM_BYTES * cached * sizes.kv * (_TORCH_KV_READS - 1)
            num_bytes += cached * rows * self.model.num_heads * _TORCH_SCORE_BYTES
        num_operations = 2 * self.batch * rows * weights + 4 * cached * rows * sizes.query
        bandwidth, peak = gpu.bandwidth * self.num_gpus, gpu.peak * self.num_gpus
        return num_bytes / bandwidth, num_operations / peak

    def plain(self, gpu: Gpu) -> float:
        """Return the tokens per second without drafts."""
        return self.batch / self.pass_s(gpu, 1)

    def chain(
        self, gpu: Gpu, accept_length: float, *, depth: int = _CHAIN, rows: int = _CHAIN + 1
    ) -> float:
        """Return the tokens per second of `depth` draft passes and a verify pass of `rows` tokens
        per sequence.

        `accept_length` is the number of tokens that a verify pass brings, its own included.
        """
        drafting = depth * self.pass_s(gpu, 1, is_draft=True)
        return self.batch * accept_length / (drafting + self.pass_s(gpu, rows))


def run(options: argparse.Namespace) -> dict[str, object]:  # noqa: ARG001
    """Compute and print the tables. Return the values of the JSON."""
    return {"computed": _speeds(), "speedups": _speedups(), "graph_pool_bytes": _graph_bytes()}


def _speeds() -> Mapping[str, object]:
    rows = []
    result: dict[str, object] = {}
    for (name, settings), context, batch in product(_ENGINES.items(), _CONTEXTS, _BATCHES):
        decoding = Decoding(**settings, batch=batch, context=context)
        speeds = {
            name: [decoding.plain(gpu), *(decoding.chain(gpu, n) for n in _ACCEPT_LENGTHS)]
            for name, gpu in GPUS.items()
            if decoding.fits(gpu)
        }
        absent = [None] * (1 + len(_ACCEPT_LENGTHS))
        columns = zip(*(speeds.get(name, absent) for name in GPUS), strict=True)
        cells = (" / ".join("-" if v is None else f"{v:,.0f}" for v in of) for of in columns)
        rows.append([name, context, batch, *cells])
        result[f"{name}, {context}, {batch}"] = speeds
    lengths = [f"chain, accepts {length:g}" for length in _ACCEPT_LENGTHS]
    title = f"tokens/s, {' / '.join(GPUS)}: computed, not yet run on hardware"
    print_table(title, ("model", "context", "batch", "plain", *lengths), rows)
    return result


def _speedups() -> list[list[float]]:
    """Compare with what the paper measured.

    Its context is not known; it hardly matters at batch 1.
    """
    decoding = Decoding(model=QWEN_2_5_32B, num_gpus=4, batch=1, context=2048)
    figure, gpu, rows = PAPER["figure_13"], GPUS["H100"], []
    num_rows = figure["verify"][0]
    for depth in _PAPER_DEPTHS:
        accept_length, measured = figure["accept_lengths"][depth][0], figure["speedups"][depth][0]
        speed = decoding.chain(gpu, accept_length, depth=depth, rows=num_rows)
        rows.append([depth, accept_length, measured, speed / decoding.plain(gpu)])
    title = f"speedup of speculation, 32B on 4 H100, batch 1, {num_rows} tokens to verify"
    columns = ("draft depth", "accept length", "TLT, measured", "computed")
    print_table(title, columns, rows)
    return rows


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
        make(batch_size=size, length=length) for size in plan.batch_sizes for length in plan.lengths
    ]
    if strategy.is_learned:
        pairs = strategy.depth + 1
        keys += [replace(k, num_rows=pairs, depth=0, strategy=strategy) for k in keys]
    return plan.graph_bytes(keys) + max(plan.cost(k).activation_bytes for k in keys)


def _graph_bytes() -> dict[str, dict[str, object]]:
    """Return, by set of strategies, bytes by way to capture and their ratio."""
    rows = []
    result: dict[str, dict[str, object]] = {}
    for name, strategies in _GRAPH_STRATEGIES.items():
        plan = GraphPlan(
            QWEN_2_5_7B,
            [SpeculationStrategy.parse(text) for text in strategies],
            max_batch_size=max(_BATCHES),
            max_length=max(_CONTEXTS),
            item_bytes=ITEM_BYTES,
        )
        pool, naive, single = plan.bytes_pool(), bytes_naive(plan), bytes_single(plan)
        sizes = {"naive": naive, "single": single, "pool": pool}
        ratio, num_captures = naive / pool, len(plan.keys)
        megabytes = (round(value / 1e6) for value in sizes.values())
        rows.append([f"{name}: {' '.join(strategies)}", num_captures, *megabytes, ratio])
        result[name] = {**sizes, "naive_over_pool": ratio, "num_captures": num_captures}
    title = f"graphs of Qwen2.5-7B in bfloat16, batches of 1-{max(_BATCHES)}, counted from the plan"
    columns = ("strategies", "captures", "naive MB", "single MB", "pool MB", "naive / pool")
    print_table(title, columns, rows)
    return result
