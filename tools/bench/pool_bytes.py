"""Measures the bytes that captured graphs take on this GPU: strategies captured alone, against the embedded engine's pool.

When captured alone, each strategy has its own graphs, and each graph its own memory. Called by tools/bench/gpu.py. Weights are
random, because a capture does not depend on values. The total is the GPU memory that the driver reports as used. So it includes
what the driver keeps for the kernels of a graph, which torch's allocator does not see.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from tlt_megatron.engines.embedded.graph_plan import GraphPlan, Role
from tlt_megatron.engines.embedded.graph_pool import (
    GraphMemory,
    GraphPool,
    PassInputs,
    addresses_read,
    lane_steps,
)
from tlt_megatron.engines.embedded.memory_plan import PAGE_TOKENS
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import Device
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tools.bench.graph_bytes import bytes_naive

_WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that graphs are captured for."""

    config: ModelConfig
    max_batch_size: int
    max_length: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Memory taken by the captures of one kind."""

    bytes: int  # as the driver reports
    allocator_bytes: int  # of these, torch's allocator: activations and static tensors
    num_captures: int
    is_all: bool = True  # False: memory ran out before all were captured

    @property
    def driver_bytes(self) -> int:
        """Return what the driver keeps for the graphs themselves."""
        return self.bytes - self.allocator_bytes


class SeparateMemories:
    """Separate memory for every graph; see `engines.embedded.graph_pool.GraphMemory`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` in new memory. See `runtime.device.GraphMemory`."""
        memory = self._device.graph_memory()
        assert memory is not None
        return memory.capture(work)


class Captures:
    """A target and a drafter whose passes are captured as in the embedded engine, over lanes (one KV range per sequence)."""

    def __init__(self, sizes: Sizes, device: Device) -> None:
        self._sizes = sizes
        self._device = device
        where, config = device.torch_device, sizes.config
        self._model = Transformer(config, sizes.dtype, where)
        for _, weight in self._model.named_hf_tensors():
            weight.normal_(std=_WEIGHT_SCALE)
        embedding, head = self._model.embedding, self._model.lm_head
        draft_config = make_draft_config(config, "eagle", embedding)
        drafter = DraftModel(draft_config, embedding_VD=embedding, lm_head_VD=head)
        self._draft = DraftInference(drafter, sizes.dtype)
        self._lane = -(-sizes.max_length // PAGE_TOKENS) * PAGE_TOKENS
        self._cache = KvCache(
            config,
            num_pages=sizes.max_batch_size * self._lane // PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=sizes.dtype,
            device=where,
            num_draft_layers=1,
            has_scratch=True,
        )
        for rotary in (self._model.rotary, self._draft.rotary):
            rotary.reserve(self._lane)

    def plan(self, strategies: Sequence[SpeculationStrategy]) -> GraphPlan:
        """Return the plan of captures for these strategies."""
        return GraphPlan(
            self._sizes.config,
            strategies,
            max_batch_size=self._sizes.max_batch_size,
            max_length=self._lane,
            item_bytes=self._sizes.dtype.itemsize,
        )

    def capture(self, plan: GraphPlan, new_memory: Callable[[], GraphMemory | None]) -> GraphPool:
        """Capture everything in the plan."""
        pool = GraphPool(plan, new_memory)
        pool.bind(
            lane_steps(self._model, self._cache, self._lane, self._draft),
            addresses_read(self._model, self._cache, self._draft),
            lane=self._lane,
            num_lanes=self._sizes.max_batch_size,
            scratch_slot=self._cache.scratch_slot,
        )
        pool.capture_ahead({role: self._example(role) for role in Role})
        return pool

    def _example(self, role: Role) -> PassInputs:
        where = self._device.torch_device
        zero = torch.zeros(1, dtype=torch.int64, device=where)
        size, dtype = self._sizes.config.hidden_size, self._sizes.dtype
        is_draft = role is Role.DRAFT
        return PassInputs(
            token_ids_P=zero,
            positions_P=zero,
            slots_P=zero,
            bias_BRS=torch.zeros(1, 1, 1, dtype=dtype, device=where),
            hidden_PD=torch.zeros(1, size, dtype=dtype, device=where) if is_draft else None,
        )

    def measure(
        self, plans: Sequence[GraphPlan], new_memory: Callable[[], GraphMemory | None]
    ) -> Taken:
        """Return what all captures of all plans take together. They are freed afterwards."""
        before = self._in_use()
        pools, num_captures, is_all = [], 0, True
        try:
            for plan in plans:
                pools.append(self.capture(plan, new_memory))
        except torch.OutOfMemoryError:
            is_all = False
        after = self._in_use()
        num_captures = sum(pool.take_counts().num_captures for pool in pools)
        for pool in pools:
            pool.drop()
        pools.clear()
        self._in_use()
        return Taken(
            bytes=after[0] - before[0],
            allocator_bytes=after[1] - before[1],
            num_captures=num_captures,
            is_all=is_all,
        )

    def _in_use(self) -> tuple[int, int]:
        """Return the GPU bytes in use, and the part of torch's allocator."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()


def bench_pool_bytes(
    sizes: Sizes, strategies: Sequence[SpeculationStrategy], device: Device, console: Console
) -> dict[str, object]:
    """Return measured and planned bytes of both ways to capture."""
    captures = Captures(sizes, device)
    plan = captures.plan(strategies)
    captures.measure([captures.plan(())], device.graph_memory)  # initializes libraries
    ours = captures.measure([plan], device.graph_memory)
    separate = [captures.plan([strategy]) for strategy in strategies]
    naive = captures.measure(separate, lambda: SeparateMemories(device))
    num_kernels = sum(plan.cost(key).num_kernels for key in plan.keys)
    c = sizes.config
    table = Table(
        title=f"(b) bytes of captured graphs, {c.num_layers} layers of width {c.hidden_size}, batches of 1-"
        f"{sizes.max_batch_size}, up to {sizes.max_length} positions"
    )
    for column in ("captured", "graphs", "MB", "tensors MB", "driver MB", "planned MB"):
        table.add_column(column, justify="left" if column == "captured" else "right")
    planned = {"pool": plan.bytes_pool(), "naive": bytes_naive(plan)}
    for name, taken in (("pool", ours), ("naive", naive)):
        sizes_mb = (taken.bytes, taken.allocator_bytes, taken.driver_bytes, planned[name])
        cells = [f"{value / 1e6:,.0f}" for value in sizes_mb]
        cells[0] = cells[0] if taken.is_all else f"> {cells[0]} (ran out)"
        table.add_row(name, str(taken.num_captures), *cells)
    console.print(table)
    ratio = naive.bytes / max(ours.bytes, 1)
    per_kernel = ours.driver_bytes / num_kernels
    console.print(
        f"naive / pool {ratio:.2f}x; the driver keeps {per_kernel / 1024:.1f} KiB a kernel"
    )
    return {
        "pool": _figures(ours) | {"planned_bytes": planned["pool"]},
        "naive": _figures(naive) | {"planned_bytes": planned["naive"]},
        "naive_over_pool": ratio,
        "driver_bytes_per_kernel": per_kernel,
    }


def _figures(taken: Taken) -> dict[str, object]:
    return {
        "bytes": taken.bytes,
        "tensor_bytes": taken.allocator_bytes,
        "driver_bytes": taken.driver_bytes,
        "num_captures": taken.num_captures,
        "is_all": taken.is_all,
    }
