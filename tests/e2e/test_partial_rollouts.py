"""Partial rollouts in whole runs: carried responses are the same with speculation and spot training, and survive a stop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.tiny_task import answers, make_tiny_task, metric_rows, rollouts, run, run_forked, weights

pytestmark = pytest.mark.e2e

SETTINGS = (
    *("run.num_steps=5", "data.eval=", "logging.tensorboard=false", "algorithm.tis_cap=2"),
    *("rollout.num_prompts=3", "rollout.num_samples=2", "rollout.over_sampling_prompts=6"),
    "rollout.partial_rollout_tokens=6",
)
TLT = (
    *("speculation.enabled=true", "speculation.strategies=['3_1_3', '3_2_6+ngram_3', 'ngram_4']"),
    *("spot.enabled=true", "drafter.batch_tokens=64"),
)
# Tells rank 1 to stop while it generates in the third step, once.
STOPPING_ENGINE = """
import os
import signal

from tlt_megatron.trainer.build_embedded import build_embedded_engine


def engine(config, device, run_dir, world):
    engine = build_embedded_engine(config, device, run_dir, world)
    generate, mark = engine.generate, run_dir / "stopped"

    def stopped(prompts, params, *, policy_version, **arguments):
        if policy_version == 2 and world.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(prompts, params, policy_version=policy_version, **arguments)

    engine.generate = stopped
    return engine
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task with six stop tokens of 48, so that most responses have fewer than 16 tokens and some reach 24."""
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    path = config.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(range(1, 7))}))
    (path.parent / "generation_config.json").unlink(missing_ok=True)
    return config


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain decoding on two ranks without a break."""
    run_dir = tmp_path_factory.mktemp("straight")
    run(2, config, run_dir, *SETTINGS)
    return run_dir


def test_responses_are_carried_over_several_updates(straight: Path) -> None:
    rows, parts = metric_rows(straight), [r.get("versions", []) for r in rollouts(straight)]
    assert max(map(len, parts)) >= 3
    assert len(rollouts(straight)) == 5 * 3 * 2
    assert all(row["rollout/carried_responses"] > 0 for row in rows)
    assert rows[0]["rollout/policy_age/max"] == 0 < rows[-1]["rollout/policy_age/mean"]
    assert max(row["rollout/policy_age/max"] for row in rows) >= 2
    assert rows[0]["actor/tis_weight"] == 1 != rows[-1]["actor/tis_weight"]
    # the engines are compared on tokens of the current policy alone, which a batch may not have
    assert max(row.get("train/train_rollout_logprob_abs_diff_max", 0.0) for row in rows) < 1e-4


def test_a_stopped_and_resumed_run_with_tlt_equals_the_plain_one(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    """Speculation, spot training, a stop in the middle of a step that has carried responses, and a resume."""
    engine = tmp_path / "stopping_engine.py"
    engine.write_text(STOPPING_ENGINE)
    run_dir = tmp_path / "run"
    arguments = (*SETTINGS, *TLT, f"rollout.engine={engine}:engine", "checkpoint.resume=auto")
    run_forked(2, "--config", config, f"run.dir={run_dir}", *arguments)
    assert len(metric_rows(run_dir)) == 2
    assert (run_dir / "checkpoints" / "iter_0000002" / "carried_responses.pt").exists()
    run(2, config, run_dir, *arguments)
    assert answers(run_dir) == answers(straight)
    assert [r.get("versions") for r in rollouts(run_dir)] == [
        r.get("versions") for r in rollouts(straight)
    ]
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(run_dir)[name], tensor), name


def test_a_resume_with_another_group_size_trains_on_whole_groups_of_it(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    again = (*SETTINGS, "rollout.num_samples=3", "run.num_steps=6")
    found = ("--config", config, f"run.dir={tmp_path}", f"--resume={straight}/checkpoints")
    for code, stderr in run_forked(2, *found, *again):
        assert code == 0, stderr
        if "prompts with carried responses are dropped" in stderr:
            assert "rollout.num_samples=3" in stderr
    sizes = Counter(row["draw_index"] for row in rollouts(tmp_path))
    assert set(sizes.values()) == {3}
