"""Shortcuts of the update change nothing, bit for bit: one update per batch without a log-prob pass
before it, and responses of zero advantage that take no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import (
    VOCAB_SIZE,
    Layout,
    build_policy,
    check_same_bits,
    export,
    scored_batch,
)
from tests.no_shortcuts import WithEveryPass, WithLogprobPass, WithoutSkipping
from tests.policy_batches import make_trainer, random_batch
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.types import DraftSequence, ScoredGroup


def _run(
    path: Path,
    layout: Layout,
    section: AlgorithmSection,
    batches: Sequence[list[ScoredGroup]],
    micro_batch_tokens: int = 20,
    **options: Any,
) -> Any:
    """Metrics of every step, tapped sequences and weights after the last."""
    policy, groups = build_policy(path, layout, **options)
    settings = {"micro_batch_tokens": micro_batch_tokens, "temperature": 0.8}
    trainer = make_trainer(policy, section, groups, **settings)
    tapped: list[DraftSequence] = []
    steps = []
    for batch in batches:
        tap = HiddenStateTap(
            on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64, aux_layer_ids=(0, 2, 3)
        )
        inference = trainer.infer_logprobs(trainer.plan(batch), tap)
        steps.append(inference.metrics | trainer.update(inference, tap))
    states = [(s.token_ids, s.features, s.final_hidden, s.loss_start) for s in tapped]
    return steps, states, export(policy)


@pytest.mark.parametrize(
    ("layout", "mcore", "dtype"),
    [
        (Layout(world=1), {}, "bfloat16"),
        (Layout(world=2), {}, "float32"),
        (Layout(world=2, context=2), {}, "bfloat16"),
        (Layout(world=2, pipeline=2), {"recompute": "full"}, "bfloat16"),
        (Layout(world=4, tensor=2, pipeline=2), {"recompute": "selective"}, "bfloat16"),
        (Layout(world=2, pipeline=2, virtual=2), {}, "float32"),
    ],
    ids=str,
)
def test_a_step_without_the_redundant_pass_is_the_same_step(
    model_path: Path, layout: Layout, mcore: dict[str, Any], dtype: str
) -> None:
    batches = [scored_batch(seed) for seed in range(3)]

    def run(kind: type[AlgorithmSection]) -> Any:
        section = kind(advantage="rloo", tis_cap=2.0, kl_coef=0.1, entropy_coef=0.01)
        options = {"dtype": dtype, "keep_reference": True} | mcore
        return _run(model_path, layout, section, batches, **options)

    always, auto = (
        run_ranks(layout.world, run, kind) for kind in (WithLogprobPass, AlgorithmSection)
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
        check_same_bits(other_weights, weights)


# Skipped responses: every response is a micro-batch of its own, and those with an advantage are the
# longest. So both runs add the same numbers in the same order, and the skipped ones would have
# added exact zeros. The reward of each response is the advantage of its last token. Of six
# responses in each step, three have one, then one (so a data-parallel rank has none), then none,
# then two.
REWARDS = (
    ((1.0, 0.0), (-0.5, 0.0), (0.0, 2.0)),
    ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0)),
    ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    ((0.0, 1.0), (0.0, 0.0), (-1.0, 0.0)),
)
NUM_COMPUTED = (3, 1, 3, 2)  # without any advantage, the first response to each prompt
SKIPPING = {
    "dp2": (Layout(world=2), (WithoutSkipping, AlgorithmSection)),
    "pp2": (Layout(world=2, pipeline=2), (WithoutSkipping, AlgorithmSection)),
    "dp2_log_probs_first": (Layout(world=2), (WithEveryPass, WithLogprobPass)),
}


def _scored_batch(step: int) -> list[ScoredGroup]:
    rewards = REWARDS[step]
    lengths = [
        [2 + 2 * i + g + 10 * bool(reward) for g, reward in enumerate(row)]
        for i, row in enumerate(rewards)
    ]
    return random_batch(step, VOCAB_SIZE, lengths, rewards)


@pytest.mark.parametrize(("layout", "kinds"), SKIPPING.values(), ids=SKIPPING)
def test_skipping_changes_no_bit(
    model_path: Path, tmp_path: Path, layout: Layout, kinds: tuple[type[AlgorithmSection], ...]
) -> None:
    (tmp_path / "mine.py").write_text("def as_they_are(rewards):\n    return rewards\n")
    batches = [_scored_batch(step) for step in range(len(REWARDS))]
    sections = [kind(advantage=f"{tmp_path}/mine.py:as_they_are", tis_cap=2.0) for kind in kinds]
    computed, skipped = (
        run_ranks(layout.world, _run, model_path, layout, section, batches, 1)
        for section in sections
    )
    for (steps, _, weights), (other_steps, _, other_weights) in zip(computed, skipped, strict=True):
        for step, other, count in zip(steps, other_steps, NUM_COMPUTED, strict=True):
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert step[name] == other[name], name
            assert step.keys() == other.keys()
            assert step["actor/skipped_response_share"] == 0
            assert other["actor/skipped_response_share"] == pytest.approx(1 - count / 6)
            assert other["train/train_rollout_logprob_abs_diff"] > 0
        assert [step["actor/grad_norm"] > 0 for step in steps] == [True, True, False, True]
        check_same_bits(other_weights, weights)
    # The drafter gets what is computed and the long tail.
    before, after = (
        {tuple(token_ids.tolist()) for _, states, _ in ranks for token_ids, *_ in states}
        for ranks in (computed, skipped)
    )
    assert len(before) == 6 * len(REWARDS)
    assert len(after) == len(before) if WithLogprobPass in kinds else sum(NUM_COMPUTED) < len(after)
    assert after <= before
