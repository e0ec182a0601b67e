"""Gradients computed before the rollouts end and those of the update after it add up to those of the update alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
NUM_STEPS = 2


def _groups(world_size: int, tensor: int, pipeline: int) -> ProcessGroups:
    """Groups in Megatron's order: tp fastest, then dp, then pp. Every rank forms all of them."""
    ranks = torch.arange(world_size).view(pipeline, -1, tensor)
    axes = {}
    for axis, name in enumerate(("pp", "dp", "tp")):
        for members in ranks.movedim(axis, -1).flatten(0, 1).tolist():
            handle = dist.new_group(members)
            if dist.get_rank() in members:
                axes[name] = group_of(handle)
    return ProcessGroups(world=group_of(dist.group.WORLD), **axes)


def _train(
    layout: tuple[int, int, int],
    section: AlgorithmSection,
    counts: Sequence[int],
    is_dropped: bool = False,
) -> tuple:
    """Run steps on ranks that each have every n-th prompt. Rank r would stream `counts[r]` micro-batches."""
    groups = _groups(*layout)
    world = groups.world
    model = BigramModel(groups)
    trainer = PolicyTrainer(
        model, section, groups=groups, micro_batch_tokens=20, temperature=1.0, max_new_tokens=32
    )
    steps = []
    for _ in range(NUM_STEPS):
        batch, tap = scored_with(), FakeTap()
        answers = iter([False] * counts[world.rank])  # to whether the last rollout has ended
        trainer.stream(batch[world.rank :: world.size], tap, 0, partial(next, answers, True))
        if is_dropped:
            trainer.drop_streamed()
        inference = trainer.infer_logprobs(batch, tap)
        steps.append(inference.metrics | trainer.update(inference))
    num_computed = sum(map(len, model.updated)) * (groups.tp.is_first and groups.pp.is_first)
    return model.gradients, steps, num_computed


def _check(layout: tuple[int, int, int], section: AlgorithmSection, counts: Sequence[int]) -> None:
    world = layout[0]
    plain = run_ranks(world, _train, layout, section, [0] * world)
    section = dataclasses.replace(section, stream_update=True)
    streamed = run_ranks(world, _train, layout, section, counts)
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
    num_computed = [sum(count for *_, count in run) for run in (plain, streamed)]
    assert num_computed[0] == num_computed[1], "each response is computed once"


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("counts", [(1, 0), (9, 1), (9, 9)], ids=str)
def test_a_streamed_update_is_the_plain_one(
    section: AlgorithmSection, counts: Sequence[int]
) -> None:
    _check((2, 1, 1), section, counts)


@pytest.mark.parametrize("layout", [(4, 2, 1), (4, 1, 2)], ids=["tp2", "pp2"])
def test_peers_stream_as_long_as_the_first_of_them_says(layout: tuple[int, int, int]) -> None:
    """Half of the ranks would stop earlier than the first of their model, or later."""
    _check(layout, SECTIONS["skipping"], (1, 0, 9, 2))
    _check(layout, SECTIONS["computing_all"], (9, 1, 0, 0))


def test_what_was_streamed_before_a_stop_is_forgotten() -> None:
    layout, section = (2, 1, 1), AlgorithmSection(stream_update=True)
    plain = run_ranks(2, _train, layout, section, (0, 0))
    for (expected, *_), (gradients, steps, _) in zip(
        plain, run_ranks(2, _train, layout, section, (1, 9), True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        assert [step["actor/streamed_response_share"] for step in steps] == [0] * NUM_STEPS
