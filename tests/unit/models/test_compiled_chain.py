"""Pairs and chains in one loop are those of a pass for the pairs and one for each depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model
from tests.tiny_models import tiny_config
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.models.arithmetic import compiled_arithmetic
from tlt_megatron.models.attention.lanes import LaneView, causal
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.speculation.tree import SCALE, TreeGrower
from tlt_megatron.types import SamplingParams

CPU = torch.device("cpu")
NUM_ROWS, DEPTH, LANE = 5, 4, 64
DOUBLE = torch.ones((), dtype=torch.float64)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def grow(
    draft: DraftInference, num_pairs: int, offsets_BDV: Tensor, *, is_one_loop: bool
) -> tuple[Tensor, Tensor]:
    """Return the tokens of chains after the last pairs of each row, and the KV after them."""
    dtype = draft.dtype
    roots_B = torch.tensor([3, 40, 1, 17, 55])
    cache = KvCache(tiny_config(), num_pages=NUM_ROWS, page_size=LANE, dtype=dtype, device=CPU)
    cache.kv_LKTH.copy_(normal(*cache.kv_LKTH.shape, seed=1))
    view = LaneView(cache, num_rows=NUM_ROWS, lane=LANE)

    def inputs(token_ids_P: Tensor, hidden_PD: Tensor, positions_BM: Tensor) -> Any:
        slots_P = (view.starts_B.unsqueeze(1) + positions_BM).view(-1)
        attention = draft.lanes(view, slots_P, causal(view, positions_BM, LANE), first_layer=2)
        return token_ids_P, hidden_PD, positions_BM.view(-1), attention

    # As in a step: rows that have fewer tokens compute their first pair several times.
    pairs_BM = (roots_B.unsqueeze(1) - torch.arange(num_pairs, 0, -1)).clamp_(min=0)
    of_pair_P = (pairs_BM + LANE * torch.arange(NUM_ROWS).unsqueeze(1)).view(-1)
    hidden_PD = normal(NUM_ROWS * LANE, HIDDEN_SIZE, seed=2).to(dtype)[of_pair_P]
    pairs, before = inputs(of_pair_P * 5 % VOCAB_SIZE, hidden_PD, pairs_BM), hidden_PD.clone()
    if is_one_loop:
        chains = draft.draft_chains
        assert chains is not None
        assert chains.takes(pairs[-1])
        tokens_BD = chains(*pairs, offsets_BDV, SCALE)
    else:
        state, tokens = draft.forward(*pairs), []
        last = torch.arange(num_pairs - 1, len(hidden_PD), num_pairs)
        state = state[0][last], state[1][last]
        for depth in range(DEPTH):
            scores_BV = torch.addcmul(offsets_BDV[:, depth], draft.logits(state[1]), DOUBLE * SCALE)
            tokens.append(scores_BV.argmax(-1))
            if depth + 1 < DEPTH:
                where_B1 = (roots_B + depth).unsqueeze(1)
                state = draft.forward(*inputs(tokens[-1], state[0], where_B1))
        tokens_BD = torch.stack(tokens, dim=1)
    assert torch.equal(hidden_PD, before)
    return tokens_BD, cache.kv_LKTH


@pytest.mark.parametrize("num_pairs", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_tokens_and_kv(architecture: str, dtype: torch.dtype, num_pairs: int) -> None:
    draft = DraftInference(make_draft_model(architecture, dtype=dtype))
    draft.rotary.reserve(LANE)
    grower = TreeGrower(SpeculationStrategy.parse(f"{DEPTH}_1_{DEPTH}"))
    noise_BDV = normal(NUM_ROWS, DEPTH + 1, VOCAB_SIZE, seed=4)
    offsets_BDV = grower.offsets(noise_BDV, SamplingParams(temperature=0.7), dtype)
    assert offsets_BDV.shape[1] == DEPTH
    tokens, kv = grow(draft, num_pairs, offsets_BDV, is_one_loop=True)
    expected_tokens, expected_kv = grow(draft, num_pairs, offsets_BDV, is_one_loop=False)
    assert torch.equal(tokens, expected_tokens)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(kv, expected_kv, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_ids", [0, 8])
def test_drafters_that_have_it(num_ids: int) -> None:
    """A drafter of few ids has it too; a step uses it where all of the noise is there."""
    assert DraftInference(make_draft_model("eagle"), num_ids=num_ids).draft_chains is not None
    other = make_draft_model("eagle3", norm_before_residual=True)
    assert DraftInference(other).draft_chains is None
    arithmetic = replace(compiled_arithmetic(), chains=None)
    assert DraftInference(make_draft_model("eagle"), arithmetic=arithmetic).draft_chains is None
