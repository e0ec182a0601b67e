"""Stage 1: captured passes of target and drafter at the width of a 7B, with two layers, against the same passes run eagerly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import GraphPlan, Role
from tlt_megatron.engines.embedded.graph_pool import GraphPool, PassInputs, lane_steps
from tlt_megatron.models.attention.lanes import LaneView, drafted_bias
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tools.gpu.machine import Figures, Machine, relative_error, seconds_of
from tools.gpu.shapes import QWEN_2_5_7B, TINY

_STRATEGIES = ("6_1_6", "6_4_16")
_TOLERANCE = 5e-2  # a padded batch may take another product kernel, which rounds otherwise; a wrong pass is off by 1
# Batch, query tokens of a row; 3 rows are padded to 4, and a tree of 10 nodes to 17 rows.
_SHAPES = {Role.TARGET: ((1, 1), (8, 1), (3, 1), (1, 7), (8, 10)), Role.DRAFT: ((1, 1), (8, 4), (3, 7))}  # fmt: skip


def graph_pool(machine: Machine) -> Iterator[Figures]:
    """Yield the errors of replays, the keys and values that they write included, and seconds of passes and of captures."""
    shape, lane = machine.pick(QWEN_2_5_7B, TINY), machine.pick(2048, 64)
    config, num_lanes = dataclasses.replace(shape, num_layers=2), 8
    with machine.gpu() as device, torch.no_grad():
        gpu, dtype = device.torch_device, torch.bfloat16
        model = Transformer(config, dtype, gpu)
        for name, tensor in model.named_hf_tensors():
            tensor.normal_(std=0.02).add_(name.endswith("norm.weight"))
        embedding, head = model.embedding, model.lm_head
        draft_config = make_draft_config(config, "eagle", embedding)
        drafter = DraftModel(draft_config, embedding_VD=embedding, lm_head_VD=head, dtype=dtype)
        draft = DraftInference(drafter, dtype)
        cache = KvCache(
            config,
            num_pages=num_lanes,
            page_size=lane,
            dtype=dtype,
            device=gpu,
            num_draft_layers=1,
            has_scratch=True,
        )
        cache.kv_LKTH.normal_()
        cache.bias_T.view(-1, lane)[:, : lane // 2] = 0.0
        for rotary in (model.rotary, draft.rotary):
            rotary.reserve(lane)
        plan = GraphPlan(
            config,
            [SpeculationStrategy.parse(text) for text in _STRATEGIES],
            max_batch_size=num_lanes,
            max_length=lane,
            item_bytes=dtype.itemsize,
        )
        pool, steps = GraphPool(plan, device.graph_memory), lane_steps(model, cache, lane, draft)
        pool.bind(model, cache, lane, draft)
        worst = 0.0
        for role, sizes in _SHAPES.items():
            for batch_size, num_rows in sizes:
                inputs = _inputs(cache, role, batch_size, num_rows, lane, config.hidden_size)
                expected = [out.clone() for out in steps[role](inputs)]
                written = cache.kv_LKTH[:, :, : cache.scratch_slot].clone()
                found = pool.run(role, inputs)
                errors = [relative_error(x, y) for x, y in zip(found, expected, strict=True)]
                errors.append(relative_error(cache.kv_LKTH[:, :, : cache.scratch_slot], written))
                worst = max(worst, *(math.inf if math.isnan(e) else e for e in errors))
                figures = {
                    "eager_us": 1e6 * seconds_of(device, lambda: steps[role](inputs)),  # noqa: B023  # called here
                    "graph_us": 1e6 * seconds_of(device, lambda: pool.run(role, inputs)),  # noqa: B023
                    "errors": errors,
                }
                yield {"worst_error": worst, f"{role}_b{batch_size}_r{num_rows}": figures}
        yield {"captures": pool.num_captures, "capture_s": pool.capture_s}
        if pool.eager_passes:
            raise RuntimeError(f"passes without a graph: {dict(pool.eager_passes)}")
        if not worst <= _TOLERANCE:
            raise RuntimeError(f"relative error {worst:.2g}: must be <= {_TOLERANCE}")


def _inputs(
    cache: KvCache, role: Role, batch_size: int, num_rows: int, lane: int, hidden_size: int
) -> PassInputs:
    """Return queries behind the committed half of each lane, each of which sees those before it."""
    gpu, dtype, size = cache.device, cache.bias_T.dtype, batch_size * num_rows
    view = LaneView(cache, num_rows=batch_size, lane=lane)
    base_B = torch.full((batch_size,), lane // 2, device=gpu)
    positions_BR = base_B.unsqueeze(1) + torch.arange(num_rows, device=gpu)
    visible_RR = torch.ones(num_rows, num_rows, dtype=torch.bool, device=gpu).tril()
    length = view.read_length(lane // 2 + num_rows)
    hidden_PD = torch.empty(size, hidden_size, dtype=dtype, device=gpu).normal_()
    return PassInputs(
        token_ids_P=torch.arange(size, device=gpu),
        positions_P=positions_BR.view(-1),
        slots_P=view.slots(positions_BR),
        bias_BRS=drafted_bias(view, base_B, visible_RR.expand(batch_size, -1, -1), length),
        hidden_PD=hidden_PD if role is Role.DRAFT else None,
    )
