"""What the target draws at the nodes of a tree, against plain sampling; and the slots of branches,
against their paths.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context

from tlt_megatron.engines.sglang.sglang_noise import (
    MARK,
    NoiseSampling,
    tree_draws,
)
from tlt_megatron.runtime.device import has_triton
from tlt_megatron.speculation.sampling import sample
from tlt_megatron.types import SamplingParams
from tools.gpu.pretend_cuda import CUDA, pretend_device

NUM_REQUESTS, NUM_NODES, VOCAB_SIZE = 5, 4, 97
PLAIN = SamplingParams()
CUT = SamplingParams(temperature=0.8, top_p=0.9, top_k=12)


@pytest.mark.parametrize("params", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("most", [1, 2 * NUM_NODES * VOCAB_SIZE, 1 << 25])
def test_draws_are_those_of_plain_sampling_however_they_are_cut(
    params: SamplingParams, most: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_PV = 2 * torch.randn(NUM_REQUESTS * NUM_NODES, VOCAB_SIZE, generator=generator)
    seeds_B = torch.arange(NUM_REQUESTS) * 7919 + 1
    lengths_B = torch.tensor([3, 9, 4, 30, 5])
    positions_BQ = lengths_B.unsqueeze(1) + torch.tensor([0, 1, 1, 2])
    found_P = tree_draws(logits_PV, seeds_B, positions_BQ, params, most=most)
    seeds_P = seeds_B.repeat_interleave(NUM_NODES)
    expected = sample(logits_PV, seeds_P, positions_BQ.flatten(), params)
    assert found_P.tolist() == expected.token_ids_B.tolist()


def test_no_requests_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.empty(0, dtype=torch.int64)
    noise = NoiseSampling()
    noise.params = CUT
    found = SimpleNamespace(next_token_logits=torch.empty(0, VOCAB_SIZE))
    assert noise.sample(found, found.next_token_logits, none, none, [1]).tolist() == []
    positions_BQ = none.view(0, NUM_NODES)
    assert tree_draws(found.next_token_logits, none, positions_BQ, CUT).tolist() == []
    serving = SimpleNamespace(served_model_name=MARK)
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    accepted_BA = none.view(0, 3)
    noise.spec_logprobs(lambda *_: None, None, found, none, accept_index=accepted_BA)
    assert found.next_token_logprobs.shape == accepted_BA.shape
    assert found.next_token_top_logprobs_val == []


def test_what_top_p_and_top_k_kept_is_read_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # compiles for no pretended GPU
    has_triton.cache_clear()
    noise, device = NoiseSampling(), pretend_device()
    noise.params = CUT
    logits_BV = 2 * torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    given = logits_BV, torch.arange(5) * 7919, torch.arange(5)
    expected, found = SimpleNamespace(), SimpleNamespace()
    tokens_B = noise.sample(expected, *given, [1] * 5)
    with device.gpu:
        on_gpu = [tensor.to(CUDA) for tensor in given]
        device.gpu.read_backs.clear()
        drawn_B = noise.sample(found, *on_gpu, top_logprobs_nums=[1] * 5)
        assert device.gpu.read_backs.total() == 1
        assert drawn_B.tolist() == tokens_B.tolist()
    has_triton.cache_clear()
    for ours, theirs in zip(
        found.next_token_top_logprobs_idx, expected.next_token_top_logprobs_idx, strict=True
    ):
        assert len(ours) > 1
        assert ours.tolist() == theirs.tolist()
