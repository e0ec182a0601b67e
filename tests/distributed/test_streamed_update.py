"""Megatron accumulates gradients while other ranks decode, and reduces them once: the policy trains the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_redundant_log_probs import _scored_batch as scored_batch
from tests.mcore_policy import Layout, build_policy, export
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TappedSequence
from tlt_megatron.policy.trainer import PolicyTrainer

NUM_STEPS = 3


def _run(path: Path, layout: Layout, counts: tuple[int, int]) -> Any:
    """Rank r streams counts[r] micro-batches of its prompts before each update; peers do as the first."""
    policy, groups = build_policy(path, layout)
    trainer = PolicyTrainer(
        policy,
        AlgorithmSection(advantage="rloo", skip_zero_advantages=False, stream_update=True),
        groups=groups,
        micro_batch_tokens=20,
        temperature=0.8,
        max_new_tokens=32,
    )
    tapped: list[TappedSequence] = []
    steps = []
    for seed in range(NUM_STEPS):
        batch = scored_batch(seed)
        taps = [
            HiddenStateTap(on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64)
            for _ in range(2)
        ]
        answers = iter([False] * counts[groups.world.rank])
        trainer.stream(batch[groups.world.rank :: 2], taps[0], 0, partial(next, answers, True))
        inference = trainer.infer_logprobs(batch, taps[1])
        steps.append(inference.metrics | trainer.update(inference))
    return steps, [tuple(s.token_ids.tolist()) for s in tapped], export(policy)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(world=2), (0, 1)),
        (Layout(world=2), (9, 9)),
        (Layout(world=2, tensor=2, sequence=True), (2, 0)),
        (Layout(world=2, pipeline=2), (2, 0)),
    ],
    ids=("one_rank_in_part", "all", "tp2_in_part", "pp2_in_part"),
)
def test_a_streamed_update_trains_the_same_policy(
    model_path: Path, layout: Layout, counts: tuple[int, int]
) -> None:
    plain = run_ranks(2, _run, model_path, layout, (0, 0))
    streamed = run_ranks(2, _run, model_path, layout, counts)
    for (expected, _, expected_weights), (steps, _, weights) in zip(plain, streamed, strict=True):
        for step, other in zip(steps, expected, strict=True):
            assert 0 < step.pop("actor/streamed_response_share") <= 1
            assert other.pop("actor/streamed_response_share") == 0
            assert step == pytest.approx(other, rel=1e-4, abs=1e-5)
        for name, weight in expected_weights.items():
            assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
    tapped = [sorted(t for _, found, _ in run for t in found) for run in (plain, streamed)]
    assert tapped[0] == tapped[1]
