"""A mixture of experts in SGLang, drafted for by a dense EAGLE drafter: its tokens and log-probs
are those of plain decoding by the embedded engine, and an update reaches every expert."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sglang.rollouts import (
    PARAMS,
    SAMPLED,
    answers,
    check_same,
    load,
    mean_accept_length,
    start_embedded,
    start_sglang,
    tensors_of,
    train_drafter,
)
from tests.tiny_models import make_tiny_hf
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config

# SGLang pads experts to multiples of 32 on a CPU.
SIZES = {"vocab_size": 48, "moe_intermediate_size": 64, "intermediate_size": 192}


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("mixture"), request.param, **SIZES)


@pytest.fixture(scope="module")
def engine(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """With the weights of the folder, whose checksum SGLang has compared."""
    drafter = train_drafter(mixture, tmp_path_factory.mktemp("drafter"))
    engine = start_sglang(mixture, drafter=drafter, strategies=["4_1_4"], routing_replay=True)
    engine.wake()
    load(engine, tensors_of(mixture))
    yield engine
    engine.close()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_logprobs_and_routes_are_those_of_the_embedded_engine(
    engine: SglangEngine, mixture: Path, params
) -> None:
    found, expected = (
        answers(each, params) for each in (engine, start_embedded(mixture, routing_replay=True))
    )
    check_same(found, expected)
    assert mean_accept_length(found) > 1.1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.routes is not None
        assert theirs.routes is not None
        assert torch.equal(mine.routes.sort().values, theirs.routes.sort().values)


def test_new_weights_reach_every_expert(
    engine: SglangEngine, mixture: Path, tmp_path: Path
) -> None:
    other = make_tiny_hf(tmp_path, load_model_config(mixture).model_type, seed=1, **SIZES)
    load(engine, tensors_of(other), version=2)
    check_same(answers(engine, SAMPLED, 2), answers(start_embedded(other), SAMPLED))
    load(engine, tensors_of(mixture), version=1)
