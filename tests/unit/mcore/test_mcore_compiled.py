"""Megatron compiles its fused functions on a GPU: how often, over packed lengths that change."""

from __future__ import annotations

import random

import torch
from torch._dynamo.testing import CompileCounter

from tlt_megatron.mcore import cpu


def test_a_fused_function_is_compiled_twice_over_many_packed_lengths() -> None:
    """Once for the first length, once for any length: not once for each step."""
    cpu.install()
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    draw = random.Random(0)
    lengths = [draw.randrange(1_000, 8_000) for _ in range(20)]
    gate, add = CompileCounter(), CompileCounter()
    compiled_gate = torch.compile(swiglu, backend=gate)
    compiled_add = torch.compile(bias_dropout_add_fused_train, backend=add)
    for length in lengths:
        compiled_gate(torch.zeros(length, 1, 8))
        compiled_add((torch.zeros(length, 1, 8), None), torch.zeros(length, 1, 8), 0.0)
    assert (gate.frame_count, add.frame_count) == (2, 2)
