"""Every recipe of examples/recipes trains the tiny policy for two steps, under a config of one's
own.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny_task import REPO, metric_rows, run, weights
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e

RECIPES = sorted((REPO / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(config: Path, tmp_path: Path, recipe: Path) -> None:
    own = ["run.num_steps=2", "data.eval=", "logging.trackers=[]"]
    if recipe.stem == "dapo":
        own.append("reward.overlong_tokens=8")  # responses have up to 24
    if recipe.stem == "reinforce_plus_plus":
        own.append("algorithm.gamma=1e-9")
    run(1, recipe, tmp_path / "run", "--config", config, *own)
    rows = metric_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    for key, value in yaml.safe_load(recipe.read_text())["algorithm"].items():
        assert used["algorithm"][key] == value
    before = dict(HfReader(config.parent / "model").items())
    after = weights(tmp_path / "run")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    if recipe.stem == "reinforce_plus_plus":
        # Only last tokens have a return, so nearly all tokens are just below the mean.
        assert rows[0]["critic/advantages/max"] > -5 * rows[0]["critic/advantages/min"]
    if recipe.stem == "dapo":
        assert all(row["train/num_gen_batches"] >= 1 for row in rows)
        assert all(row["reward/unknown/overlong_reward/mean"] < 0 for row in rows)


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_step_whose_responses_are_all_cut_and_masked_learns_nothing(
    config: Path, tmp_path: Path, advantage: str
) -> None:
    settings = ("rollout.max_new_tokens=1", "rollout.num_prompts=2", "rollout.num_samples=2")
    settings += ("algorithm.mask_truncated=true", "algorithm.entropy_coef=0.1", "run.num_steps=1")
    settings += (f"algorithm.advantage={advantage}", "optimizer.weight_decay=0", "data.eval=")
    run(1, config, tmp_path, *settings)
    [row] = metric_rows(tmp_path)
    assert (row["response_length/clip_ratio"], row["actor/grad_norm"]) == (1, 0)
    before = dict(HfReader(config.parent / "model").items())
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(before[name], tensor), name


def test_training_replays_the_tokens_that_truncated_sampling_kept(
    config: Path, tmp_path: Path
) -> None:
    """The correction for another distribution of the rollouts has nothing to correct. Without the
    replay, the weight would be the probability of the kept tokens."""
    cut = ["rollout.top_p=0.6", "rollout.top_k=20", "rollout.temperature=0.9", "run.num_steps=2"]
    own = ["algorithm.tis_cap=2", "parallel.tensor=2", "data.eval=", "logging.trackers=[]"]
    run(2, config, tmp_path, *cut, *own)
    for row in metric_rows(tmp_path):
        assert row["actor/tis_weight"] == pytest.approx(1, abs=1e-4)
        assert row["rollout/kept_set_missing_share"] == 0
        assert 1 < row["rollout/kept_set_size"] <= 20
        assert row["actor/entropy"] < math.log(20)
