"""Rollout phases with spot training on forked ranks. The drafter is tiny, data are random, and a
rollout is a nap.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import LIMIT_S, run_ranks
from tests.slow_draft import make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch, pack_batch
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.heartbeat import Heartbeat
from tlt_megatron.runtime.job_store import open_job_store
from tlt_megatron.runtime.process_groups import Group, group_of
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.rank_state import ReplicaLayout, SpotRanks
from tlt_megatron.spot.session import StopWatch
from tlt_megatron.spot.spot_trainer import SpotReport, SpotTrainer

_alive: list[object] = []  # keeps this rank's objects


def run_spot_ranks(world_size: int, body: Callable[[], Any], **options: Any) -> list[Any]:
    """Call `run_ranks` after importing what torch imports for its first optimizer, which takes 1.2
    s on each rank.
    """
    make_drafter_trainer()
    return run_ranks(world_size, body, **options)


def world_group() -> Group:
    return group_of(dist.group.WORLD)


def begin_phase(heartbeat: Heartbeat, name: str) -> None:
    """Begin a phase as `Phases` does, which also leaves it at its end."""
    heartbeat.status.count_phase(name)
    heartbeat.status.leave((name,))
    heartbeat.tell_phase()


def make_drafter_trainer(**section: object) -> DrafterTrainer:
    """A trainer that is the same on all ranks."""
    model = make_draft_model("eagle")
    return DrafterTrainer(model, DrafterSection(**section))


class RandomBatches:
    """Batches of one short sequence. `before` runs ahead of each, with how many were given out."""

    def __init__(
        self,
        model: DraftModel,
        seed: int,
        before: Callable[[int], None] = lambda count: None,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._device = device or model.fc.weight.device
        self._rng = random.Random(seed)
        self._before = before
        self.count = 0

    def next_batch(self, max_tokens: int = 8) -> DraftBatch | None:
        self._before(self.count)
        self.count += 1
        num_tokens = self._rng.randint(3, 8)
        seed = self._rng.randrange(1000)
        sequence = make_sequence(self._model, num_tokens, seed=seed)
        return pack_batch([sequence]).to(self._device)

    def mark_trained(self) -> None:
        """Do nothing: the next batch is another one in any case."""


class HookedStore(dist.Store):
    """A store that calls `hook(key)` ahead of every operation on it.

    A native holder (a PrefixStore) does not keep its Python half alive.
    """

    def __init__(self, inner: dist.Store, hook: Callable[[str], None]) -> None:
        super().__init__()
        self.inner = inner
        self.hook = hook


def _hooked(operation: str) -> Callable[..., Any]:
    def call(self: HookedStore, key: str | list[str], *rest: Any) -> Any:
        self.hook(key if isinstance(key, str) else key[0])
        return getattr(self.inner, operation)(key, *rest)

    return call


for _name in ("set", "get", "append", "check", "wait", "delete_key"):
    setattr(HookedStore, _name, _hooked(_name))


def make_spot(
    *,
    trainer: DrafterTrainer | None = None,
    source: Any | None = None,
    hook: Callable[[str], None] | None = None,
    replica_size: int = 1,
    before: Callable[[int], None] = lambda count: None,
    measure_candidate: Callable[[StopWatch], None] | None = None,
    min_idle_replicas: int = 1,
    member_timeout_s: float = LIMIT_S,
) -> SpotTrainer:
    """A SpotTrainer on this rank of the default world. A collective of all ranks."""
    torch.set_num_threads(1)
    world = world_group()
    trainer = trainer or make_drafter_trainer()
    store = open_job_store(world, LIMIT_S).part("spot")
    if hook:
        store = HookedStore(store, hook)
        _alive.append(store)
    return SpotTrainer(
        trainer,
        source or RandomBatches(trainer.model, seed=world.rank, before=before),
        ranks=SpotRanks(
            store=store,
            layout=ReplicaLayout(world.size, replica_size),
            rank=world.rank,
            phase_timeout_s=LIMIT_S,
            min_idle_replicas=min_idle_replicas,
            member_timeout_s=member_timeout_s,
        ),
        timeline=Timeline(None, world.rank),
        measure_candidate=measure_candidate,
    )


def finish_after(spot: SpotTrainer, step: int, naps_s: Sequence[float]) -> SpotReport:
    """A phase in which rank i generates for naps_s[i]; all start together."""
    dist.barrier()
    time.sleep(naps_s[dist.get_rank()])
    return spot.run_until_preempted(step)


class Markers:
    """Things that have happened, for ranks that are forked: files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, name: str) -> None:
        (self._folder / name).touch()

    def await_(self, name: str, limit_s: float = LIMIT_S) -> None:
        """Wait until then, as a rank that generates does."""
        deadline = time.monotonic() + limit_s
        while not (self._folder / name).exists():
            assert time.monotonic() < deadline, f"{name} did not happen"
            time.sleep(0.001)
