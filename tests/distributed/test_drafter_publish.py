"""What is published when several ranks have trained, each on its own data: the same drafter, to
every engine.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import LIMIT_S
from tests.slow_draft import make_draft_model, make_sequence
from tests.spot_phases import make_drafter_trainer, run_spot_ranks, world_group
from tests.unit.spot.test_lifecycle import STRATEGIES, Shelf, WatchedHoldout
from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.spot.rank_state import ReplicaLayout, SpotRanks
from tlt_megatron.types import SamplingParams

NUM_RANKS, MOST_STEPS = 3, 60


def make_lifecycle(engine: Shelf, run_dir: Path) -> DrafterLifecycle:
    """A collective of all ranks."""
    torch.set_num_threads(1)
    world = world_group()
    return DrafterLifecycle(
        make_drafter_trainer(batch_tokens=16),
        DataBuffer(SpotSection(enabled=True), torch.float64),
        engine,
        WatchedHoldout(engine, SamplingParams(), STRATEGIES),
        ranks=SpotRanks(
            store=open_job_store(world, LIMIT_S).part("spot"),
            layout=ReplicaLayout(world.size),
            rank=world.rank,
            phase_timeout_s=LIMIT_S,
        ),
        world=world,
        timeline=Timeline(None, world.rank),
        run_dir=run_dir,
    )


def test_every_engine_gets_the_same_drafter_at_the_same_phase_boundary(tmp_path: Path) -> None:
    def body() -> list[list[list[tuple[int, int]]]]:
        """After every step: (version, checksum) of all drafters that each engine has got. Until
        two have been published.
        """
        engine, rank = Shelf(), dist.get_rank()
        lifecycle = make_lifecycle(engine, tmp_path)
        data = make_draft_model("eagle")
        held: list[list[list[tuple[int, int]]]] = []
        while len(held) < MOST_STEPS and not (held and len(held[-1][0]) >= 2):
            step = len(held) + 1
            lifecycle.start_step(step)
            for index in range(8):
                seed = 1000 * step + 10 * index + rank
                lifecycle._add(make_sequence(data, 6 + index, seed=seed, request=(seed, 0, 0)))
            dist.barrier()
            time.sleep(0.1 * step * ((rank + step) % NUM_RANKS) / (NUM_RANKS - 1))
            lifecycle.run_until_preempted(step)
            lifecycle.publish({"bubble/stall_s": 0.0})
            loaded = [(version, checksum_tensors(t.items())) for version, t in engine.loaded]
            held.append(gather_objects(loaded, world_group()))
        return held

    for held in run_spot_ranks(NUM_RANKS, body)[0]:
        assert held == [held[0]] * NUM_RANKS
    assert len(held[0]) >= 2, "too little was published"
