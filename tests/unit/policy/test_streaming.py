"""Gradients computed before the rollouts end and those of the update after it add up to those of the update alone."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.unit.policy.test_skipping import BigramModel, FakeTap, scored_with
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.trainer import PolicyTrainer
from tlt_megatron.runtime.process_groups import ProcessGroups, group_of

SECTIONS = {
    "skipping": AlgorithmSection(tis_cap=2.0),
    "computing_all": AlgorithmSection(skip_zero_advantages=False, entropy_coef=0.01),
    "sequence_mean": AlgorithmSection(advantage="rloo", aggregation="sequence_mean"),
}
NUM_STEPS = 3


def _train(section: AlgorithmSection, counts: tuple[int, int], is_dropped: bool = False) -> tuple:
    """Run steps on two ranks, each with every other prompt. Rank r streams `counts[r]` micro-batches."""
    everyone = group_of(dist.group.WORLD)
    groups = ProcessGroups(world=everyone, dp=everyone)
    model = BigramModel(groups)
    trainer = PolicyTrainer(
        model, section, groups=groups, micro_batch_tokens=20, temperature=1.0, max_new_tokens=32
    )
    steps = []
    for _ in range(NUM_STEPS):
        batch, tap = scored_with(), FakeTap()
        answers = iter([False] * counts[everyone.rank])  # to whether the last rollout has ended
        trainer.stream(batch[everyone.rank :: 2], tap, 0, partial(next, answers, True))
        if is_dropped:
            trainer.drop_streamed()
        inference = trainer.infer_logprobs(batch, tap)
        steps.append(inference.metrics | trainer.update(inference))
    return model.gradients, steps, [len(update) for update in model.updated]


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("counts", [(1, 0), (0, 2), (9, 1), (9, 9)], ids=str)
def test_a_streamed_update_is_the_plain_one(
    section: AlgorithmSection, counts: tuple[int, int]
) -> None:
    plain = run_ranks(2, _train, section, (0, 0))
    streamed = run_ranks(2, _train, dataclasses.replace(section, stream_update=True), counts)
    for (expected, plain_steps, _), (gradients, steps, _) in zip(plain, streamed, strict=True):
        assert len(gradients) == NUM_STEPS
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).abs().max() < 1e-12
            assert theirs.abs().max() > 1e-4
        for mine, theirs in zip(steps, plain_steps, strict=True):
            share = mine.pop("actor/streamed_response_share")
            assert theirs.pop("actor/streamed_response_share") == 0
            assert 0 < share <= 1
            assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    num_computed = [sum(sum(updates) for *_, updates in run) for run in (plain, streamed)]
    assert num_computed[0] == num_computed[1], "each response is computed once"


def test_what_was_streamed_before_a_stop_is_forgotten() -> None:
    section = AlgorithmSection(stream_update=True)
    plain = run_ranks(2, _train, section, (0, 0))
    for (expected, *_), (gradients, steps, _) in zip(
        plain, run_ranks(2, _train, section, (1, 9), True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        assert [step["actor/streamed_response_share"] for step in steps] == [0] * NUM_STEPS
