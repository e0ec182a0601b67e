"""A policy that leaves its device between updates trains as one that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.pretrain_rl import main
from tests.mcore_policy import LENGTHS, Layout, build_policy, check_same_bits, train
from tests.ranks import run_ranks
from tests.tiny_task import make_tiny_task
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.trainer import build, loop


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


def _run(config: Path, run_dir: Path, *arguments: str) -> list[int]:
    """The program on this rank; the bytes of its gradient buffers whenever an engine receives
    weights.
    """
    held: list[int] = []

    def noting(policy: McorePolicyModel, *args: Any, **kwargs: Any) -> dict[str, float]:
        held.append(gradient_bytes(policy))
        return push(policy, *args, **kwargs)

    push = build.push_policy
    build.push_policy = loop.push_policy = noting
    settings = ("model.dtype=bfloat16", "data.eval=", "mcore.offload_in_rollouts=true", *arguments)
    assert main(["--config", str(config), f"run.dir={run_dir}", *settings]) == 0
    return held


def test_the_policy_of_a_run_is_away_whenever_its_engine_receives_weights(tmp_path: Path) -> None:
    """Before the first step, after each step, and after a checkpoint was loaded."""
    config, run_dir = make_tiny_task(tmp_path), tmp_path / "run"
    for arguments in (["run.num_steps=1"], ["run.num_steps=2", "--resume=auto"]):
        (held,) = run_ranks(1, _run, config, run_dir, *arguments, has_world=False)
        assert held == [0, 0]
