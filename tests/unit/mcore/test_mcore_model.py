"""Megatron's configuration of a policy, and the refusals of what it cannot express."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_config
from tlt_megatron.config.mcore_fields import read_fields
from tlt_megatron.config.schema import McoreSection, ParallelSection
from tlt_megatron.mcore.model import (
    _architecture_fields,
    has_transformer_engine,
    transformer_config,
)
from tlt_megatron.runtime.device import Device, select_device

CONFIG = tiny_config(hidden_size=32, ffn_size=48, head_dim=16)


def _transformer(
    section: McoreSection | None = None,
    parallel: ParallelSection | None = None,
    device: Device | None = None,
) -> Any:
    return transformer_config(
        CONFIG,
        parallel=parallel or ParallelSection(),
        section=section or McoreSection(),
        dtype=torch.float32,
        device=device or select_device("cpu"),
    )


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", (None, None, None)),
        ("selective", ("selective", None, None)),
        ("full", ("full", "uniform", 1)),
    ],
)
def test_recompute_maps_to_megatrons_fields(recompute: str, expected: tuple) -> None:
    made = _transformer(McoreSection(recompute=recompute))
    found = (made.recompute_granularity, made.recompute_method, made.recompute_num_layers)
    assert found == expected


def test_interleaved_stages_keep_what_they_send_until_it_is_sent() -> None:
    """Over gloo, outputs that Megatron frees are freed before they are sent."""
    fields = _transformer(parallel=ParallelSection(pipeline=2, virtual_pipeline=2))
    assert not fields.deallocate_pipeline_outputs
    assert fields.overlap_p2p_comm
    assert not fields.batch_p2p_comm  # two tensors for the same stage would be mixed up


def test_users_fields_win_over_ours() -> None:
    section = McoreSection(
        recompute="full",
        transformer={"recompute_num_layers": 2, "attention_softmax_in_fp32": False},
    )
    fields = _transformer(section)
    assert fields.recompute_num_layers == 2
    assert not fields.attention_softmax_in_fp32


def test_allowed_fields_are_fields_of_megatron() -> None:
    from megatron.core.transformer import TransformerConfig

    allowed = read_fields().allowed
    assert {field.name for field in dataclasses.fields(TransformerConfig)} >= allowed
    assert not allowed & _architecture_fields(CONFIG).keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_device_that_megatron_would_not_use_is_refused() -> None:
    device = Device(torch_device=torch.device("cuda"), backend="nccl")
    with pytest.raises(ValueError, match=r"run\.device='cuda'"):
        _transformer(device=device)
    assert not has_transformer_engine(torch.bfloat16)
