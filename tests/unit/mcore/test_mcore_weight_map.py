"""The weight table: splitting and merging are inverse, and the layouts are the ones that Megatron
computes with.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny_models import tiny_config
from tlt_megatron.mcore.weight_map import (
    EMBEDDING_ROW,
    FINAL_NORM_ROW,
    hf_shapes,
    layer_rows,
    lm_head_row,
    merge,
    shard_shape,
    split,
)

CONFIG = tiny_config(num_heads=8, num_kv_heads=4, head_dim=3, has_qkv_bias=True)
ROWS = [EMBEDDING_ROW, *layer_rows(CONFIG, 1, 1), FINAL_NORM_ROW, lm_head_row(CONFIG)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mcore_names[0])
def test_merging_the_split_gives_the_same_bits(row: object, tp_size: int) -> None:
    tensors = [
        torch.arange(math.prod(shape)).reshape(shape) + 1000 * number
        for number, shape in enumerate(hf_shapes(row, CONFIG))
    ]
    shards = [split(row, tensors, CONFIG, rank, tp_size) for rank in range(tp_size)]
    assert {tuple(shard.shape) for shard in shards} == {shard_shape(row, CONFIG, tp_size)}
    merged = merge(row, shards, CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(tensors, merged, strict=True))
    assert all(tensor.is_contiguous() for tensor in merged)
