"""Sessions start, grow and stop with random finish times: who trained, who left when, and what all
hold in the end.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.spot_phases import Markers, finish_after, make_spot, run_spot_ranks, world_group
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.spot.session import SessionEnd, SessionRecord, StateVersion, version_of
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer

# The report of one rank, and the version of its drafter before and after the sync.
PhaseResult = tuple[SpotReport, StateVersion, StateVersion]


def random_naps(seed: int, world_size: int, longest_s: float) -> list[float]:
    """Rollout times of three shapes: spread out, a long tail, and many ends at once."""
    rng = random.Random(seed)
    naps = [rng.uniform(0, longest_s) for _ in range(world_size)]
    shape = seed % 3
    if shape == 1:
        naps = [0.3 * nap for nap in naps]
        naps[rng.randrange(world_size)] = longest_s
    elif shape == 2:
        naps = [rng.choice((0.0, longest_s / 2, longest_s)) for _ in naps]
    return naps


def run_phases(
    spot: SpotTrainer, count: int, longest_s: float, least_updates: int = 1
) -> list[PhaseResult]:
    """Phases with random rollout times, each with the clean-up at its end. On a busy machine more
    than `count`, and longer ones, until there have been `least_updates`."""
    results: list[PhaseResult] = []
    world = world_group()
    while len(results) < count or results[-1][2].num_updates < least_updates:
        step = len(results)
        naps_s = random_naps(step, world.size, longest_s * (1 + step // count))
        report = finish_after(spot, step, naps_s)
        version = version_of(spot.trainer)
        results.append((report, version, spot.sync_newest(world)))
    dist.barrier()
    return results


def by_epoch(reports: list[SpotReport]) -> dict[int, dict[int, SessionRecord]]:
    """epoch -> rank -> what it saw of that session."""
    epochs: dict[int, dict[int, SessionRecord]] = {}
    for rank, report in enumerate(reports):
        for session in report.sessions:
            epochs.setdefault(session.epoch, {})[rank] = session
    return dict(sorted(epochs.items()))


def check_phase(phase: list[PhaseResult], num_before: int, replica_size: int = 1) -> int:
    """What must hold whatever the timing was; the drafter's updates after the phase."""
    reports, versions, newest = zip(*phase, strict=True)
    num_updates = num_before
    members_before: tuple[int, ...] = ()
    for records in by_epoch(list(reports)).values():
        first = next(iter(records.values()))
        if first.end == SessionEnd.CANCELLED:  # the phase ended before some member looked
            assert set(records) <= set(first.members)
            assert not first.stats
        else:
            assert sorted(records) == sorted(first.members)
        # All left after the same step, for the same reason, having reduced the same numbers.
        for record in records.values():
            assert (record.members, record.end) == (first.members, first.end)
            # A step that all have given up has a loss of nan, which does not equal itself.
            assert repr(record.stats) == repr(first.stats)
        assert first.end in (SessionEnd.STOPPED, SessionEnd.REPLACED, SessionEnd.CANCELLED)
        assert set(members_before) < set(first.members)
        members_before = first.members
        assert len(first.members) <= len(phase) - replica_size  # the last replica never trains
        num_updates += sum(not stats.is_skipped for stats in first.stats)
        if first.end == SessionEnd.STOPPED:
            assert len({versions[rank] for rank in first.members}) == 1
    assert len(set(newest)) == 1
    assert newest[0].num_updates == num_updates
    assert newest[0] in versions
    return num_updates


def check_phases(ranks: list[list[PhaseResult]], replica_size: int = 1) -> int:
    num_updates = 0
    for phase in zip(*ranks, strict=True):
        num_updates = check_phase(list(phase), num_updates, replica_size)
    return num_updates


@pytest.mark.parametrize(
    "world_size, num_schedules, longest_s, options, members",
    [
        (2, 120, 0.015, {}, None),
        (4, 80, 0.02, {}, None),
        (8, 25, 0.04, {}, None),
        (4, 30, 0.03, {"replica_size": 2}, {(0, 1), (2, 3)}),
        (3, 20, 0.03, {"min_idle_replicas": 2}, set(itertools.permutations(range(3), 2))),
    ],
)
def test_random_finish_times(
    world_size: int,
    num_schedules: int,
    longest_s: float,
    options: dict[str, int],
    members: set[tuple[int, ...]] | None,
) -> None:
    """Replicas of two ranks go idle as one; sessions wait for `min_idle_replicas`."""
    least_updates = num_schedules // 4

    def body() -> tuple[list[PhaseResult], int]:
        spot = make_spot(**options)
        results = run_phases(spot, num_schedules, longest_s, least_updates)
        num_keys = spot.ranks.store.num_keys()
        dist.barrier()
        return results, num_keys

    results, num_keys = zip(*run_spot_ranks(world_size, body), strict=True)
    replica_size = options.get("replica_size", 1)
    assert check_phases(list(results), replica_size) >= least_updates
    assert num_keys[0] == 0  # phases leave nothing in the store
    reports = [report for rank in results for report, _, _ in rank]
    found = {session.members for report in reports for session in report.sessions}
    assert found <= (members or found)


def test_kept_groups_serve_recurring_members(tmp_path: Path) -> None:
    """As on NCCL, where communicators are slow to make: the pool keeps groups over phases. One rank
    generates until the two others train."""
    markers = Markers(tmp_path)

    def body() -> tuple[list[PhaseResult], list[str]]:
        def before(count: int) -> None:
            if spot.trainer.group.size == 2:
                markers.set(f"pair {step}")

        step = 0
        spot = make_spot(min_idle_replicas=2, before=before)
        spot._groups.max_kept = 4
        others = [rank for rank in range(3) if rank != 2]
        results, names = [], []
        for step in range(6):
            dist.barrier()
            if dist.get_rank() == (2 if step % 2 else 0):
                markers.await_(f"pair {step}")
            report = spot.run_until_preempted(step)
            results.append((report, version_of(spot.trainer), spot.sync_newest(world_group())))
            names.append(spot._groups.name_of(others))
        dist.barrier()
        return results, names

    results, names = zip(*run_spot_ranks(3, body), strict=True)
    check_phases(list(results))
    assert names[0] == names[1]
    assert names[0][1:] == ["1.1"] * 5  # made in phase 1, used in phases 1, 3 and 5
    assert names[2] == ["-"] * 6
    formed = [[report.num_groups_formed for report, _, _ in rank] for rank in results]
    assert formed == [[0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


class BadMemory(DrafterTrainer):
    """What arrives at rank 1 is not what was sent."""

    def broadcast_state(self, source: int = 0) -> None:
        super().broadcast_state(source)
        if dist.get_rank() == 1:
            self.model.fc.bias.data[0] += 1e-12


def test_a_rank_that_holds_another_drafter_is_named_on_all() -> None:
    def body() -> str:
        spot = make_spot()
        spot.trainer = BadMemory(spot.trainer.model, DrafterSection())
        with pytest.raises(RuntimeError) as error:
            spot.sync_newest(world_group())
        dist.barrier()
        return str(error.value)

    said = run_spot_ranks(3, body)
    assert said == ["ranks [1] do not hold the drafter that rank 0 sent to all"] * 3
