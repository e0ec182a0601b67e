"""Responses of zero advantage take no pass in the update, and no bit of the trained policy changes.

Every response is a micro-batch of its own, and those with an advantage are the longest. So both runs add the same numbers in
the same order, and the skipped ones would have added exact zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore_policy import VOCAB_SIZE, Layout, build_policy, export
from tests.no_shortcuts import WithEveryPass, WithLogprobPass, WithoutSkipping
from tests.policy_batches import make_trainer, random_batch
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TappedSequence
from tlt_megatron.types import ScoredGroup

# The reward of each response is the advantage of its last token. Of six responses in each step,
# three have one, then one (so a data-parallel rank has none), then none, then two.
REWARDS = (
    ((1.0, 0.0), (-0.5, 0.0), (0.0, 2.0)),
    ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0)),
    ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    ((0.0, 1.0), (0.0, 0.0), (-1.0, 0.0)),
)
NUM_COMPUTED = (3, 1, 3, 2)  # without any advantage, the first response to each prompt
LAYOUTS = {
    "dp2": (Layout(world=2), (WithoutSkipping, AlgorithmSection)),
    "tp2": (Layout(world=2, tensor=2), (WithoutSkipping, AlgorithmSection)),
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


def _run(path: Path, layout: Layout, section: AlgorithmSection) -> Any:
    """Metrics of every step, tokens of the tapped sequences, and the weights after the last."""
    policy, groups = build_policy(path, layout)
    trainer = make_trainer(policy, section, groups, micro_batch_tokens=1, temperature=0.8)
    tapped: list[TappedSequence] = []
    steps = []
    for step in range(len(REWARDS)):
        tap = HiddenStateTap(on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64)
        inference = trainer.infer_logprobs(_scored_batch(step), tap)
        steps.append(inference.metrics | trainer.update(inference))
    return steps, [tuple(s.token_ids.tolist()) for s in tapped], export(policy)


@pytest.mark.parametrize(("layout", "kinds"), LAYOUTS.values(), ids=LAYOUTS)
def test_skipping_changes_no_bit(
    model_path: Path, tmp_path: Path, layout: Layout, kinds: tuple[type[AlgorithmSection], ...]
) -> None:
    (tmp_path / "mine.py").write_text("def as_they_are(rewards):\n    return rewards\n")
    computed, skipped = (
        run_ranks(
            layout.world,
            _run,
            model_path,
            layout,
            kind(advantage=f"{tmp_path}/mine.py:as_they_are", tis_cap=2.0),
        )
        for kind in kinds
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
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name
    # The drafter gets what is computed and the long tail.
    before, after = ({t for _, found, _ in run for t in found} for run in (computed, skipped))
    assert len(before) == 6 * len(REWARDS)
    assert len(after) == len(before) if WithLogprobPass in kinds else sum(NUM_COMPUTED) < len(after)
    assert after <= before
