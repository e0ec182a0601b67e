"""A policy that leaves its device between updates trains as one that stays. When it is away in a
run: test_phase_protocol.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mcore_policy import LENGTHS, Layout, build_policy, check_same_bits, train
from tests.ranks import run_ranks
from tlt_megatron.mcore.policy_model import McorePolicyModel


def gradient_bytes(policy: McorePolicyModel) -> int:
    """What the gradient buffers hold now."""
    buffers = (buffer for chunk in policy._model for buffer in vars(chunk)["buffers"])
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def _away_and_back(policy: McorePolicyModel) -> None:
    policy.leave_device()
    policy.leave_device()  # a stop request may come between two steps
    assert gradient_bytes(policy) == 0
    policy.enter_device()
    assert gradient_bytes(policy) > 0


def _train(path: Path, layout: Layout, shares: tuple[int, ...], is_away: bool) -> dict[str, Any]:
    policy, groups = build_policy(path, layout, dtype="bfloat16", offload_in_rollouts=is_away)
    options = {"between": _away_and_back} if is_away else {}
    return train(policy, groups, (1, 2, 3), shares, **options)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(world=1), (len(LENGTHS),)),
        (Layout(world=2), (2, 3)),
        (Layout(world=2, tensor=2), (len(LENGTHS),)),
        (Layout(world=2, pipeline=2), (len(LENGTHS),)),
    ],
    ids=["one rank", "DP2", "TP2", "PP2"],
)
def test_updates_are_bit_for_bit_those_of_a_policy_that_stays(
    model_path: Path, layout: Layout, shares: tuple[int, ...]
) -> None:
    stayed = run_ranks(layout.world, _train, model_path, layout, shares, False)
    left = run_ranks(layout.world, _train, model_path, layout, shares, True)
    for there, here in zip(stayed, left, strict=True):
        assert here["stats"] == there["stats"]
        check_same_bits(here["weights"], there["weights"])
