"""One RL step on a GPU that the trainer shares with an engine in another process: who frees and
takes memory when, and why the order matters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.config.test_example_settings import EXAMPLES, QWEN_7B, write_example
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.rollout.batch_rules import BatchRules
from tlt_megatron.runtime.memory_claim import Phase
from tlt_megatron.trainer import loop
from tlt_megatron.trainer.before.memory_ledger import make_ledger
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.types import SamplingParams


def make_trainer(events: list[str]) -> RLTrainer:
    """The loop with parts that only note what they do. The policy leaves its device by its own
    method.
    """

    def noting(event: str, result: object = None) -> Callable[..., Any]:
        return lambda *_, **__: events.append(event) or result

    policy = McorePolicyModel.__new__(McorePolicyModel)
    policy._offloads, policy._is_away = True, True
    policy._stage = []
    policy._device = SimpleNamespace(
        is_cuda=True, torch_device=torch.device("cpu"), release_cached=noting("release")
    )
    policy._optimizer = SimpleNamespace(offload=noting("offload"), reload=noting("reload"))
    collected = SimpleNamespace(groups=[], metrics={}, carried=())
    inference = SimpleNamespace(metrics={})
    return RLTrainer(
        rules=BatchRules(num_prompts=1),
        sampling=SamplingParams(),
        engine_dtype=torch.float32,
        sampler=SimpleNamespace(state_dict=dict, epoch=0, next_batch=lambda n: []),
        worker=SimpleNamespace(
            collect=noting("rollout", collected),
            engine=SimpleNamespace(sleep=noting("sleep"), wake=noting("wake")),
            phases=lambda *_, **__: nullcontext(),
            replicas=None,
        ),
        policy_trainer=SimpleNamespace(
            model=policy,
            critic=None,
            plan=lambda _: object(),
            infer_logprobs=lambda *_, **__: inference,
            update=noting("update", {}),
            engine_differences={},
        ),
        drafter=None,
    )


def test_each_step_frees_before_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(loop, "push_policy", lambda *_, **__: events.append("weight_sync") or {})
    trainer = make_trainer(events)
    for _ in range(2):
        events.clear()
        trainer.train_step()
        learns = ["reload", "update", "offload"]
        assert events == ["rollout", "sleep", *learns, "release", "wake", "weight_sync"]


def test_an_engine_that_wakes_beside_the_cache_of_an_update_does_not_fit(tmp_path: Path) -> None:
    """7B on GPUs of 80 GB, of which no phase alone takes as much."""
    config, gpu = write_example(tmp_path, EXAMPLES / "qwen2_5_7b_8gpu.yaml", QWEN_7B)
    ledger = make_ledger(config, 8, gpu)
    engine = ("engine weights", "engine KV", "engine graphs")
    awake = sum(c.num_bytes for c in ledger.claims if c.name.startswith(engine))
    assert max(map(ledger.bytes_in, Phase)) < 80e9 < ledger.bytes_in(Phase.UPDATE) + awake
