"""The prompts that measure the gain of speculation: those of the latest steps, in the rounds in which they were generated."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_megatron.rewards.dapo import BatchRules
from tlt_megatron.trainer import loop
from tlt_megatron.trainer.loop import RLTrainer


def test_each_round_of_a_step_is_timed_as_a_batch_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six steps, each with three prompts and then two more by dynamic sampling."""
    drawn = 0

    def next_batch(count: int) -> list[Any]:
        nonlocal drawn
        drawn += count
        return list(range(drawn - count, drawn))

    def collect(*_: object, plan: Any, **__: object) -> Any:
        plan.draw(2)

    measured: list[list[int]] = []

    def measure(_: object, batches: Any, *__: object, **___: object) -> None:
        measured.extend(batches)

    monkeypatch.setattr(loop, "measure_gain", measure)
    trainer = RLTrainer(
        SimpleNamespace(
            batch=BatchRules(num_prompts=3, max_rounds=2, metric="reward"),
            sampling=None,
            stream_update=False,
        ),
        sampler=SimpleNamespace(state_dict=dict, next_batch=next_batch),
        worker=SimpleNamespace(
            engine=None,
            phases=lambda *_, **__: nullcontext(),
            replicas=None,
            collect=collect,
            should_stop=None,
        ),
        policy_trainer=None,
        evaluator=None,
        checkpoints=None,
        drafter=None,
        report=None,
    )
    for _ in range(6):
        trainer._collect()
    trainer.measure_gain()
    latest = [[10, 11, 12], [13, 14], [15, 16, 17], [18, 19]]
    assert measured == [*latest, [20, 21, 22], [23, 24], [25, 26, 27], [28, 29]]
