"""Routing replay: the engine returns the experts that each token of a response went to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.routes import open_mixture
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    VOCAB_SIZE,
    accept_lengths,
    at_random,
    engine_over,
    make_prompts,
    speculate,
    tokens_of,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.types import SamplingParams

STRATEGIES = [SpeculationStrategy.parse(text) for text in ("3_1_3", "3_2_6", "ngram_4")]


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3_moe", {"mlp_only_layers": [1]}), ("glm4_moe", {})]
)
def test_routes_are_those_of_transformers_also_of_verified_and_recomputed_tokens(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    path = make_tiny_hf(tmp_path, kind, num_layers=3, vocab_size=VOCAB_SIZE, **changes)
    prompts = make_prompts(3, 70, 9, seed=1)  # they take one page and two
    params = SamplingParams(num_samples=3, max_new_tokens=70, seed=5)
    few = {"max_batch_size": 4, "kv_cache_tokens": 640, "prefill_chunk_tokens": 16}
    plain = engine_over(path).generate(prompts, params, policy_version=1)
    assert all(rollout.routes is None for group in plain for rollout in group.rollouts)
    pressed = engine_over(path, routing_replay=True, **few)
    found = [pressed.generate(prompts, params, policy_version=1)]
    assert pressed.stats().num_preemptions > 0
    drafting = engine_over(path, routing_replay=True, max_batch_size=4)
    selector = at_random([OFF, *STRATEGIES], seed=2)
    speculate(drafting, STRATEGIES, selector=selector)
    found.append(drafting.generate(prompts, params, policy_version=1))
    assert max(accept_lengths(found[1])) > 1
    _, routes_of = open_mixture(path)
    for groups in found:
        assert tokens_of(groups) == tokens_of(plain)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert rollout.routes is not None
            assert torch.equal(rollout.routes.long().sort().values, routes_of(rollout))
