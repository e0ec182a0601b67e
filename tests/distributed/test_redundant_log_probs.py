"""One update per batch with and without a log-prob pass before it: the same weights, metrics and tapped states, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import Layout, build_policy, export, scored_batch
from tests.no_shortcuts import WithLogprobPass
from tests.policy_batches import make_trainer
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TappedSequence

NUM_STEPS = 3
LAYOUTS = [
    (Layout(world=1), {}),
    (Layout(world=2), {}),
    (Layout(world=2, tensor=2), {}),
    (Layout(world=2, pipeline=2), {}),
    (Layout(world=2, pipeline=2), {"recompute": "full"}),
    (Layout(world=4, tensor=2, pipeline=2), {"recompute": "selective"}),
]
NAMES = ("tp1", "dp2", "tp2", "pp2", "pp2_recomputed", "tp2_pp2_selective")


def _run(
    path: Path, layout: Layout, mcore: dict[str, Any], dtype: str, kind: type[AlgorithmSection]
) -> Any:
    """Metrics of every step, tapped sequences and weights after the last."""
    policy, groups = build_policy(path, layout, dtype=dtype, keep_reference=True, **mcore)
    section = kind(advantage="rloo", tis_cap=2.0, kl_coef=0.1, entropy_coef=0.01)
    trainer = make_trainer(policy, section, groups, temperature=0.8)
    tapped: list[TappedSequence] = []
    steps = []
    for seed in range(NUM_STEPS):
        tap = HiddenStateTap(
            on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64, aux_layer_ids=(0, 2, 3)
        )
        inference = trainer.infer_logprobs(scored_batch(seed), tap)
        steps.append(inference.metrics | trainer.update(inference))
    states = [(s.token_ids, s.features, s.final_hidden, s.prompt_length) for s in tapped]
    return steps, states, export(policy)


@pytest.mark.parametrize(("layout", "mcore"), LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_the_redundant_pass_is_the_same_step(
    model_path: Path, layout: Layout, mcore: dict[str, Any], dtype: str
) -> None:
    always, auto = (
        run_ranks(layout.world, _run, model_path, layout, mcore, dtype, kind)
        for kind in (WithLogprobPass, AlgorithmSection)
    )
    for (steps, states, weights), (other_steps, other_states, other_weights) in zip(
        always, auto, strict=True
    ):
        assert steps == other_steps
        assert steps[0]["train/train_rollout_logprob_abs_diff"] > 0
        assert states, "every rank is given some"
        assert len(states) == len(other_states)
        for mine, theirs in zip(states, other_states, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name
