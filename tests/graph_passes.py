"""Passes over rows in lanes of a small random target and drafter: what the graph pool's tests run, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model, make_target_config
from tlt_megatron.engines.embedded.graph_plan import Role
from tlt_megatron.engines.embedded.graph_pool import PassInputs, Step, lane_steps
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.models.tree_attention import LaneView, drafted_bias

LANE, PAGE, PROMPT = 64, 16, 20  # slots of a lane and of a page, committed positions of every row


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePasses:
    """A target, its drafter behind it in the same KV pool, and inputs for both."""

    model: Transformer
    cache: KvCache
    steps: Mapping[Role, Step]
    scratch_slot: int  # on the page behind all lanes

    def inputs(self, role: Role, *, batch_size: int, num_rows: int, seed: int = 0) -> PassInputs:
        """Random queries behind the committed positions, each of which sees those before it."""
        device, dtype = self.cache.device, self.cache.bias_T.dtype
        generator = torch.Generator().manual_seed(seed)
        view = LaneView(self.cache, num_rows=batch_size, lane=LANE)
        base_B = torch.full((batch_size,), PROMPT, device=device)
        positions_BR = base_B.unsqueeze(1) + torch.arange(num_rows, device=device)
        visible_RR = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
        length = view.read_length(PROMPT + num_rows)
        shape = batch_size, num_rows
        hidden_BRD = torch.randn(*shape, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
        return PassInputs(
            token_ids_BR=torch.randint(VOCAB_SIZE, shape, generator=generator).to(device),
            positions_BR=positions_BR,
            slots_BR=view.slots(positions_BR).view(shape),
            bias_BRS=drafted_bias(view, base_B, visible_RR.expand(batch_size, -1, -1), length),
            hidden_BRD=hidden_BRD.to(device, dtype) if role is Role.DRAFT else None,
        )


def make_lane_passes(device: torch.device, dtype: torch.dtype, *, num_lanes: int) -> LanePasses:
    """The same weights and committed keys for the same sizes, on any device."""
    generator = torch.Generator().manual_seed(3)
    config = make_target_config()
    model = Transformer(config, dtype, device)
    for name in sorted(model.hf_names()):
        shape = dict(model.named_hf_tensors())[name].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        model.load_hf(name, noise * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    drafter = make_draft_model("eagle", dtype=dtype)
    drafter.embedding_VD, drafter.lm_head_VD = model.embedding, model.lm_head
    draft = DraftInference(drafter.to(device), dtype)
    num_pages = num_lanes * LANE // PAGE + 1
    cache = KvCache(
        config, num_pages=num_pages, page_size=PAGE, dtype=dtype, device=device, num_draft_layers=1
    )
    keys = torch.randn(cache.kv_LKTH.shape, generator=generator, dtype=torch.float64)
    cache.kv_LKTH.copy_(keys)
    for row in range(num_lanes):
        cache.mark_written(torch.arange(PROMPT, device=device) + row * LANE)
    for rotary in (model.rotary, draft.rotary):
        rotary.reserve(LANE)
    return LanePasses(
        model=model,
        cache=cache,
        steps=lane_steps(model, cache, LANE, draft),
        scratch_slot=num_lanes * LANE,
    )
