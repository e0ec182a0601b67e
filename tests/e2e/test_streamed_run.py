"""A run whose idle rank computes gradients: what it learns is what the plain run learns, also after the rank is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.tiny_task import answers, launch, metric_rows, run, weights

pytestmark = pytest.mark.e2e

# Rank 0's rollouts of a step end when rank 1 has streamed all that it has, so every run adds in the same order.
# If a file `kill` is there, rank 1 dies in the second step, after its first micro-batch.
ENGINE = """
import os
import signal
import time

from tlt_megatron.policy.passes import PolicyPasses
from tlt_megatron.policy.trainer import PolicyTrainer
from tlt_megatron.trainer.build_embedded import build_embedded_engine


def engine(config, device, run_dir, world):
    engine = build_embedded_engine(config, device, run_dir, world)
    generate, stream, run = engine.generate, PolicyTrainer.stream, PolicyPasses.run
    kill, dies = run_dir / "kill", run_dir / "dies"

    def held(*args, policy_version, **kwargs):
        groups = generate(*args, policy_version=policy_version, **kwargs)
        mark = run_dir / f"streamed {policy_version}"
        while world.rank == 0 and not mark.exists() and not dies.exists():
            time.sleep(0.001)
        return groups

    def marked(self, scored, tap, version, should_stop):
        stream(self, scored, tap, version, should_stop)
        (run_dir / f"streamed {version}").touch()

    def mortal(self, packs, targets, tap):
        run(self, packs, targets, tap)
        if world.rank == 1 and targets.version == 1 and kill.exists():
            kill.unlink()
            dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    engine.generate, PolicyTrainer.stream, PolicyPasses.run = held, marked, mortal
    return engine
"""
SETTINGS = (
    *("rollout.num_prompts=4", "run.num_steps=3"),
    *("speculation.enabled=true", "speculation.strategies=['2_1_2']", "spot.enabled=true"),
    *("algorithm.skip_zero_advantages=false", "checkpoint.interval=1"),
    *("data.eval=", "logging.tensorboard=false"),
)
STREAMED = "algorithm.stream_update=true"


def test_streamed_runs_train_the_same_policy_also_after_a_lost_rank(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    streamed = (*SETTINGS, STREAMED, f"rollout.engine={tmp_path / 'engine.py'}:engine")
    plain, straight, broken = (tmp_path / name for name in ("plain", "straight", "broken"))
    run(2, config, plain, *SETTINGS)
    run(2, config, straight, *streamed)
    shares = [row["actor/streamed_response_share"] for row in metric_rows(straight)]
    assert shares == [0.5] * 3  # those of rank 1
    for mine, theirs in zip(metric_rows(straight), metric_rows(plain), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert (
        answers(straight)[: len(answers(plain)) // 3] == answers(plain)[: len(answers(plain)) // 3]
    )

    broken.mkdir()
    (broken / "kill").touch()
    ended = launch(2, "--config", config, f"run.dir={broken}", *streamed)
    assert ended.returncode == 1
    assert re.search(r"rank 1 \(host \S+, pid \d+\) .* in phase WAIT", ended.stderr), ended.stderr
    (broken / "dies").unlink()
    run(2, config, broken, *streamed, "checkpoint.resume=auto")
    assert answers(broken) == answers(straight)
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(broken)[name], tensor), name
