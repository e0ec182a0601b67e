"""What the target draws at the nodes of a tree, against plain sampling; and the slots of branches, against their paths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context

from tlt_megatron.engines.sglang.draft_ranking import _AncestorSlots
from tlt_megatron.engines.sglang.sglang_noise import (
    MARK,
    SamplingSettings,
    _sample_rows,
    row_chunks,
    spec_logprobs,
    tree_draws,
)
from tlt_megatron.speculation.sampling import sample

NUM_REQUESTS, NUM_NODES, VOCAB_SIZE = 5, 4, 97
PLAIN = SamplingSettings(1.0, 1.0, 0)
CUT = SamplingSettings(0.8, 0.9, 12)


@pytest.mark.parametrize("settings", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("most", [1, 2 * NUM_NODES * VOCAB_SIZE, 1 << 25])
def test_draws_are_those_of_plain_sampling_however_they_are_cut(
    settings: SamplingSettings, most: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_PV = 2 * torch.randn(NUM_REQUESTS * NUM_NODES, VOCAB_SIZE, generator=generator)
    seeds_B = torch.arange(NUM_REQUESTS) * 7919 + 1
    lengths_B = torch.tensor([3, 9, 4, 30, 5])
    positions_BQ = lengths_B.unsqueeze(1) + torch.tensor([0, 1, 1, 2])
    found_P = tree_draws(logits_PV, seeds_B, positions_BQ, settings, most=most)
    seeds_P = seeds_B.repeat_interleave(NUM_NODES)
    expected = sample(logits_PV, seeds_P, positions_BQ.flatten(), *settings)
    assert found_P.tolist() == expected.token_ids_B.tolist()


def test_chunks_hold_every_row_once_and_no_more_elements_than_allowed() -> None:
    assert [list(range(10))[rows] for rows in row_chunks(10, 100, 350)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    assert len(list(row_chunks(3, 1000, 10))) == 3
    assert [list(range(10))[rows] for rows in row_chunks(0, 5)] == [[]]


def test_no_requests_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.empty(0, dtype=torch.int64)
    logits_PV = torch.empty(0, VOCAB_SIZE)
    assert _sample_rows(logits_PV, none, none, CUT).token_ids_B.tolist() == []
    positions_BQ = none.view(0, NUM_NODES)
    assert tree_draws(logits_PV, none, positions_BQ, CUT).tolist() == []
    serving = SimpleNamespace(served_model_name=MARK)
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    info = SimpleNamespace(noise_settings=CUT)
    batch = SimpleNamespace(sampling_info=info, top_logprobs_nums=[1])
    found = SimpleNamespace(next_token_logits=logits_PV)
    accepted_BA = none.view(0, 3)
    spec_logprobs(lambda *_: None, batch, found, none, accept_index=accepted_BA)
    assert found.next_token_logprobs.shape == accepted_BA.shape
    assert found.next_token_top_logprobs_val == []


def test_a_branch_reads_the_keys_and_values_of_its_own_ancestors() -> None:
    # 2 requests of 3 branches; slot s holds s until a node is written there, then the node's name.
    memory = torch.arange(40.0).view(40, 1, 1)
    keys, values = memory, memory.clone()
    pool = SimpleNamespace(k_buffer=[keys], v_buffer=[values], use_hnd=False)
    slots_SP = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:18].view(3, 6)
    parents = [None, [[1, 0, 0], [2, 2, 1]], [[2, 1, 0], [0, 0, 0]]]
    paths = [[] for _ in range(6)]
    branches = _AncestorSlots()
    for step, parents_BK in enumerate(parents):
        if parents_BK is not None:
            branches.continue_from(torch.tensor(parents_BK))
            rows = [3 * r + parent for r, row in enumerate(parents_BK) for parent in row]
            paths = [list(paths[row]) for row in rows]
        branches.write(pool, slots_SP[step])
        for row, path in enumerate(paths):
            path.append(float(1000 * step + row))
        for buffer in (keys, values):
            buffer[slots_SP[step]] = torch.tensor([path[-1] for path in paths]).view(6, 1, 1)
            for row, path in enumerate(paths):
                assert buffer[slots_SP[: step + 1, row]].flatten().tolist() == path
