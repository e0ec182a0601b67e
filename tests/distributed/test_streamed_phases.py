"""Tensor-parallel peers leave their sessions, stream together, and train the drafter again."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from tests.distributed.test_spot_schedules import random_naps
from tests.spot_phases import Markers, make_spot, run_spot_ranks, world_group
from tlt_megatron.runtime.collectives import broadcast_object
from tlt_megatron.runtime.process_groups import group_of
from tlt_megatron.spot.session import StopWatch

NUM_PHASES = 15


def test_peers_leave_a_session_to_stream_and_join_one_afterwards(tmp_path: Path) -> None:
    """Ranks 0 and 1 are a model, 2 and 3 another. In the first phase, rank 0 trains, 1 finishes, both stream and train, and
    the others finish last. The other phases end at random times."""
    markers = Markers(tmp_path)

    def body() -> list[tuple[list[int], float, int]]:
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        peers = group_of(pairs[rank // 2])

        def before(count: int) -> None:
            if rank == 0 and count > 1:
                markers.set("trained again" if (tmp_path / "streamed").exists() else "trained")

        def stream(watch: StopWatch) -> None:
            counts.append(0)
            while not broadcast_object(watch(), peers):
                counts[-1] += 1
                time.sleep(0.001)
                if phase == 0 and counts[-1] == 3:
                    markers.set("streamed")
                    return

        spot = make_spot(tensor=2, before=before)
        results = []
        for phase in range(NUM_PHASES):
            counts: list[int] = []
            dist.barrier()
            if phase:
                time.sleep(random_naps(phase, 4, 0.03)[rank])
            elif rank:
                markers.await_("trained" if rank == 1 else "trained again")
            report = spot.run_until_preempted(phase, 0, stream)
            results.append((counts, report.used_s, len(report.sessions)))
            spot.sync_newest(world_group())
        dist.barrier()  # rank 0 keeps the store
        return results

    phases = list(zip(*run_spot_ranks(4, body), strict=True))
    for first, second, third, fourth in phases:
        for one, other in ((first, second), (third, fourth)):
            assert one[0] == other[0], "peers do as the first of them says"
            assert len(one[0]) <= 1
    counts, used_s, num_sessions = phases[0][0]
    assert counts == [3]
    assert num_sessions >= 2  # before and after
    counts, used_s, num_sessions = phases[0][1]
    assert counts == [3]
    assert used_s > 0
    assert [counts for counts, *_ in phases[0][2:]] == [[], []]
