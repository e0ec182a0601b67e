"""Chains drafted in one loop are those of a pass for each depth."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model
from tests.tiny_models import tiny_config
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.models.arithmetic import compiled_arithmetic
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.lanes import LaneView, causal
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.speculation.tree import TreeGrower
from tlt_megatron.types import SamplingParams

CPU = torch.device("cpu")
NUM_ROWS, DEPTH, LANE = 5, 4, 64


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def grow(draft: DraftInference, *, is_one_loop: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens of chains from some states, and the KV after them."""
    dtype = draft.dtype
    positions_B = torch.tensor([3, 40, 0, 17, 55])
    cache = KvCache(tiny_config(), num_pages=NUM_ROWS, page_size=LANE, dtype=dtype, device=CPU)
    cache.kv_LKTH.copy_(normal(*cache.kv_LKTH.shape, seed=1))
    view = LaneView(cache, num_rows=NUM_ROWS, lane=LANE)
    hidden_BD = normal(NUM_ROWS, HIDDEN_SIZE, seed=2).to(dtype)
    logits_BV = normal(NUM_ROWS, VOCAB_SIZE, seed=3).to(dtype)
    before = hidden_BD.clone(), logits_BV.clone()
    state, depth = hidden_BD, -1

    def attention_at(depth: int) -> Attention:
        at_B = positions_B + depth
        visible = causal(view, at_B.unsqueeze(1), LANE)
        return draft.lanes(view, view.starts_B + at_B, visible, first_layer=2)

    def expand(token_ids_BK: Tensor, _: Tensor) -> Tensor:
        nonlocal state, depth
        depth += 1
        where = positions_B + depth, attention_at(depth)
        state, head = draft.forward(token_ids_BK.view(-1), state, *where)
        return draft.logits(head).unsqueeze(1)

    chains = draft.draft_chains
    assert chains is not None
    tree = TreeGrower(SpeculationStrategy.parse(f"{DEPTH}_1_{DEPTH}")).grow(
        logits_BV,
        expand,
        SamplingParams(num_samples=1, max_new_tokens=9),
        noise_keys=(torch.zeros(1), torch.zeros(1)),
        noise_BDV=normal(NUM_ROWS, DEPTH + 1, VOCAB_SIZE, seed=4),
        draft_chains=partial(chains, hidden_BD, positions_B, attention_at(0))
        if is_one_loop
        else None,
    )
    assert (depth == -1) == is_one_loop
    assert tree.is_chain
    assert torch.equal(hidden_BD, before[0])
    assert torch.equal(logits_BV, before[1])
    return tree.token_ids_BQ, cache.kv_LKTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_tokens_and_kv(architecture: str, dtype: torch.dtype) -> None:
    draft = DraftInference(make_draft_model(architecture, dtype=dtype))
    draft.rotary.reserve(LANE)
    tokens, kv = grow(draft, is_one_loop=True)
    expected_tokens, expected_kv = grow(draft, is_one_loop=False)
    assert torch.equal(tokens, expected_tokens)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(kv, expected_kv, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_ids", [0, 8])
def test_drafters_that_have_it(num_ids: int) -> None:
    """A drafter of few ids has it too; `grow` uses it where all of the noise is there."""
    assert DraftInference(make_draft_model("eagle"), num_ids=num_ids).draft_chains is not None
    other = make_draft_model("eagle3", norm_before_residual=True)
    assert DraftInference(other).draft_chains is None
    arithmetic = replace(compiled_arithmetic(), chains=None)
    assert DraftInference(make_draft_model("eagle"), arithmetic=arithmetic).draft_chains is None
