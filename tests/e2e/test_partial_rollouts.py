"""Partial rollouts in whole runs: carried responses are the same with speculation, at tensor
parallelism and after a resume.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.tiny_task import (
    TLT,
    check_same_run,
    check_same_tokens,
    make_tiny_task,
    metric_rows,
    rollouts,
    run,
    run_ending,
    write_environment,
)

pytestmark = pytest.mark.e2e

SETTINGS = (
    *("run.num_steps=5", "data.eval=", "logging.trackers=[]", "algorithm.tis_cap=2"),
    *("rollout.num_prompts=3", "rollout.num_samples=2", "rollout.over_sampling_prompts=6"),
    "rollout.partial_rollout_tokens=6",
)


@pytest.fixture(scope="module")
def straight(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain decoding at TP2 without a break."""
    run_dir = tmp_path_factory.mktemp("straight")
    run(2, task, run_dir, *SETTINGS, "parallel.tensor=2")
    return run_dir


def test_responses_are_carried_over_several_updates(straight: Path) -> None:
    rows, parts = metric_rows(straight), [r.get("versions", []) for r in rollouts(straight)]
    assert max(map(len, parts)) >= 3
    assert len(rollouts(straight)) == 5 * 3 * 2
    assert all(row["rollout/carried_responses"] > 0 for row in rows)
    assert rows[0]["rollout/policy_age/max"] == 0 < rows[-1]["rollout/policy_age/mean"]
    assert max(row["rollout/policy_age/max"] for row in rows) >= 2
    assert rows[0]["actor/tis_weight"] == pytest.approx(1, abs=1e-5)
    assert rows[-1]["actor/tis_weight"] != pytest.approx(1, abs=1e-4)
    # the engines are compared on tokens of the current policy alone, which a batch may not have
    assert max(row.get("train/train_rollout_logprob_abs_diff_max", 0.0) for row in rows) < 1e-4


def test_tensor_parallel_ranks_draw_the_tokens_of_a_single_rank_with_speculation(
    task: Path, straight: Path, tmp_path: Path
) -> None:
    run(1, task, tmp_path, *SETTINGS, *TLT)
    check_same_tokens(tmp_path, straight)


def test_a_resume_with_another_group_size_trains_on_whole_groups_of_it(
    task: Path, straight: Path, tmp_path: Path
) -> None:
    again = (*SETTINGS, "parallel.tensor=2", "rollout.num_samples=3", "run.num_steps=6")
    said = run_ending(0, 2, task, tmp_path, f"--resume={straight}/checkpoints", *again)
    assert "rollout.num_samples=3" in said or "are dropped" not in said
    sizes = Counter(row["draw_index"] for row in rollouts(tmp_path))
    assert set(sizes.values()) == {3}


def test_a_resume_replays_the_routes_of_the_pass_that_drew_the_newest_tokens(
    tmp_path: Path,
) -> None:
    """A continued response begins with a prefill under the new policy, whose experts differ from
    those of earlier passes. Both engines are compared at a resume, so it would stop.
    """
    config = make_tiny_task(tmp_path, kind="qwen3_moe")
    write_environment(config.parent)
    own = (*SETTINGS, "rollout.routing_replay=true", "optimizer.lr=1e-2", "checkpoint.interval=1")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(2, config, straight, *own, "run.num_steps=4")
    run(2, config, resumed, *own, "run.num_steps=2")
    run(2, config, resumed, *own, "run.num_steps=4", "--resume=auto")
    check_same_run(resumed, straight)
    assert max(len(r.get("versions", [])) for r in rollouts(straight)) >= 3
    for row in metric_rows(straight):
        assert row.get("train/train_rollout_logprob_abs_diff_max", 0.0) < 1e-4
        assert row.get("rollout/routes_missing_share", 0.0) == 0
