"""The advantages of a rank's share are those of one rank bit for bit, whatever the batch holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policy_batches import data_parallel_groups, make_trainer
from tests.ranks import run_ranks
from tests.unit.policy.test_observations import observed
from tests.unit.policy.test_policy_trainer import FakeModel, scored_batch
from tlt_megatron.config.schema import AlgorithmSection, CriticSection
from tlt_megatron.policy.critic import CriticTrainer
from tlt_megatron.policy.exchange import ResponseRow, part_of, row_of
from tlt_megatron.policy.policy_trainer import Inference
from tlt_megatron.rollout.open_responses import ScoredResponse
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups
from tlt_megatron.types import MicroBatch, Rollout, ScoredGroup, TokenValues, TurnCredit

MINE = """
import torch


def centered(rewards):
    mean = torch.cat([reward_T for group in rewards for reward_T in group]).mean()
    return [[(reward_T - mean).float() for reward_T in group] for group in rewards]
"""
KL = {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k2"}
KINDS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "mine")
NUM_GROUPS = 7


class FakeCritic:
    """Values that depend on the label alone."""

    def infer_values(self, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        return [TokenValues(values=torch.cos(each.labels.float())) for each in micro_batches]


def is_observed(rollout: Rollout, rows: str) -> bool:
    return rows == "observed" or (rows == "mixed" and sum(rollout.key) % 3 == 0)


def in_turns(rollout: Rollout) -> Rollout:
    """The response as two turns of a conversation with rewards."""
    first = rollout.num_generated // 2
    turns = (first, 0.1), (rollout.num_generated - first, -0.3)
    turns = tuple(TurnCredit(*turn) for turn in turns if turn[0])
    return dataclasses.replace(rollout, turns=turns)


def make_batch(rows: str, generated_by: int | None, num_ranks: int) -> list[ScoredGroup]:
    """The batch as a rank knows it, which has generated every num_ranks-th group. "empty": the
    environment answered nothing.
    """
    batch = []
    for number, group in enumerate(scored_batch(NUM_GROUPS)):
        rollouts = [observed(r) if is_observed(r, rows) else r for r in group.rollouts]
        if rows == "mixed":
            rollouts = [r if sum(r.key) % 2 else in_turns(r) for r in rollouts]
        if rows == "empty":
            masks = [torch.ones_like(r.token_ids, dtype=torch.bool) for r in rollouts]
            rollouts = [
                dataclasses.replace(r, loss_mask=m) for r, m in zip(rollouts, masks, strict=True)
            ]
        if generated_by not in (None, number % num_ranks):
            lines = [json.loads(json.dumps(row_of(ScoredResponse(r, 0.0, {})))) for r in rollouts]
            prompt = {"prompt_id": group.prompt.prompt_id, "prompt_ids": group.prompt.token_ids}
            rollouts = [
                dataclasses.replace(part_of(ResponseRow(*line)).rollout, **prompt) for line in lines
            ]
        batch.append(dataclasses.replace(group, rollouts=tuple(rollouts)))
    return batch


def infer(section: AlgorithmSection, rows: str, num_ranks: int) -> tuple[Inference, dict]:
    groups = data_parallel_groups() if num_ranks > 1 else ProcessGroups(world=SINGLE)
    rank = groups.world.rank if num_ranks > 1 else None
    critic: Any = CriticTrainer(FakeCritic(), CriticSection(), groups)
    trainer = make_trainer(
        FakeModel(groups), section, groups, critic=critic if section.has_critic else None
    )
    plan = trainer.plan(make_batch(rows, rank, num_ranks))
    values = trainer.infer_values(plan) if section.has_critic else None
    inference = trainer.infer_logprobs(plan, values=values)
    return inference, inference.metrics | trainer.update(inference)


@pytest.mark.parametrize("rows", ["plain", "mixed", "observed", "empty"])
@pytest.mark.parametrize("kl", [{}, KL], ids=("", "kl"))
@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_ranks_make_up_the_advantages_of_one(
    tmp_path: Path, kind: str, kl: dict[str, Any], rows: str
) -> None:
    """Observations are known to the rank that generated a response and to its owner alone."""
    if kind == "mine":
        (tmp_path / "mine.py").write_text(MINE)
        kind = f"{tmp_path}/mine.py:centered"
    section = AlgorithmSection(advantage=kind, gamma=0.9, lam=0.8, **kl)
    expected, metrics = infer(section, rows, 1)

    def on_rank(num_ranks: int) -> tuple[list[Any], dict[str, float]]:
        found, numbers = infer(section, rows, num_ranks)
        assert found.advantages.keys() == {rollout.key for rollout in found.plan.own}
        for name in ("advantages", "returns"):
            known, mine = getattr(expected, name), getattr(found, name)
            assert (known is None) == (mine is None)
            assert all(torch.equal(value_T, known[key]) for key, value_T in (mine or {}).items())
        return list(found.advantages), numbers

    for num_ranks in (2, 4) if rows == "mixed" else (2,):
        results = run_ranks(num_ranks, on_rank, num_ranks)
        assert sorted(key for keys, _ in results for key in keys) == sorted(expected.advantages)
        assert all(numbers == pytest.approx(metrics, rel=1e-5, abs=1e-6) for _, numbers in results)
