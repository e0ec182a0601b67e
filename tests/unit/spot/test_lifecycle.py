"""The drafter's side of a step on one rank of two: what is trained, when it reaches the engine,
what a stop leaves behind.

All is real but the engine, which takes weights and draws nothing, and the other rank, which is
played by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from tests.policy_batches import make_rollout
from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE
from tests.spot_phases import make_drafter_trainer
from tlt_megatron.config.schema import SpotSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import load_drafter, load_trainer_state
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.engines.embedded.policy_weights import FreedWeights
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.spot.holdout import Comparison, Holdout
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.spot.rank_state import PhaseLog, ReplicaLayout, SpotRanks
from tlt_megatron.spot.session import version_of
from tlt_megatron.spot.spot_trainer import SpotReport, merge_metrics
from tlt_megatron.types import Rollout, SamplingParams

TWO = ReplicaLayout(2)
STRATEGIES = [SpeculationStrategy.parse("3_1_3")]
BATCH_TOKENS = 16


class Shelf:
    """As much of a RolloutEngine as a lifecycle uses."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, dict[str, Tensor]]] = []

    def load_drafter_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, checksum: int
    ) -> None:
        assert checksum_tensors(tensors.items()) == checksum
        self.loaded.append((version, {name: t.clone() for name, t in tensors.items()}))

    def drafted_ids(self) -> None:
        """All."""


class WatchedBuffer(DataBuffer):
    """Calls `before` with the number of batches of this step so far, ahead of each batch."""

    def before(self, count: int) -> None:
        """Nothing, unless a test replaces it."""

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self.count = 0

    def next_batch(self, max_tokens: int) -> DraftBatch | None:
        self.before(self.count)
        self.count += 1
        return super().next_batch(max_tokens)


class WatchedHoldout(Holdout):
    """Calls `before` ahead of a measurement. Every candidate is far better than what is
    published.
    """

    def before(self) -> None:
        """Nothing, unless a test replaces it."""

    def compare(
        self, trainer: DrafterTrainer, **weights: Mapping[str, Tensor]
    ) -> Comparison | None:
        self.before()
        found = super().compare(trainer, **weights)
        return found and replace(found, published_B=3.0 * found.candidate_B)


class Rank:
    """A lifecycle of rank 0. `finish_other` ends the rollout of its neighbour."""

    def __init__(self, folder: Path) -> None:
        self.store = dist.HashStore()
        self.engine = Shelf()
        self.trainer = make_drafter_trainer(batch_tokens=BATCH_TOKENS)
        section = SpotSection(enabled=True)
        self.buffer = WatchedBuffer(section, torch.float64)
        self.holdout = WatchedHoldout(self.engine, SamplingParams(), STRATEGIES)
        self.lifecycle = DrafterLifecycle(
            self.trainer,
            self.buffer,
            self.engine,
            self.holdout,
            ranks=SpotRanks(store=self.store, layout=TWO, rank=0, phase_timeout_s=180.0),
            world=SINGLE,
            timeline=Timeline(None, 0),
            run_dir=folder,
        )
        self.spot = self.lifecycle.spot
        self.spot.watch_s = 0.0

    def begin(self, step: int) -> None:
        """Begin step `step`, with the answers of this rank."""
        self.step = step
        self.lifecycle.start_step(step)
        for index in range(8):
            rollout, features = make_answer(100 * step + index)
            self.lifecycle.add_features(rollout, features)

    def finish_other(self) -> None:
        PhaseLog(replace(self.lifecycle.spot.ranks, rank=1), self.step).announce_finished()

    def train(self, num_updates: int) -> SpotReport:
        """Train until `num_updates` updates of this step are made; the stop comes right after the
        last.
        """

        def before(count: int) -> None:
            if count == num_updates:
                self.finish_other()

        self.buffer.before = before
        report = self.lifecycle.run_until_preempted(self.step)
        assert len(report.updates) == num_updates
        return report

    def run_steps(self, *steps: int) -> None:
        """Begin, train and publish each step, with two updates."""
        for step in steps:
            self.begin(step)
            self.train(2)
            self.publish()

    def publish(self) -> dict[str, float]:
        metrics = {"bubble/stall_s": 0.0}
        self.lifecycle.publish(metrics)
        return metrics

    def weights(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.trainer.model.state_dict().items()}


def make_answer(seed: int) -> tuple[Rollout, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (4 + seed % 5,), generator=generator)
    rollout = make_rollout((1, 2), tokens, (seed, 0))
    return rollout, torch.randn(rollout.num_tokens - 1, HIDDEN_SIZE, generator=generator)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    torch.set_num_threads(1)
    return Rank(tmp_path)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_step_has_trained_reaches_the_engine_at_the_end_of_the_next(rank: Rank) -> None:
    rank.begin(1)
    rank.train(3)
    trained = {name: tensor.clone() for name, tensor in rank.trainer.average.items()}
    assert not same(trained, rank.weights())
    first = rank.publish()
    assert rank.engine.loaded == []
    assert first["drafter/num_updates"] == 3
    rank.begin(2)
    rank.train(2)
    second = rank.publish()
    ((version, loaded),) = rank.engine.loaded
    assert version == second["drafter/version"] == 1
    assert second["drafter/holdout_tokens"] > 0
    assert same(loaded, trained)
    assert second["bubble/stall_s"] > 0


def test_an_idle_time_too_short_to_judge_the_candidate_publishes_nothing(rank: Rank) -> None:
    rank.run_steps(1)
    rank.begin(2)
    rank.holdout.before = rank.finish_other
    report = rank.lifecycle.run_until_preempted(2)
    assert report.updates == ()
    before = rank.weights()
    assert "drafter/holdout_tokens" not in rank.publish()
    assert rank.engine.loaded == []
    assert same(rank.weights(), before)  # measuring swaps weights in and out
    rank.holdout.before = lambda: None
    rank.begin(3)
    rank.train(1)
    assert rank.publish()["drafter/holdout_tokens"] > 0  # the same candidate is judged now


def test_passes_for_the_drafter_alone_run_only_if_the_engine_gives_no_states(rank: Rank) -> None:
    def own_passes() -> list[int]:
        return rank.lifecycle.make_tap().choose([9, 20, 9], ProcessGroups(world=SINGLE))

    rank.run_steps(1)  # with states from the engine
    assert own_passes() == []
    rank.step = 2
    rank.lifecycle.start_step(2)  # without
    rank.train(2)
    rank.publish()
    assert own_passes() == [1]


def test_restored_lifecycle_goes_on_as_the_saved_one(rank: Rank, tmp_path: Path) -> None:
    rank.run_steps(1, 2)
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    rank.lifecycle.save_into(folder)
    restored = Rank(tmp_path / "restored")
    restored.lifecycle.load_from(folder)
    assert same(restored.engine.loaded[-1][1], rank.engine.loaded[-1][1])
    assert version_of(restored.trainer) == version_of(rank.trainer)
    for one in (rank, restored):
        one.run_steps(3)
    assert version_of(restored.trainer) == version_of(rank.trainer)
    assert restored.buffer.state_dict()["values"] == rank.buffer.state_dict()["values"]
    (version, weights), (restored_version, restored_weights) = (
        one.engine.loaded[-1] for one in (rank, restored)
    )
    assert version == restored_version
    assert same(weights, restored_weights)
    rank.lifecycle.close()
    restored.lifecycle.close()


def test_failed_saves_of_the_drafter_are_logged_and_a_resume_starts_it_anew(
    rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    rank.run_steps(1, 2, 3)
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    rank.lifecycle.save_into(folder)
    assert f"{tmp_path / 'drafter'} was not written" in caplog.text
    assert "iter_0000003/drafter was not written" in caplog.text
    assert "drafter_data/rank_00000.safetensors was not written" in caplog.text
    assert not [path for path in folder.rglob("*") if path.is_file()]
    restored = Rank(tmp_path / "restored")
    restored.lifecycle.load_from(folder)
    assert "the drafter starts anew" in caplog.text
    assert restored.trainer.num_updates == 0
    rank.lifecycle.close()
    restored.lifecycle.close()


def test_what_publishing_saves_is_whole_though_the_engine_falls_asleep_at_once(
    rank: Rank, tmp_path: Path
) -> None:
    rank.run_steps(1, 2)
    model = rank.trainer.model
    borrowed = {"embedding_VD": model.embedding_VD, "lm_head_VD": model.lm_head_VD}
    contents = {name: tensor.clone() for name, tensor in borrowed.items()}
    asleep = FreedWeights(borrowed.values())
    rank.lifecycle.checkpointer.wait()
    asleep.restore()
    for name, tensor in borrowed.items():
        tensor.copy_(contents[name])
    saved = load_drafter(tmp_path / "drafter", dtype=torch.float64, **borrowed)
    assert same(saved.state_dict(), rank.engine.loaded[-1][1])
    state = load_trainer_state(tmp_path / "drafter")
    assert state is not None
    assert same(state, rank.trainer.state_dict())


def metrics_of(**values: float) -> dict[str, float]:
    of_spot = ("epochs", "broken", "updates", "preempt_ms", "out_of_memory", "groups_formed")
    names = ("bubble/used_s", "bubble/stall_s", *(f"spot/{name}" for name in of_spot))
    return dict.fromkeys(names, 0.0) | {
        name.replace("__", "/"): value for name, value in values.items()
    }


def test_an_update_of_two_members_counts_once_and_the_slowest_rank_is_the_stall() -> None:
    member = {"spot__updates": 2.0, "drafter__loss": 3.0, "drafter__accept_length": 1.5}
    metrics = merge_metrics(
        [
            metrics_of(bubble__stall_s=0.3),
            metrics_of(bubble__used_s=1.5, bubble__stall_s=0.1, **member),
            metrics_of(bubble__used_s=1.0, **member),
        ]
    )
    assert metrics["spot/updates"] == 2
    assert metrics["drafter/loss"] == 3.0
    assert metrics["drafter/accept_length"] == 1.5
    assert metrics["bubble/used_s"] == 2.5
    assert metrics["bubble/stall_s"] == 0.3


def test_the_metrics_of_a_rank_are_means_over_its_updates(rank: Rank) -> None:
    rank.begin(1)
    report = rank.train(3)
    metrics = report.metrics()
    assert metrics["spot/updates"] == 3
    assert metrics["spot/epochs"] == 1
    assert metrics["drafter/loss"] == pytest.approx(sum(s.loss for s in report.updates) / 3)
