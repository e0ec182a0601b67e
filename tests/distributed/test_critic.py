"""PPO with a critic trains the same at any layout and however the batch is cut; the critic saves
and learns. It has a head of its own where the policy's is its embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import (
    OPTIMIZER,
    Layout,
    build_policy,
    check_weights,
    export,
    make_batch,
    scored_batch,
)
from tests.no_shortcuts import WithLogprobPass
from tests.policy_batches import make_trainer
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection, CriticSection, McoreSection, ModelSection
from tlt_megatron.mcore.policy_model import McoreCriticModel
from tlt_megatron.policy.critic import CriticTrainer
from tlt_megatron.policy.policy_trainer import PolicyTrainer
from tlt_megatron.runtime.device import select_device

NUM_STEPS = 2
# A clip range that is reached: the returns are up to 2.
CRITIC = CriticSection(lr=1e-3, cliprange_value=0.02)
PPO = AlgorithmSection(
    advantage="gae",
    gamma=0.9,
    lam=0.8,
    num_epochs=3,
    kl_coef=0.1,
    kl_placement="reward",
    kl_estimator="k1",
)


def build_trainer(
    path: Path,
    layout: Layout,
    section: AlgorithmSection,
    micro_batch_tokens: int,
    critic: CriticSection = CRITIC,
) -> PolicyTrainer:
    policy, groups = build_policy(path, layout, keep_reference=True)
    model = McoreCriticModel(
        model=ModelSection(path=str(path), dtype="float32"),
        parallel=layout.parallel,
        mcore=McoreSection(),
        optimizer=critic.optimizer(OPTIMIZER),
        groups=groups,
        device=select_device("cpu"),
    )
    return make_trainer(
        policy,
        section,
        groups,
        micro_batch_tokens=micro_batch_tokens,
        temperature=0.8,
        critic=CriticTrainer(model, critic, groups),
    )


def train_step(trainer: PolicyTrainer, seed: int) -> dict[str, float]:
    scored = scored_batch(seed)
    plan = trainer.plan(scored)
    inference = trainer.infer_logprobs(plan, values=trainer.infer_values(plan))
    return trainer.update_critic(inference) | trainer.update(inference)


def values_of(trainer: PolicyTrainer) -> list[Tensor]:
    assert trainer.critic is not None
    return [each.values for each in trainer.critic.model.infer_values(make_batch(3))]


def _run(
    path: Path, layout: Layout, micro_batch_tokens: int, folder: Path | None = None
) -> tuple[list[dict[str, float]], list[Tensor], dict[str, Tensor]]:
    """Metrics of every step, the critic's values and the policy's weights after the last."""
    trainer = build_trainer(path, layout, PPO, micro_batch_tokens)
    steps = [train_step(trainer, seed) for seed in range(NUM_STEPS)]
    if folder is not None:
        assert trainer.critic is not None
        trainer.critic.model.save(folder)
    return steps, values_of(trainer), export(trainer.model)


@pytest.fixture(scope="module")
def one_rank(tied_path: Path) -> Any:
    (result,) = run_ranks(1, _run, tied_path, Layout(world=1), 20)
    return result


@pytest.mark.parametrize(
    ("layout", "micro_batch_tokens"),
    [
        (Layout(world=1), 1),
        (Layout(world=2), 20),
        (Layout(world=4, context=2, tensor=2), 20),
        (Layout(world=4, tensor=2, pipeline=2), 20),
    ],
    ids=("one_sequence", "dp2", "cp2_tp2", "tp2_pp2"),
)
def test_updates_equal_those_of_one_rank(
    tied_path: Path, tmp_path: Path, one_rank: Any, layout: Layout, micro_batch_tokens: int
) -> None:
    steps, values, weights = one_rank
    folder = tmp_path / "critic"
    results = run_ranks(layout.world, _run, tied_path, layout, micro_batch_tokens, folder)
    for mine, predicted, exported in results:
        for step, expected in zip(mine, steps, strict=True):
            assert step == pytest.approx(expected, rel=2e-4, abs=2e-5)
        for value_P, expected_P in zip(predicted, values, strict=True):
            torch.testing.assert_close(value_P, expected_P, rtol=1e-3, atol=1e-4)
        check_weights(exported, weights)
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0.0
    assert steps[0]["critic/vf_clipfrac"] > 0, "the test must reach the clipped part"
    if layout.world == 4:
        (loaded,) = run_ranks(1, _load, tied_path, folder)
        for value_P, expected_P in zip(loaded, results[0][1], strict=True):
            torch.testing.assert_close(value_P, expected_P, rtol=1e-5, atol=1e-6)


def _load(path: Path, folder: Path) -> list[Tensor]:
    trainer = build_trainer(path, Layout(world=1), PPO, 20)
    assert trainer.critic is not None
    trainer.critic.model.load(folder)
    return values_of(trainer)


def test_twenty_steps_make_the_better_sibling_likelier_and_the_values_right(
    tied_path: Path,
) -> None:
    section = WithLogprobPass(advantage="gae")
    critic = CriticSection(lr=3e-3)
    batch = scored_batch(0)

    def train() -> tuple[list[list[float]], list[dict[str, float]]]:
        """Mean log-prob of the better sibling less that of the other, before and after, for two
        prompts.
        """
        trainer = build_trainer(tied_path, Layout(world=1), section, 40, critic)
        gaps, steps = [], []
        for step in range(21):
            plan = trainer.plan(batch)
            inference = trainer.infer_logprobs(plan, values=trainer.infer_values(plan))
            means = {key: float(value.mean()) for key, value in inference.old_logprobs.items()}
            if step in (0, 20):
                gaps.append([means[0, 0] - means[0, 1], means[2, 1] - means[2, 0]])
            steps.append(trainer.update_critic(inference))
            trainer.update(inference)
        return gaps, steps

    assert [s.rewards for s in batch] == [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]
    ((before, after), steps), *_ = run_ranks(1, train)
    assert all(new > old + 0.1 for old, new in zip(before, after, strict=True)), (before, after)
    assert steps[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)
    assert steps[-1]["critic/vf_explained_var"] > 0.5
