"""A rank without an engine of its own takes part in everything and does nothing."""

from __future__ import annotations

import pytest
import torch

from tlt_megatron.engines.sglang.follower import FollowerEngine
from tlt_megatron.runtime.device import select_device
from tlt_megatron.types import Prompt, SamplingParams

EMBEDDING = ("model.embed_tokens.weight", torch.arange(6.0).view(3, 2))
HEAD = ("lm_head.weight", torch.ones(3, 2))
NORM = ("model.norm.weight", torch.ones(2))


def follow(*, has_drafter: bool) -> FollowerEngine:
    return FollowerEngine(select_device("cpu"), torch.float64, has_drafter=has_drafter)


def test_the_export_of_weights_is_run_to_its_end() -> None:
    seen = []

    def export():
        for name, tensor in (EMBEDDING, NORM, HEAD):
            seen.append(name)
            yield name, tensor

    follow(has_drafter=False).load_weights(export(), version=1, checksum=lambda: 0)
    assert len(seen) == 3


def test_borrowed_tensors_stay_and_follow_the_policy() -> None:
    engine = follow(has_drafter=True)
    engine.load_weights([EMBEDDING, NORM, HEAD], version=1, checksum=lambda: 0)
    embedding, head = engine.target_tensors()
    assert embedding.dtype == torch.float64
    moved = [(name, tensor + 1) for name, tensor in (EMBEDDING, HEAD)]
    engine.load_weights(moved, version=2, checksum=lambda: 0)
    assert torch.equal(embedding, moved[0][1].double())
    assert torch.equal(head, moved[1][1].double())


def test_a_tied_head_is_the_embedding() -> None:
    engine = follow(has_drafter=True)
    engine.load_weights([EMBEDDING, NORM], version=1, checksum=lambda: 0)
    embedding, head = engine.target_tensors()
    assert head is embedding


def test_it_answers_no_prompt() -> None:
    engine = follow(has_drafter=False)
    assert engine.generate([], SamplingParams(), policy_version=1) == []
    prompt = Prompt(prompt_id="p", draw_index=0, token_ids=(1,))
    with pytest.raises(ValueError, match="1 prompts for a rank without an engine"):
        engine.generate([prompt], SamplingParams(), policy_version=1)
    assert not engine.pause_speculation(True)
    with pytest.raises(RuntimeError, match="needs a learned drafter"):
        engine.target_tensors()
