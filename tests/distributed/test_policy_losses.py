"""Every policy loss trains the same at any layout and however the batch is cut into micro-batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_redundant_log_probs import _scored_batch as scored_batch
from tests.mcore_policy import Layout, build_policy, export
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.trainer import PolicyTrainer

NUM_STEPS = 2
SECTIONS = {
    "ppo": AlgorithmSection(clip_low=0.01, clip_high=0.01, num_epochs=3),
    "gspo": AlgorithmSection(
        loss="gspo", aggregation="sequence_mean", clip_low=0.003, clip_high=0.003, num_epochs=3
    ),
    "cispo": AlgorithmSection(loss="cispo", clip_low=1.0, clip_high=0.01, num_epochs=3),
}
CORRECTED = AlgorithmSection(
    clip_low=0.01,
    clip_high=0.01,
    num_epochs=3,
    tis_cap=2.0,
    rollout_is="geometric",
    rollout_rs="geometric",
    # the log-ratios of a response have means -8.8, -6.9 and more, and minima -11.7, -10.2, -9.8 and more
    rollout_rs_threshold_lower=5.5e-4,  # exp(-7.5)
    rollout_token_veto_threshold=4.8e-5,  # exp(-9.95)
)


def _run(path: Path, layout: Layout, loss: str, micro_batch_tokens: int) -> tuple[list, dict]:
    """Metrics of every step, and the weights after the last."""
    policy, groups = build_policy(path, layout)
    trainer = PolicyTrainer(
        policy,
        (SECTIONS | {"corrected": CORRECTED})[loss],
        groups=groups,
        micro_batch_tokens=micro_batch_tokens,
        temperature=0.8,
        max_new_tokens=32,
    )
    steps = [
        trainer.update(trainer.infer_logprobs(scored_batch(seed))) for seed in range(NUM_STEPS)
    ]
    return steps, export(policy)


@pytest.fixture(scope="module", params=[*SECTIONS, "corrected"])
def one_rank(request: pytest.FixtureRequest, model_path: Path) -> tuple[str, list, dict]:
    """The loss, and what one rank does with it in micro-batches of up to 20 tokens."""
    (result,) = run_ranks(1, _run, model_path, Layout(world=1), request.param, 20)
    return request.param, *result


@pytest.mark.parametrize(
    ("layout", "micro_batch_tokens"),
    [
        (Layout(world=1), 1),
        (Layout(world=1), 1000),
        (Layout(world=2), 20),
        (Layout(world=2, tensor=2, sequence=True), 20),
        (Layout(world=2, pipeline=2), 30),
        (Layout(world=4, tensor=2, pipeline=2), 20),
    ],
    ids=("one_sequence", "one_pack", "dp2", "tp2_sp", "pp2", "tp2_pp2"),
)
def test_updates_equal_those_of_one_rank(
    model_path: Path, one_rank: tuple[str, list, dict], layout: Layout, micro_batch_tokens: int
) -> None:
    loss, steps, weights = one_rank
    results: Any = run_ranks(layout.world, _run, model_path, layout, loss, micro_batch_tokens)
    for mine, exported in results:
        for step, expected in zip(mine, steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, weight in weights.items():
            assert (exported[name] - weight).norm() <= 1e-5 * weight.norm(), name
    if loss == "corrected":
        for name in ("rollout_rs_masked_fraction", "rollout_veto_masked_fraction"):
            assert 0 < max(step[f"rollout_corr/{name}"] for step in steps) < 1
    else:
        assert steps[0]["actor/pg_clipfrac"] > 0, "the test must reach the clipped part"


@pytest.mark.parametrize("loss", SECTIONS)
def test_twenty_steps_make_the_better_sibling_likelier(model_path: Path, loss: str) -> None:
    section = dataclasses.replace(SECTIONS[loss], num_epochs=1, recompute_log_probs="always")
    batch = scored_batch(0)

    def train() -> list[list[float]]:
        """Mean log-prob of the better sibling less that of the other, before and after, for two prompts."""
        policy, groups = build_policy(model_path, Layout(world=1))
        settings = {"micro_batch_tokens": 40, "temperature": 1.0, "max_new_tokens": 32}
        trainer = PolicyTrainer(policy, section, groups=groups, **settings)
        gaps = []
        for step in range(21):
            inference = trainer.infer_logprobs(batch)
            means = {key: float(value.mean()) for key, value in inference.old_logprobs.items()}
            if step in (0, 20):
                gaps.append([means[0, 0] - means[0, 1], means[2, 1] - means[2, 0]])
            trainer.update(inference)
        return gaps

    assert [s.rewards for s in batch] == [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]
    (before, after), *_ = run_ranks(1, train)
    assert all(new > old + 0.1 for old, new in zip(before, after, strict=True)), (before, after)
