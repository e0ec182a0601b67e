"""What a session computes: members together are one member on all the data, and newcomers become
equal to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.slow_draft import make_sequence
from tests.spot_phases import (
    Markers,
    make_drafter_trainer,
    make_spot,
    run_spot_ranks,
    world_group,
)
from tlt_megatron.drafter.drafter_trainer import DrafterStats
from tlt_megatron.drafter.packing import DraftBatch, pack_batch
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.spot.session import SessionEnd, StateVersion, StopWatch, version_of
from tlt_megatron.spot.spot_trainer import SpotReport
from tlt_megatron.types import DraftSequence

NUM_UPDATES = 4


class Shares:
    """A member's sequences by update; unequal ones, and member 1 has none at times."""

    def __init__(
        self, model: DraftModel, rank: int, when_done: Callable[[], None] = lambda: None
    ) -> None:
        self.when_done = when_done
        self.model = model
        self.rank = rank
        self.update = 0

    def sequences(self, update: int) -> list[DraftSequence]:
        if self.rank == 1 and update % 2:
            return []
        seeds = range(1 + (self.rank + update) % 2)
        first = 100 * self.rank + 10 * update
        return [make_sequence(self.model, 4 + self.rank, seed=first + seed) for seed in seeds]

    def next_batch(self, max_tokens: int) -> DraftBatch | None:
        if self.update == NUM_UPDATES:
            self.when_done()
            return None
        sequences = self.sequences(self.update)
        if not sequences:
            self.update += 1
            return None
        return pack_batch(sequences)

    def mark_trained(self) -> None:
        self.update += 1


@pytest.mark.parametrize("num_members", [2, 3])
def test_n_members_equal_one_member_on_the_union(num_members: int, tmp_path: Path) -> None:
    """The last rank generates until the members have had their updates."""

    def body() -> tuple[dict[str, torch.Tensor], tuple[DrafterStats, ...]]:
        rank = dist.get_rank()
        markers = Markers(tmp_path)

        source = Shares(make_drafter_trainer().model, rank, lambda: markers.set("trained"))
        spot = make_spot(source=source, min_idle_replicas=num_members)
        if rank == num_members:
            markers.await_("trained")
        updates = spot.run_until_preempted(0).updates
        spot.sync_newest(world_group())
        dist.barrier()
        return spot.trainer.state_dict(), updates

    results = run_spot_ranks(num_members + 1, body)
    alone = make_drafter_trainer()
    members = [Shares(alone.model, rank) for rank in range(num_members)]
    for update in range(NUM_UPDATES):
        union = pack_batch([s for member in members for s in member.sequences(update)])
        expected = alone.step(union)
        for _, updates in results[:num_members]:
            assert updates[update].loss == pytest.approx(expected.loss)
            assert updates[update].grad_norm == pytest.approx(expected.grad_norm)
            assert updates[update].num_tokens == expected.num_tokens
    for state, _ in results:
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)


def test_newcomer_in_the_middle_of_a_session_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Rank 0 trains alone, rank 1 joins after 5 updates, rank 2 after 5 more; rank 3 ends it 5
    later.
    """

    def body() -> tuple[SpotReport, StateVersion]:
        rank = dist.get_rank()
        markers = Markers(tmp_path)

        def before(count: int) -> None:
            size = spot.trainer.group.size
            first_seen.setdefault(size, count)
            if rank == 0 and count == first_seen[size] + 5:
                markers.set(f"{size} trained")

        first_seen: dict[int, int] = {}
        spot = make_spot(before=before)
        if rank:
            markers.await_(f"{rank} trained")
        report = spot.run_until_preempted(0)
        version = version_of(spot.trainer)
        spot.sync_newest(world_group())
        dist.barrier()
        return report, version

    reports, versions = zip(*run_spot_ranks(4, body), strict=True)
    ends = [[(s.members, s.end) for s in report.sessions] for report in reports]
    growth = [
        ((0,), SessionEnd.REPLACED),
        ((0, 1), SessionEnd.REPLACED),
        ((0, 1, 2), SessionEnd.STOPPED),
    ]
    assert ends == [growth, growth[1:], growth[2:], []]
    for session in reports[0].sessions:
        assert len(session.stats) >= 5
    assert versions[0] == versions[1] == versions[2]
    assert versions[0].num_updates == len(reports[0].updates)
    assert versions[3].num_updates == 0


def test_a_session_goes_on_while_a_newcomer_still_measures(tmp_path: Path) -> None:
    """Rank 1 trains; rank 2 has finished and measures until rank 1 has made 12 more updates. It was
    planned in at once, and rank 1 waited for it."""
    markers = Markers(tmp_path)

    def body() -> SpotReport:
        rank = dist.get_rank()

        def before(count: int) -> None:
            size = spot.trainer.group.size
            if rank == 1 and count == 3:
                markers.set("trains")
            if rank == 1 and size == 1 and (tmp_path / "measures").exists():
                counts.append(count)
                if len(counts) == 12:
                    markers.set("measured")
            if size == 2:
                markers.set("joined")

        def measure(watch: StopWatch) -> None:
            if rank == 2:
                markers.set("measures")
                markers.await_("measured")

        counts: list[int] = []
        spot = make_spot(before=before, measure_candidate=measure)
        dist.barrier()
        if rank == 2:
            markers.await_("trains")
        if rank == 0:
            markers.await_("joined")
        report = spot.run_until_preempted(0)
        spot.sync_newest(world_group())
        return report

    reports = run_spot_ranks(3, body)
    sessions = [(s.members, s.end) for s in reports[1].sessions]
    assert sessions == [((1,), SessionEnd.REPLACED), ((1, 2), SessionEnd.STOPPED)]
    assert len(reports[1].sessions[0].stats) >= 12


def test_a_clock_that_jumps_an_hour_changes_nothing(tmp_path: Path) -> None:
    """One rank's clock, forwards in one phase and backwards in the next: it ended the phase ("not
    finished 3600 s after ..."), or was counted as hours of idle time."""
    markers = Markers(tmp_path)

    def body() -> list[SpotReport]:
        rank, real = dist.get_rank(), time.time
        jump_s = 0.0

        def before(count: int) -> None:
            nonlocal jump_s
            if count >= 3 and spot.trainer.group.size == 2:
                jump_s = 0.0 if rank else (3600.0 if step == 0 else -3600.0)
                markers.set(f"jumped {step} {rank}")

        spot = make_spot(before=before, min_idle_replicas=2)
        time.time = lambda: real() + jump_s
        reports = []
        for step in range(2):
            dist.barrier()
            if rank == 2:
                for other in (0, 1):
                    markers.await_(f"jumped {step} {other}")
            reports.append(spot.run_until_preempted(step))
            spot.sync_newest(world_group())
        return reports

    for reports in run_spot_ranks(3, body):
        for report in reports:
            assert 0 <= report.used_s < 1800
            assert 0 <= report.stall_s < 1800
            assert report.num_broken == 0
    assert reports[0].used_s == 0  # the last rank to finish
