"""Functions of the user, in files outside the package, through the program itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_task import metric_rows, rollouts, run

pytestmark = pytest.mark.e2e

MINE = '''"""An advantage, a loss and rewards whose values in the metrics are known, and an engine that leaves a file."""

import torch

from tlt_megatron.trainer.build_embedded import build_embedded_engine


def constant(rewards):
    return [[torch.full(reward_T.shape, 3.0) for reward_T in group] for group in rewards]


def plain(logprobs, old_logprobs, batch, section):
    ratio = (logprobs - old_logprobs).exp()
    return -ratio * batch.advantages, torch.ones_like(logprobs)


def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1


two = three = one


def engine(config, device, run_dir, world):
    (run_dir / f"engine_of_{world.rank}").touch()
    return build_embedded_engine(config, device, run_dir, world)
'''


def test_a_users_advantage_loss_rewards_and_engine_train(config: Path, tmp_path: Path) -> None:
    """The sum of the weights is 1 up to rounding, so a response with all scores 1 is right."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    functions = (f"algorithm.advantage={mine}:constant", f"algorithm.loss={mine}:plain")
    functions += (f"rollout.engine={mine}:engine",)
    functions += ("reward.function=math",)
    functions += (f"reward.function={{{mine}:one: 0.7, {mine}:two: 0.2, {mine}:three: 0.1}}",)
    run(2, config, tmp_path / "run", *functions, "run.num_steps=2", "eval.num_samples=2")
    evaluation, *rows, _ = metric_rows(tmp_path / "run")
    assert [evaluation[f"eval/{name}"] for name in ("accuracy", "pass@2", "maj@2")] == [1, 1, 1]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/pg_loss"] == pytest.approx(-3.0, rel=1e-5)
        assert row["actor/pg_clipfrac"] == 1
        assert (row["rollout/solve_all"], row["rollout/solve_none"]) == (1, 0)
    assert len(rollouts(tmp_path / "run")) == 2 * 4 * 4
    assert len(list((tmp_path / "run").glob("engine_of_*"))) == 2
