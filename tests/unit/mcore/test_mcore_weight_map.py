"""The weight table: splitting and merging are inverse, and the layouts are the ones that Megatron computes with."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.tiny_models import tiny_config
from tlt_megatron.mcore.weight_map import (
    EMBEDDING_ROW,
    FINAL_NORM_ROW,
    Layout,
    find_parameter,
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


def test_qkv_is_interleaved_by_kv_head() -> None:
    row = next(row for row in ROWS if row.mcore_names[0].endswith("linear_qkv.bias"))
    query = torch.arange(24)  # head n holds 3n..3n+2
    key = 100 + torch.arange(12)
    value = 200 + torch.arange(12)
    shard = split(row, [query, key, value], CONFIG, 1, 2)  # kv heads 2 and 3
    expected = [*range(12, 18), 106, 107, 108, 206, 207, 208]
    expected += [*range(18, 24), 109, 110, 111, 209, 210, 211]
    assert shard.tolist() == expected


def test_a_rank_holds_its_gate_rows_then_its_up_rows() -> None:
    row = next(row for row in ROWS if row.layout is Layout.GATE_UP)
    gate = torch.arange(12).unsqueeze(1).expand(12, 8)
    shard = split(row, [gate, gate + 100], CONFIG, 1, 2)
    assert shard[:, 0].tolist() == [*range(6, 12), *range(106, 112)]


def test_rows_follow_the_switches_of_the_model() -> None:
    plain = dataclasses.replace(CONFIG, has_qkv_bias=False, has_qk_norm=False)
    names = {name for row in layer_rows(plain, 0, 0) for name in row.hf_names}
    assert not [name for name in names if "bias" in name or "q_norm" in name]
    assert len(layer_rows(CONFIG, 0, 0)) == len(layer_rows(plain, 0, 0)) + 3


def test_tied_output_layer_is_made_of_the_embedding() -> None:
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    assert lm_head_row(tied).hf_names == EMBEDDING_ROW.hf_names
    assert lm_head_row(CONFIG).hf_names == ("lm_head.weight",)


def test_norms_are_found_under_local_and_fused_names() -> None:
    row = layer_rows(CONFIG, 1, 1)[0]
    weight = torch.ones(8)
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        assert find_parameter(row, {f"decoder.layers.1.{name}": weight}) is weight
