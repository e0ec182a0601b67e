"""One RL step on a GPU that the trainer shares with an engine in another process: who frees and
takes memory when.

The GPU is pretended. Its trainer keeps what it freed until it gives its cache back, as torch's
allocator does. The sizes are those of the ledger for the 7B and 32B examples.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.config.test_example_settings import EXAMPLES, QWEN_7B, QWEN_32B, write_example
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.rewards.batch_rules import BatchRules
from tlt_megatron.runtime.memory_claim import MemoryLedger, Phase
from tlt_megatron.trainer import loop
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.trainer.memory_ledger import make_ledger
from tlt_megatron.types import SamplingParams

GPU_BYTES = 80 * 10**9


class SharedGpu:
    """What the two processes hold. Taking more than the GPU has is an error, as it is there."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.events: list[str] = []
        self.engine = self.live = self.cached = 0
        self.peak = 0

    def _sum(self, phase: Phase, *, of_engine: bool) -> int:
        engine = ("engine weights", "engine KV", "engine graphs")
        return sum(
            claim.num_bytes
            for claim in self._ledger.claims
            if phase in claim.phases and not claim.in_host
            if claim.name.startswith(engine) is of_engine
        )

    def note(self, event: str) -> None:
        self.events.append(event)
        total = self.engine + self.live + self.cached
        self.peak = max(self.peak, total)
        assert total <= GPU_BYTES, f"out of memory after {self.events}: {total / 1e9:.1f} GB"

    def enter(self, phase: Phase) -> None:
        """The trainer's part of `phase`; what it needs no more stays in its cache."""
        live = self._sum(phase, of_engine=False)
        self.cached = max(0, self.cached + self.live - live)
        self.live = live
        self.note(str(phase))

    def release_cached(self) -> None:
        self.cached = 0
        self.note("release")

    def sleep(self) -> None:
        self.engine = 0
        self.note("sleep")

    def wake(self) -> None:
        self.engine = self._sum(Phase.ROLLOUT, of_engine=True)
        self.note("wake")


def make_trainer(gpu: SharedGpu) -> RLTrainer:
    """The loop with parts that only take and free memory; the policy leaves its device by its own
    method.
    """
    policy = McorePolicyModel.__new__(McorePolicyModel)
    policy._offloads, policy._is_away = True, True
    policy._device = SimpleNamespace(is_cuda=True, release_cached=gpu.release_cached)
    policy._optimizer = SimpleNamespace(
        offload=lambda is_cuda: gpu.enter(Phase.ROLLOUT), reload=lambda is_cuda: None
    )

    def update(_: object) -> dict[str, float]:
        gpu.enter(Phase.UPDATE)
        return {}

    def collect(*_: object, **__: object) -> Any:
        gpu.enter(Phase.ROLLOUT)
        return SimpleNamespace(groups=[], metrics={}, carried=())

    inference = SimpleNamespace(metrics={})
    policy_trainer = SimpleNamespace(
        model=policy,
        critic=None,
        plan=lambda _: object(),
        infer_logprobs=lambda *_, **__: inference,
        update=update,
        engine_differences={},
    )
    sampler = SimpleNamespace(state_dict=dict, epoch=0, next_batch=lambda n: [])
    return RLTrainer(
        rules=BatchRules(num_prompts=1),
        sampling=SamplingParams(),
        engine_dtype=torch.float32,
        sampler=sampler,
        worker=SimpleNamespace(
            collect=collect,
            engine=SimpleNamespace(sleep=gpu.sleep, wake=gpu.wake),
            phases=lambda *_, **__: nullcontext(),
            replicas=None,
        ),
        policy_trainer=policy_trainer,
        drafter=None,
    )


@pytest.fixture(params=["qwen2_5_7b_8gpu", "qwen2_5_32b_slurm"])
def gpu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    sizes, world_size = (QWEN_7B, 8) if "7b" in request.param else (QWEN_32B, 32)
    config, device = write_example(tmp_path, EXAMPLES / f"{request.param}.yaml", sizes)
    shared = SharedGpu(make_ledger(config, world_size, device))
    monkeypatch.setattr(loop, "push_policy", lambda *_, **__: shared.enter(Phase.WEIGHT_SYNC) or {})
    shared.wake()
    return shared


def test_each_step_frees_before_it_takes(gpu: SharedGpu) -> None:
    trainer = make_trainer(gpu)
    for _ in range(2):
        gpu.events.clear()
        trainer.train_step()
        order = ["rollout", "sleep", "update", "rollout", "release", "wake", "weight_sync"]
        assert gpu.events == order  # the second rollout: the policy's part of it, while away
    assert gpu.peak > GPU_BYTES / 2


@pytest.mark.parametrize("gpu", ["qwen2_5_7b_8gpu"], indirect=True)
def test_an_engine_that_wakes_beside_the_cache_of_an_update_does_not_fit(gpu: SharedGpu) -> None:
    trainer = make_trainer(gpu)
    trainer.policy_trainer.model._device.release_cached = lambda: gpu.note("kept")
    with pytest.raises(AssertionError, match=r"out of memory after .*'kept', 'wake'"):
        trainer.train_step()
