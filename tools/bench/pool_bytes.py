"""Measures the bytes that captured graphs take on this GPU: strategies captured alone, against the embedded engine's pool.

When captured alone, each strategy has its own graphs, and each graph its own memory. Called by tools/bench/gpu.py. Weights are
random, because a capture does not depend on values. The total is the GPU memory that the driver reports as used. So it includes
what the driver keeps for the kernels of a graph, which torch's allocator does not see.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from rich.console import Console

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
from tools.bench.measure import print_table

_WEIGHT_SCALE = 0.02


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

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        *,
        dtype: torch.dtype,
        max_batch_size: int,
        max_length: int,
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._max_batch_size = max_batch_size
        where = device.torch_device
        self._model = Transformer(config, dtype, where)
        for _, weight in self._model.named_hf_tensors():
            weight.normal_(std=_WEIGHT_SCALE)
        embedding, head = self._model.embedding, self._model.lm_head
        draft_config = make_draft_config(config, "eagle", embedding)
        drafter = DraftModel(draft_config, embedding_VD=embedding, lm_head_VD=head)
        self._draft = DraftInference(drafter, dtype)
        self._lane = -(-max_length // PAGE_TOKENS) * PAGE_TOKENS
        self._cache = KvCache(
            config,
            num_pages=max_batch_size * self._lane // PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=dtype,
            device=where,
            num_draft_layers=1,
            has_scratch=True,
        )
        for rotary in (self._model.rotary, self._draft.rotary):
            rotary.reserve(self._lane)

    def __str__(self) -> str:
        c = self._config
        return (
            f"{c.num_layers} layers of width {c.hidden_size}, batches of 1-{self._max_batch_size},"
            f" up to {self._lane} positions"
        )

    def plan(self, strategies: Sequence[SpeculationStrategy]) -> GraphPlan:
        """Return the plan of captures for these strategies."""
        return GraphPlan(
            self._config,
            strategies,
            max_batch_size=self._max_batch_size,
            max_length=self._lane,
            item_bytes=self._dtype.itemsize,
        )

    def capture(self, plan: GraphPlan, new_memory: Callable[[], GraphMemory | None]) -> GraphPool:
        """Capture everything in the plan."""
        pool = GraphPool(plan, new_memory)
        pool.bind(
            lane_steps(self._model, self._cache, self._lane, self._draft),
            addresses_read(self._model, self._cache, self._draft),
            lane=self._lane,
            num_lanes=self._max_batch_size,
            scratch_slot=self._cache.scratch_slot,
        )
        pool.capture_ahead({role: self._example(role) for role in Role})
        return pool

    def _example(self, role: Role) -> PassInputs:
        where = self._device.torch_device
        zero = torch.zeros(1, dtype=torch.int64, device=where)
        size, dtype = self._config.hidden_size, self._dtype
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
    ) -> dict[str, int]:
        """Return what all captures of all plans take together, in bytes. They are freed afterwards.

        `bytes` as the driver reports; of these `tensor_bytes` of torch's allocator and `driver_bytes` for the graphs
        themselves. `is_all` is false if memory ran out before all were captured.
        """
        before = self._in_use()
        pools: list[GraphPool] = []
        is_all = True
        try:
            for plan in plans:
                pools.append(self.capture(plan, new_memory))
        except torch.OutOfMemoryError:
            is_all = False
        total, tensors = (a - b for a, b in zip(self._in_use(), before, strict=True))
        num_captures = sum(pool.take_counts().num_captures for pool in pools)
        for pool in pools:
            pool.drop()
        pools.clear()
        self._in_use()
        return {
            "bytes": total,
            "tensor_bytes": tensors,
            "driver_bytes": total - tensors,
            "num_captures": num_captures,
            "is_all": is_all,
        }

    def _in_use(self) -> tuple[int, int]:
        """Return the GPU bytes in use, and the part of torch's allocator."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()


def bench_pool_bytes(
    captures: Captures, strategies: Sequence[SpeculationStrategy], device: Device, console: Console
) -> dict[str, object]:
    """Return measured and planned bytes of both ways to capture."""
    plan = captures.plan(strategies)
    captures.measure([captures.plan(())], device.graph_memory)  # initializes libraries
    separate = [captures.plan([strategy]) for strategy in strategies]
    result = {
        "pool": captures.measure([plan], device.graph_memory),
        "naive": captures.measure(separate, lambda: SeparateMemories(device)),
    }
    result["pool"]["planned_bytes"] = plan.bytes_pool()
    result["naive"]["planned_bytes"] = bytes_naive(plan)
    rows = []
    for name, taken in result.items():
        keys = ("bytes", "tensor_bytes", "driver_bytes", "planned_bytes")
        total, *parts = (f"{taken[key] / 1e6:,.0f}" for key in keys)
        total = total if taken["is_all"] else f"> {total} (ran out)"
        rows.append([name, taken["num_captures"], total, *parts])
    columns = ("captured", "graphs", "MB", "tensors MB", "driver MB", "planned MB")
    print_table(console, f"(b) bytes of captured graphs, {captures}", columns, rows)
    ratio = result["naive"]["bytes"] / max(result["pool"]["bytes"], 1)
    num_kernels = sum(plan.cost(key).num_kernels for key in plan.keys)
    per_kernel = result["pool"]["driver_bytes"] / num_kernels
    console.print(
        f"naive / pool {ratio:.2f}x; the driver keeps {per_kernel / 1024:.1f} KiB a kernel"
    )
    return {**result, "naive_over_pool": ratio, "driver_bytes_per_kernel": per_kernel}
