"""EAGLE with a drafter trained here: a tree changes no token, and updates reach the model that they are meant for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.continuation import check_continued
from tests.sglang.rollouts import (
    CUT,
    GREEDY,
    SAMPLED,
    VERSION,
    answers,
    check_accept_lengths,
    checksum,
    kept_sets,
    make_prompts,
    mean_accept_length,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)
from tlt_megatron.engines.sglang.connection import DRAFT, TARGET
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.types import Prompt, RolloutGroup, SamplingParams


@pytest.fixture(scope="module")
def engine(policy_folder: Path, drafter: Path) -> Iterator[SglangEngine]:
    engine = start_sglang(policy_folder, drafter=drafter, strategies=["4_2_8"])
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def first_weights(engine: SglangEngine, policy_folder: Path, drafter: Path) -> None:
    policy, own = tensors_of(policy_folder), tensors_of(drafter)
    engine.load_weights(policy, version=VERSION, checksum=lambda: checksum(policy))
    engine.load_drafter_weights(dict(own), version=1, checksum=checksum(own))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
def test_a_tree_changes_no_token_and_no_logprob(
    engine: SglangEngine, policy_folder: Path, params: object
) -> None:
    expected = answers(start_embedded(policy_folder), params)
    found = answers(engine, params)
    assert token_lists(found) == token_lists(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.policy_logprobs, theirs.policy_logprobs, rtol=0, atol=1e-4)
        assert kept_sets(ours) == kept_sets(theirs)
        assert sum(ours.accept_lengths) == ours.token_ids.numel() - 1
    assert mean_accept_length(found) > 1.5


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
def test_cut_and_continued_responses_are_those_of_one_go(
    engine: SglangEngine, params: SamplingParams
) -> None:
    def generate(prompts: Sequence[Prompt], params: SamplingParams) -> list[RolloutGroup]:
        return engine.generate(prompts, params, policy_version=VERSION)

    check_continued(generate, make_prompts(), params, cut=6, atol=1e-4)


def test_a_tree_accepts_as_much_as_in_the_embedded_engine(
    engine: SglangEngine, policy_folder: Path, drafter: Path
) -> None:
    check_accept_lengths(engine, policy_folder, drafter, "4_2_8", num_tokens=1000)


def test_a_drafter_update_changes_the_drafter_alone(engine: SglangEngine, drafter: Path) -> None:
    before = answers(engine, SAMPLED)
    target, draft = engine.checksum(TARGET), engine.checksum(DRAFT)
    damaged = {name: tensor.flip(0) for name, tensor in tensors_of(drafter)}
    engine.load_drafter_weights(damaged, version=2, checksum=checksum(damaged.items()))
    assert engine.checksum(TARGET) == target
    assert engine.checksum(DRAFT) == checksum(damaged.items()) != draft
    after = answers(engine, SAMPLED)
    assert token_lists(after) == token_lists(before)
    assert mean_accept_length(after) < mean_accept_length(before) - 0.2
    assert engine.drafter_version == 2


def test_a_policy_update_changes_the_policy_alone(
    engine: SglangEngine, policy_folder: Path
) -> None:
    draft = engine.checksum(DRAFT)
    shifted = [(n, t.roll(1, 0) if "lm_head" in n else t) for n, t in tensors_of(policy_folder)]
    engine.load_weights(shifted, version=2, checksum=lambda: checksum(shifted))
    assert engine.checksum(DRAFT) == draft
    assert engine.checksum(TARGET) == checksum(shifted)
    embedding, head = engine.target_tensors()
    assert torch.equal(embedding, dict(shifted)["model.embed_tokens.weight"])
    assert torch.equal(head, dict(shifted)["lm_head.weight"])


def test_borrowed_tensors_and_damaged_ones_are_no_drafter_weights(
    engine: SglangEngine, policy_folder: Path, drafter: Path
) -> None:
    with pytest.raises(ValueError, match="embedding and head are the policy"):
        engine.load_drafter_weights(dict(tensors_of(policy_folder)), version=3, checksum=0)
    with pytest.raises(RuntimeError, match="drafter version 3 has checksum"):
        engine.load_drafter_weights(dict(tensors_of(drafter)), version=3, checksum=1)


def test_a_fixed_tree_cannot_be_turned_off(engine: SglangEngine) -> None:
    assert not engine.pause_speculation(True)
    engine.pause_speculation(False)
