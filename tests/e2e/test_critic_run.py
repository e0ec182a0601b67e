"""Whole runs of PPO: warm-up trains the critic alone, also of a critic that starts at a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_task import metric_rows, run, run_ending, weights
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e

PPO = (
    "algorithm.advantage=gae",
    "algorithm.lam=0.95",
    "algorithm.num_minibatches=2",
    "critic.lr=1e-3",
    "critic.warmup_steps=1",
    "algorithm.kl_coef=0.01",
    "algorithm.kl_placement=reward",
    "data.eval=",
    "logging.trackers=[]",
)


def test_only_the_critic_learns_in_warm_up(config: Path, tmp_path: Path) -> None:
    run(2, config, tmp_path, *PPO)
    first, *others = rows = metric_rows(tmp_path)
    assert "actor/pg_loss" not in first
    assert first["critic/vf_loss"] > 0
    assert first["critic/values/max"] == 0.0
    assert all(row["actor/skipped_response_share"] == 0 for row in others)
    assert all(row["actor/grad_norm"] > 0 and row["critic/values/max"] != 0 for row in others)
    assert all("train/train_rollout_logprob_abs_diff" in row for row in rows)
    assert all(row["timing_s/update_critic"] > 0 for row in rows)
    before = dict(HfReader(config.parent / "model").items())
    assert any(not torch.equal(before[name], new) for name, new in weights(tmp_path).items())
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"VALUES", "CRITIC"} <= {event["name"] for event in trace if event["ph"] == "X"}


def test_a_critic_that_starts_at_a_resume_is_warmed_up_first(config: Path, tmp_path: Path) -> None:
    """Its warm-up steps count from there, and are not repeated at a further resume."""
    quick = ("data.eval=", "logging.trackers=[]", "rollout.max_new_tokens=8", "--resume=auto")
    run(1, config, tmp_path, *quick, "run.num_steps=1")
    ppo = (*PPO, *quick, "critic.warmup_steps=2")
    said = run_ending(0, 1, config, tmp_path, *ppo, "run.num_steps=2")
    assert "iter_0000001 holds no critic: it starts anew" in said
    run(1, config, tmp_path, *ppo, "run.num_steps=4")
    updated = ["actor/pg_loss" in row for row in metric_rows(tmp_path)]
    assert updated == [True, False, False, True]
