"""The state and the settings of the cost-model selector."""

from __future__ import annotations

import json

import pytest

from tests.synthetic_decoding import ARMS, SyntheticDecoding, long_tail, run_selector
from tlt_megatron.config.strategy import OFF
from tlt_megatron.speculation.cost_model import CostModelSelector

ROLLOUT = long_tail(64, scale=60)  # 64 requests, some 420 steps


def test_state_round_trip_repeats_every_choice() -> None:
    world, selector = SyntheticDecoding(seed=0), CostModelSelector(ARMS)
    run_selector(selector, world, ROLLOUT)
    restored = CostModelSelector(ARMS)
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    for step, size in enumerate(ROLLOUT):
        world.quality = 0.8 if step < 200 else 0.3
        decision = selector.choose(size)
        assert restored.choose(size) == decision
        strategy = decision.strategy
        accepted, seconds = world.step(strategy, size)
        counts = [sum(a >= d for a in accepted) for d in range(1, strategy.depth + 1)]
        for each in (selector, restored):
            each.observe(strategy, size, counts, seconds, counts[: strategy.num_steps])


def test_fresh_state_round_trip() -> None:
    restored = CostModelSelector(ARMS)
    restored.load_state_dict(json.loads(json.dumps(CostModelSelector(ARMS).state_dict())))
    assert restored.choose(3).strategy is OFF


def test_without_arms_decoding_is_plain() -> None:
    chosen = run_selector(CostModelSelector([OFF]), SyntheticDecoding(seed=0), [4] * 20).chosen
    assert set(chosen) == {OFF}


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="given twice"):
        CostModelSelector([ARMS[0], ARMS[0]])
