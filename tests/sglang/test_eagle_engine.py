"""EAGLE with a drafter trained here: a tree changes no token, and updates reach the model that they
are meant for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sglang.rollouts import (
    PARAMS,
    SAMPLED,
    answers,
    check_accept_lengths,
    check_same,
    load,
    load_draft,
    mean_accept_length,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)
from tlt_megatron.engines.sglang.connection import DRAFT, TARGET
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.hf_io import checksum_tensors


@pytest.fixture(scope="module")
def engine(policy_folder: Path, drafter: Path) -> Iterator[SglangEngine]:
    engine = start_sglang(policy_folder, drafter=drafter, strategies=["4_2_8"])
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def first_weights(engine: SglangEngine, policy_folder: Path, drafter: Path) -> None:
    load(engine, tensors_of(policy_folder))
    load_draft(engine, tensors_of(drafter))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_tree_changes_no_token_and_no_logprob(
    engine: SglangEngine, policy_folder: Path, params: object
) -> None:
    found = answers(engine, params)
    check_same(found, answers(start_embedded(policy_folder), params))
    for rollout in found:
        assert sum(rollout.accept_lengths) == rollout.token_ids.numel() - 1
    assert mean_accept_length(found) > 1.5


def test_a_tree_accepts_as_much_as_in_the_embedded_engine(
    engine: SglangEngine, policy_folder: Path, drafter: Path
) -> None:
    check_accept_lengths(engine, policy_folder, drafter, "4_2_8", num_tokens=1000)


def test_a_drafter_update_changes_the_drafter_alone(engine: SglangEngine, drafter: Path) -> None:
    before = answers(engine, SAMPLED)
    target, draft = engine.checksum(TARGET), engine.checksum(DRAFT)
    damaged = [(name, tensor.flip(0)) for name, tensor in tensors_of(drafter)]
    load_draft(engine, damaged, version=2)
    assert engine.checksum(TARGET) == target
    assert engine.checksum(DRAFT) == checksum_tensors(damaged) != draft
    after = answers(engine, SAMPLED)
    assert token_lists(after) == token_lists(before)
    assert mean_accept_length(after) < mean_accept_length(before) - 0.2


def test_a_policy_update_changes_the_policy_alone(
    engine: SglangEngine, policy_folder: Path
) -> None:
    draft = engine.checksum(DRAFT)
    shifted = [(n, t.roll(1, 0) if "lm_head" in n else t) for n, t in tensors_of(policy_folder)]
    load(engine, shifted, version=2)
    assert engine.checksum(DRAFT) == draft
    assert engine.checksum(TARGET) == checksum_tensors(shifted)
    embedding, head = engine.target_tensors()
    assert torch.equal(embedding, dict(shifted)["model.embed_tokens.weight"])
    assert torch.equal(head, dict(shifted)["lm_head.weight"])


def test_damaged_tensors_are_no_drafter_weights(engine: SglangEngine, drafter: Path) -> None:
    with pytest.raises(RuntimeError, match="drafter version 3 has checksum"):
        engine.load_drafter_weights(dict(tensors_of(drafter)), version=3, checksum=1)


def test_a_fixed_tree_cannot_be_turned_off(engine: SglangEngine) -> None:
    assert not engine.pause_speculation(True)
    engine.pause_speculation(False)
