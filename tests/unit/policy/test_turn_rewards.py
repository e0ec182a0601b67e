"""Rewards of turns stand at the last token of each turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.policy_batches import make_rollout, score
from tlt_megatron.config.extensions import load_code
from tlt_megatron.config.schema import AlgorithmSection, RunConfig
from tlt_megatron.policy.advantages import compute_advantages
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.types import Rollout, RolloutKey, ScoredGroup, TurnCredit

GAMMA, LAM = 0.9, 0.7
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
TURNS = {  # of each response: policy tokens and rewards
    # the second observation is empty, so the mask shows one turn less
    (0, 0): ((2, 0.25), (2, 0.5), (1, -1.0), (1, 0.125)),
    (0, 1): ((2, 0.0), (3, 0.75), (1, 0.0)),
    (1, 0): (),  # no environment
    (1, 1): ((6, 2.0),),
}
REWARDS = {(0, 0): 0.5, (0, 1): 0.75, (1, 0): 1.0, (1, 1): -1.0}


def make_batch() -> list[ScoredGroup]:
    batch = []
    for draw in range(2):
        rollouts = []
        for sample in range(2):
            key = draw, sample
            rollout = make_rollout((1, 2), torch.arange(9), key, loss_mask=MASK)
            turns = tuple(TurnCredit(*turn) for turn in TURNS[key])
            rollouts.append(replace(rollout, turns=turns))
        batch.append(score(rollouts, [REWARDS[draw, sample] for sample in range(2)]))
    return batch


def rewards_by_hand(key: RolloutKey) -> list[float]:
    rewards, position = [0.0] * 6, 0
    for length, reward in TURNS[key]:
        position += length
        rewards[position - 1] += reward
    rewards[-1] += REWARDS[key] - sum(reward for _, reward in TURNS[key])
    return rewards


def credit_by_hand(rewards: list[float], values: list[float], lam: float) -> list[float]:
    found, later = [0.0] * 6, 0.0
    for t in reversed(range(6)):
        following = values[t + 1] if t < 5 else 0.0
        later = rewards[t] + GAMMA * following - values[t] + GAMMA * lam * later
        found[t] = later
    return found


@pytest.mark.parametrize("kind", ["gae", "reinforce_plus_plus"])
def test_credit_of_tokens_equals_the_formula(kind: str) -> None:
    batch = make_batch()
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    values = {r.key: torch.cos(torch.arange(9.0) + sum(r.key)) for r in rollouts}
    section = AlgorithmSection(advantage=kind, gamma=GAMMA, lam=LAM)
    known = values if kind == "gae" else None
    found, returns = compute_advantages(batch, section, rollouts, {}, known, SINGLE)
    raw = {}
    for key in TURNS:
        own = values[key][MASK].tolist() if known else [0.0] * 6
        raw[key] = credit_by_hand(rewards_by_hand(key), own, LAM if known else 1.0)
    every = torch.tensor(list(raw.values()), dtype=torch.float64)
    for key, credit in raw.items():
        expected_T = (torch.tensor(credit).double() - every.mean()) / (every.std() + 1e-6)
        assert torch.allclose(found[key][MASK].double(), expected_T, atol=1e-6)
        assert not found[key][~MASK].any()
        if returns is not None:
            whole_T = torch.tensor(credit) + values[key][MASK]
            assert torch.allclose(returns[key][MASK], whole_T, atol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_functions_that_compare_siblings_take_the_sum(kind: str) -> None:
    def advantages(batch: list[ScoredGroup]) -> list[Tensor]:
        rollouts = [rollout for group in batch for rollout in group.rollouts]
        found, _ = compute_advantages(
            batch, AlgorithmSection(advantage=kind), rollouts, {}, None, SINGLE
        )
        return list(found.values())

    def without(rollout: Rollout) -> Rollout:
        return replace(rollout, turns=())

    batch = make_batch()
    plain = [replace(g, rollouts=tuple(map(without, g.rollouts))) for g in batch]
    for one, other in zip(advantages(batch), advantages(plain), strict=True):
        assert torch.equal(one, other)


OWN = """
def of_turns(rewards, groups, power=1):
    assert [len(rollout.turns) for group in groups for rollout in group.rollouts] == [4, 3, 0, 1]
    assert [group.prompt.prompt_id for group in groups] == ["0", "1"]
    assert groups[0].details[0] == {"own": 1}
    return [[power * reward_T for reward_T in group] for group in rewards]


def needs_more(rewards, groups, other):
    return rewards
"""


def test_a_function_of_the_user_gets_groups_and_rewards_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path}/own.py:of_turns"
    batch = [replace(group, details=({"own": 1}, {"own": 2})) for group in make_batch()]
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    section = AlgorithmSection(advantage=spec, advantage_args={"power": 2})
    found, _ = compute_advantages(batch, section, rollouts, {}, None, SINGLE)
    for key in TURNS:
        assert found[key][MASK].tolist() == pytest.approx([2 * r for r in rewards_by_hand(key)])
    load_code(RunConfig(algorithm=section), "algorithm.advantage", spec)
    for args, why in (({"groups": 1}, "groups"), ({"none": 1}, "none")):
        config = RunConfig(algorithm=replace(section, advantage_args=args))
        with pytest.raises(ValueError, match=rf"algorithm.advantage_args=.*{why}"):
            load_code(config, "algorithm.advantage", spec)
    other = f"{tmp_path}/own.py:needs_more"
    config = RunConfig(algorithm=AlgorithmSection(advantage=other))
    with pytest.raises(ValueError, match="missing a required argument: 'other'"):
        load_code(config, "algorithm.advantage", other)
