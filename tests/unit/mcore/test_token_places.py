"""Where context- and tensor-parallel ranks have the tokens of a micro-batch, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tlt_megatron.mcore.token_places import place_tokens
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups


@pytest.mark.parametrize(
    ("tp", "cp", "bounds", "parts"),
    [
        (1, 1, [0, 7, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, 1, [0, 7, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]),
        # 7 tokens in chunks of 2, 2 tokens in chunks of 1: rank 0 has the first and the last chunks
        (1, 2, [0, 8, 12], [1, 2, 7, 0, 8, 0, 3, 4, 5, 6, 9, 0]),
        (2, 2, [0, 8, 12, 16], [1, 2, 7, 0, 8, 0, 0, 0, 3, 4, 5, 6, 9, 0, 0, 0]),
        (1, 3, [0, 12, 18], [1, 2, 0, 0, 8, 0, 3, 4, 0, 0, 9, 0, 5, 6, 7, 0, 0, 0]),
    ],
)
def test_every_rank_has_an_early_and_a_late_chunk_of_every_sequence(
    tp: int, cp: int, bounds: list[int], parts: list[int]
) -> None:
    groups = ProcessGroups(
        world=SINGLE,
        tp=dataclasses.replace(SINGLE, global_ranks=tuple(range(tp))),
        cp=dataclasses.replace(SINGLE, global_ranks=tuple(range(cp))),
    )
    places = place_tokens(torch.tensor([0, 7, 9], dtype=torch.int32), groups)
    assert places.bounds.tolist() == bounds
    assert places.fill(torch.arange(1, 10)).tolist() == parts
