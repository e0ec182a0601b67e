"""Tapped hidden states equal a plain forward, and tapping leaves nothing behind.

tests/distributed/test_mcore_training.py compares them between layouts.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import Layout, build_policy, load_hf, make_batch, tap_states
from tests.ranks import run_ranks
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.types import DraftSequence

AUX_LAYERS = (0, 2)
Expected = dict[tuple[int, ...], tuple[int, list[Tensor]]]


@pytest.fixture(scope="module")
def expected(model_path: Path) -> Expected:
    """By tokens: the prompt's length, and transformers' states after each layer, the last one
    normed.
    """
    model = load_hf(model_path)
    found = {}
    for batch in make_batch(1):
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            token_ids = batch.token_ids[start:end]
            with torch.no_grad():
                states = model(token_ids[None], output_hidden_states=True).hidden_states[1:]
            prompt_length = max(1, (end - start) // 3)  # see tests/mcore_policy.py
            found[tuple(token_ids.tolist())] = (prompt_length, [s[0, :-1] for s in states])
    return found


def _num_hooks(policy: McorePolicyModel) -> int:
    modules = (module for chunk in policy._stage for module in chunk.modules())
    return sum(len(module._forward_hooks) for module in modules)


@pytest.mark.parametrize("layers", [(), AUX_LAYERS], ids=["final", "aux"])
def test_states_equal_a_plain_forward(
    model_path: Path, expected: Expected, layers: tuple[int, ...]
) -> None:
    def on_rank() -> list[DraftSequence]:
        policy, _ = build_policy(model_path, Layout(world=1))
        num_hooks = _num_hooks(policy)
        tapped, _ = tap_states(policy, make_batch(1), layers)
        assert not any(sequence.features.requires_grad for sequence in tapped)
        assert _num_hooks(policy) == num_hooks
        return tapped

    (tapped,) = run_ranks(1, on_rank)
    learnable = {tokens for tokens in expected if len(tokens) >= 3}
    assert len(tapped) == len(learnable)
    assert {tuple(sequence.token_ids.tolist()) for sequence in tapped} == learnable
    for sequence in tapped:
        prompt_length, states = expected[tuple(sequence.token_ids.tolist())]
        assert sequence.loss_start == prompt_length
        features = torch.cat([states[layer] for layer in layers or (-1,)], dim=1)
        final = states[-1] if layers else None
        torch.testing.assert_close(sequence.features, features, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sequence.final_hidden, final, atol=1e-4, rtol=1e-4)


def test_bfloat16_policy_is_tapped_under_sequence_parallelism(
    model_path: Path, expected: Expected
) -> None:
    def on_rank() -> list[DraftSequence]:
        layout = Layout(world=2, tensor=2)
        policy, _ = build_policy(model_path, layout, dtype="bfloat16")
        return tap_states(policy, make_batch(1))[0]

    for sequence in itertools.chain(*run_ranks(2, on_rank)):
        final = expected[tuple(sequence.token_ids.tolist())][1][-1]
        assert sequence.features.dtype == torch.float32
        assert (sequence.features - final).norm() < 0.1 * final.norm()


def test_a_tap_that_cannot_be_is_refused(model_path: Path) -> None:
    def on_rank() -> None:
        policy, _ = build_policy(model_path, Layout(world=2, pipeline=2))
        with pytest.raises(ValueError, match=r"layers \[4\] are not in 0..3"):
            tap_states(policy, make_batch(1), (0, 1, 4))
        assert tap_states(policy, [])[0] == []

    run_ranks(2, on_rank)
