"""Bytes of passes of Qwen2.5-7B, added up by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tools.gpu.shapes import QWEN_2_5_7B
from tools.planner.roofline import GPUS, Decoding

H100 = GPUS["H100"]
DECODING = Decoding(model=QWEN_2_5_7B, num_gpus=1, batch=1, context=2048)
# q and o, k and v, the ffn's three matrices, two norms, the biases of q, k and v
LAYER = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944 + 2 * 3584 + 3584 + 2 * 512
HEAD_AND_NORM = 152064 * 3584 + 3584
KV_PER_LAYER = 2048 * 2 * 4 * 128  # positions, keys and values, 4 heads of 128
TARGET_BYTES = 2 * (28 * LAYER + HEAD_AND_NORM + 28 * KV_PER_LAYER)
DRAFT_BYTES = 2 * (LAYER + 3 * 3584 * 3584 + HEAD_AND_NORM + KV_PER_LAYER)


def test_a_pass_at_batch_1_takes_its_bytes_over_the_bandwidth() -> None:
    assert TARGET_BYTES == 14_258_678_784
    assert DECODING.pass_s(H100, 1) == pytest.approx(TARGET_BYTES / 3.35e12)  # 235 tokens/s
    assert DECODING.pass_s(H100, 1, is_draft=True) == pytest.approx(DRAFT_BYTES / 3.35e12)


def test_a_wide_pass_takes_its_operations_over_the_peak() -> None:
    wide = dataclasses.replace(DECODING, batch=64)
    operations = 2 * 64 * 16 * (28 * LAYER + HEAD_AND_NORM) + 4 * 64 * 2048 * 16 * 28 * 3584
    assert wide.pass_s(H100, 16) == pytest.approx(operations / 989e12)
