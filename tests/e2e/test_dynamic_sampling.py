"""Dynamic sampling in whole runs: the same with speculation and spot training, and with other
ranks.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.tiny_task import (
    TLT,
    answers,
    check_same_run,
    metric_rows,
    patient_engine,
    rollouts,
    run,
    run_ending,
)

pytestmark = pytest.mark.e2e

# Every response has a reward of its own, and few groups differ in `acc`: a step needs several
# rounds.
RARE = """
def rare(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) / 1e4, "acc": solution_str[:1] in ("0", "a", "b")}
"""
COMMON = ("run.num_steps=3", "data.eval=", "logging.trackers=[]", "rollout.num_prompts=3")


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    reward = tmp_path_factory.mktemp("reward") / "rare.py"
    reward.write_text(RARE)
    return (
        *COMMON,
        f"reward.function={reward}:rare",
        "algorithm.filter_groups=acc",
    )


@pytest.fixture(scope="module")
def straight(
    config: Path, dynamic: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three steps on two ranks without a break."""
    run_dir = tmp_path_factory.mktemp("straight")
    run(2, config, run_dir, *dynamic)
    return run_dir


def test_the_batch_holds_only_groups_that_differ_in_the_metric(straight: Path) -> None:
    rows, drawn, last = metric_rows(straight), 0, -1
    for step, row in enumerate(rows):
        assert row["train/num_gen_batches"] > 1
        assert row["rollout/filler_groups"] == 0
        drawn += 3 + int(row["rollout/extra_draws"])
        batch = [r for r in rollouts(straight) if r["policy_version"] == step]
        groups = [list(group) for _, group in groupby(batch, key=lambda r: r["draw_index"])]
        assert [len(group) for group in groups] == [4, 4, 4]
        for group in groups:
            right = {r["response"][:1] in ("0", "a", "b") for r in group}
            assert right == {True, False}
            assert last < group[0]["draw_index"] < drawn
            last = group[0]["draw_index"]
        last = drawn - 1  # the next step goes on after the last draw


def test_speculation_and_spot_training_change_nothing(
    config: Path, dynamic: tuple[str, ...], straight: Path, tmp_path: Path
) -> None:
    """Rank 0's first two rounds end when rank 1 has trained the drafter, so it is trained between
    rounds of one step.
    """
    run(2, config, tmp_path / "run", *dynamic, *TLT, patient_engine(tmp_path, "embedded"))
    check_same_run(tmp_path / "run", straight)
    rows = metric_rows(tmp_path / "run")
    assert rows[0]["spot/updates"] >= 2
    assert rows[-1]["drafter/num_updates"] == sum(row["spot/updates"] for row in rows)


def test_one_rank_draws_and_answers_what_two_ranks_do(
    config: Path, dynamic: tuple[str, ...], straight: Path, tmp_path: Path
) -> None:
    run(1, config, tmp_path, *dynamic, "run.num_steps=1")
    assert answers(tmp_path) == answers(straight)[:12]
    names = ("train/num_gen_batches", "rollout/extra_draws", "rollout/kept_group_share")
    first, other = metric_rows(straight)[0], metric_rows(tmp_path)[0]
    assert [other[name] for name in names] == [first[name] for name in names]


@pytest.mark.parametrize(("function", "metric"), [("math", "score"), ("exact", "acc")])
def test_a_punishment_makes_no_group_differ(
    config: Path, tmp_path: Path, metric: str, function: str
) -> None:
    """Nearly all responses are punished, each by its length. For `math` some are right: they end
    with a 4 by chance.
    """
    data = (config.parent / "train.jsonl").read_text().replace('"label": "5"', '"label": "4"')
    (tmp_path / "fours.jsonl").write_text(data)
    settings = (
        *(*COMMON, f"reward.function={function}", "reward.overlong_tokens=23"),
        *(
            f"algorithm.filter_groups={metric}",
            "algorithm.max_num_gen_batches=2",
            "run.num_steps=1",
        ),
        f"data.train={tmp_path}/fours.jsonl",
    )
    stderr = run_ending(0, 1, config, tmp_path / "run", *settings)
    [row] = metric_rows(tmp_path / "run")
    found = rollouts(tmp_path / "run")
    right = [round(r["reward"] + (len(r["token_ids"]) - 1) / 23) for r in found]
    num_different = sum(len(set(right[i : i + 4])) == 2 for i in range(0, 12, 4))
    assert (num_different > 0) == (function == "math")
    assert row["rollout/filler_groups"] == 3 - num_different
    assert row["rollout/kept_group_share"] < 1
    assert ("step 1: all 3 groups are fillers" in stderr) == (num_different == 0)
