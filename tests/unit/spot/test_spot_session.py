"""Sessions of one member, with the other ranks played by hand: when the stop is seen, what it
leaves, and which drafters are equal.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.spot_phases import RandomBatches, make_drafter_trainer
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.rank_state import PhaseLog, ReplicaLayout, SpotRanks
from tlt_megatron.spot.session import SessionEnd, version_of
from tlt_megatron.spot.spot_trainer import SpotTrainer

TWO = ReplicaLayout(2)


class Player:
    """A SpotTrainer of rank 0 whose data source lets rank 1 finish ahead of batch `stop_at`."""

    def __init__(self, stop_at: int) -> None:
        self.store = dist.HashStore()
        self.trainer = make_drafter_trainer()
        self.stop_at = stop_at
        self.spot = SpotTrainer(
            self.trainer,
            RandomBatches(self.trainer.model, seed=0, before=self.before),
            ranks=SpotRanks(store=self.store, layout=TWO, rank=0, phase_timeout_s=180.0),
            timeline=Timeline(None, 0),
        )
        self.spot.watch_s = 0.0

    def before(self, count: int) -> None:
        assert count < 1000, "the session does not end"
        if count == self.stop_at:
            self.finish_other(step=4)

    def finish_other(self, step: int) -> None:
        PhaseLog(replace(self.spot.ranks, rank=1), step).announce_finished()


def test_stop_that_comes_during_a_step_ends_the_session_and_leaves_no_trace_of_that_step() -> None:
    player = Player(stop_at=3)
    started = time.monotonic()
    report = player.spot.run_until_preempted(4)
    elapsed_s = time.monotonic() - started
    (session,) = report.sessions
    assert session.end == SessionEnd.STOPPED
    *done, given_up = session.stats
    assert given_up.is_skipped
    assert given_up.num_tokens == 0
    assert len(done) == len(session.steps) == 3
    assert player.trainer.num_updates == len(report.updates) == 3
    assert player.trainer.num_skipped == 0
    assert list(report.updates) == done
    straight = make_drafter_trainer()
    batches = RandomBatches(straight.model, seed=0)
    for _ in range(3):
        straight.step(batches.next_batch())
    assert version_of(player.trainer) == version_of(straight)
    assert report.metrics()["spot/epochs"] == 1
    assert session.members == (0,)
    assert 0 < report.used_s <= elapsed_s
    assert report.preempt_ms == pytest.approx(1e3 * report.stall_s)


def test_spans_tell_what_a_rank_did(tmp_path) -> None:
    player = Player(stop_at=2)
    player.spot.timeline = Timeline(tmp_path / "rank_0.jsonl", 0)
    player.spot.run_until_preempted(4)
    player.spot.timeline.close()
    text = (tmp_path / "rank_0.jsonl").read_text()
    names = [line.split('"name": "')[1].split('"')[0] for line in text.splitlines()]
    assert names == ["IDLE", "DRAFT-TRAIN", "PREEMPT"]


def test_versions_of_drafters_differ_with_every_tensor_and_counter() -> None:
    trainer, other = make_drafter_trainer(), make_drafter_trainer()
    trainer.step(RandomBatches(trainer.model, seed=0).next_batch())  # moments are not zero
    assert version_of(other) != version_of(trainer)
    other.load_state_dict(trainer.state_dict())
    assert version_of(other) == version_of(trainer)
    seen = {version_of(trainer).checksum}
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    for name in state:
        trainer.load_state_dict(state | {name: state[name] + 1})
        seen.add(version_of(trainer).checksum)
    assert len(seen) == 1 + len(state)
