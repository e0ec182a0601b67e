"""The policy trainer over a fake model: shares of data-parallel ranks make up the whole, numbers do
not depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.no_shortcuts import WithLogprobPass
from tests.policy_batches import data_parallel_groups, make_rollout, make_trainer, score
from tests.ranks import run_ranks
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import SINGLE, ProcessGroups
from tlt_megatron.types import (
    LossFunction,
    LossResult,
    MicroBatch,
    OptimizerStats,
    ScoredGroup,
    TokenLogprobs,
)

NUM_TOKENS = 9  # in the vocabulary of `scored_batch`


class FakeModel:
    """Log-probs that depend on the label alone: -label / 10, less 0.5 for the reference and 0.1 in
    an update, which follows its gradient. Remembers what it is asked."""

    def __init__(self, groups: ProcessGroups | None = None) -> None:
        self.table_V = -torch.arange(NUM_TOKENS).double() / 10
        self.dp = (groups or ProcessGroups(world=SINGLE)).dp
        # Whether a pass is the reference's, its responses and its tap.
        self.passes: list[tuple[bool, int, object | None]] = []
        self.updates: list[list[MicroBatch]] = []
        self.update_taps: list[object | None] = []
        self.gradients: list[Tensor] = []
        self._results: list[LossResult] = []

    def infer_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        reference: bool = False,
        tap: object | None = None,
    ) -> list[TokenLogprobs]:
        self.passes.append((reference, len(lengths_of(micro_batches)), tap))
        return [self._predict(batch, 0.5 if reference else 0.0) for batch in micro_batches]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        loss_fn: LossFunction,
        *,
        tap: object | None = None,
    ) -> dict[str, float]:
        self.updates.append(list(micro_batches))
        self.update_taps.append(tap)
        self.table_V.requires_grad_()
        self._results = [loss_fn(self._predict(batch, 0.1), batch) for batch in micro_batches]
        sums: dict[str, float] = {}
        for result in self._results:
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def optimizer_step(self, skipped_count: int = 0) -> OptimizerStats:
        zero = (0 * self.table_V).sum()
        total = sum((result.loss_sum for result in self._results), zero)
        (mine_V,) = torch.autograd.grad(total, self.table_V)
        count = sum(result.count for result in self._results) + skipped_count
        parts = gather_objects((mine_V, count), self.dp)
        gradient_V = torch.stack([part for part, _ in parts]).sum(0) / sum(n for _, n in parts)
        self.gradients.append(gradient_V)
        self.table_V = self.table_V.detach() - 0.5 * gradient_V
        return OptimizerStats(grad_norm=float(gradient_V.norm()), lr=0.5, is_skipped=False)

    def _predict(self, batch: MicroBatch, shift: float) -> TokenLogprobs:
        """The entropy is 1; its gradient is that of the log-prob."""
        logprobs = self.table_V[batch.labels] - shift
        entropy = 1 + logprobs - logprobs.detach()
        return TokenLogprobs(logprobs=logprobs, entropy=entropy, policy_logprobs=logprobs.detach())


def lengths_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    return [n for batch in micro_batches for n in batch.cu_seqlens.diff().tolist()]


def scored_batch(num_groups: int = 5) -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(2)
    batch = []
    for i in range(num_groups):
        rollouts = []
        for g in range(3):
            tokens = torch.randint(0, NUM_TOKENS, (2 + 3 * g + i,), generator=generator)
            logprobs = -tokens.float() / 10
            known = {"logprobs": logprobs, "policy_logprobs": logprobs - 0.25}
            rollouts.append(make_rollout((1, 2, 3), tokens, (i, g), **known))
        batch.append(score(rollouts, (1.0, 0.0, float(i % 2))))
    return batch


def run(
    section: AlgorithmSection, groups: ProcessGroups | None = None, micro_batch_tokens: int = 20
) -> tuple[dict, dict, list[list[MicroBatch]]]:
    model = FakeModel(groups)
    trainer = make_trainer(model, section, groups, micro_batch_tokens=micro_batch_tokens)
    inference = trainer.infer_logprobs(trainer.plan(scored_batch()))
    return inference.metrics, trainer.update(inference), model.updates


SECTIONS = [
    AlgorithmSection(num_minibatches=2, num_epochs=2),
    AlgorithmSection(advantage="rloo", aggregation="sequence_mean", kl_coef=0.1, tis_cap=2.0),
    AlgorithmSection(advantage="reinforce_plus_plus", kl_coef=0.1, kl_placement="reward"),
    AlgorithmSection(loss="gspo", aggregation="sequence_mean", clip_high=0.05, num_minibatches=2),
    AlgorithmSection(loss="cispo", clip_low=1.0, num_epochs=2),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.advantage}-{s.loss}")
def test_metrics_and_updates_do_not_depend_on_the_number_of_ranks(
    section: AlgorithmSection,
) -> None:
    inferred, updated, calls = run(section)
    for mine in run_ranks(3, lambda: run(section, data_parallel_groups())):
        assert mine[0] == pytest.approx(inferred)
        assert mine[1] == pytest.approx(updated, rel=1e-5, abs=1e-6)
        assert len(mine[2]) == len(calls)
    assert updated["actor/num_updates"] == section.num_minibatches * section.num_epochs


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.advantage}-{s.loss}")
def test_metrics_do_not_depend_on_how_the_batch_is_cut(section: AlgorithmSection) -> None:
    _, updated, calls = run(section)
    for micro_batch_tokens in (1, 45, 10_000):
        _, other, cuts = run(section, micro_batch_tokens=micro_batch_tokens)
        assert [len(update) for update in cuts] != [len(update) for update in calls]
        assert other == pytest.approx(updated, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("section", "nats"), [(WithLogprobPass(), 0.25), (AlgorithmSection(), 0.15)]
)
def test_a_rank_knows_the_difference_of_every_response_of_its_share(
    section: AlgorithmSection, nats: float
) -> None:
    """The fake differs by 0.25 in the log-prob pass, and by 0.15 in the pass of the update."""

    def on_rank() -> dict[tuple[int, int], float]:
        groups = data_parallel_groups()
        trainer = make_trainer(FakeModel(groups), section, groups)
        trainer.update(trainer.infer_logprobs(trainer.plan(scored_batch())))
        return trainer.engine_differences

    expected = {(group, sample): nats for group in range(5) for sample in range(3)}
    one, other = run_ranks(2, on_rank)
    assert not one.keys() & other.keys()
    assert one | other == pytest.approx(expected)


def test_update_uses_the_old_logprobs_of_the_log_prob_pass() -> None:
    """The fake's policy has moved by -0.1 since: the mean log-ratio, whatever the rollout engine
    said.
    """
    section = WithLogprobPass()
    updated = run(section)[1]
    assert updated["actor/ppo_kl"] == pytest.approx(0.1, rel=1e-5)
    assert updated["actor/entropy"] == pytest.approx(1.0)


def test_in_the_reward_the_default_estimate_of_kl_is_the_log_ratio() -> None:
    """It is 0.5 at every token of the fake model. Each token takes a tenth of it off the reward of
    its response.
    """
    section = AlgorithmSection(advantage="dr_grpo", kl_coef=0.1, kl_placement="reward")
    trainer = make_trainer(FakeModel(), section)
    advantages = trainer.infer_logprobs(trainer.plan(scored_batch(num_groups=1))).advantages
    # rewards 1, 0, 0 and 2, 5, 8 tokens: 1 - 0.1, -0.25 and -0.4, with the mean 0.25 / 3
    found = [float(advantages[0, g][0]) for g in range(3)]
    expected = [0.9 - 0.25 / 3, -0.25 - 0.25 / 3, -0.4 - 0.25 / 3]
    assert found == pytest.approx(expected, rel=1e-5)


POLICY, REFERENCE = False, True


@pytest.mark.parametrize(
    ("section", "passes"),
    [
        (AlgorithmSection(), []),
        (AlgorithmSection(tis_cap=2.0), []),
        (AlgorithmSection(kl_coef=0.1), [REFERENCE]),
        (WithLogprobPass(), [POLICY]),
        (WithLogprobPass(kl_coef=0.1), [POLICY, REFERENCE]),
        (AlgorithmSection(num_epochs=2), [POLICY]),
        (AlgorithmSection(num_minibatches=2), [POLICY]),
        (AlgorithmSection(kl_coef=0.1, kl_placement="reward"), [POLICY, REFERENCE]),
    ],
)
def test_log_probs_are_computed_first_where_the_update_cannot_know_them(
    section: AlgorithmSection, passes: list[bool]
) -> None:
    """The first pass of the policy is tapped: one before the update, or the update's."""
    model, tap = FakeModel(), object()
    trainer = make_trainer(model, section)
    trainer.update(trainer.infer_logprobs(trainer.plan(scored_batch()), tap), tap)
    assert model.passes == [(which, 15, None if which is REFERENCE else tap) for which in passes]
    assert set(model.update_taps) == {None if POLICY in passes else tap}


def test_without_a_log_prob_pass_every_ratio_is_one_and_the_metrics_are_there() -> None:
    inferred, updated, _ = run(AlgorithmSection(tis_cap=2.0))
    assert {name.partition("/")[0] for name in inferred} == {"critic"}  # the advantages' alone
    assert updated["actor/ppo_kl"] == 0
    assert updated["actor/pg_clipfrac"] == 0
    # The fake's update says 0.1 less than the rollouts' distribution, and 0.15 more than their raw
    # policy.
    assert updated["actor/tis_weight"] == pytest.approx(math.exp(-0.1), rel=1e-5)
    assert updated["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        *(
            (result, "returned the shapes .* for prompt . of the batch")
            for result in (
                *("[g[:1] for g in rewards]", "rewards[:2]", "[[g[0]] * 3 for g in rewards]"),
                *("[None for g in rewards]", "[[1.0] * 3 for g in rewards]"),
            )
        ),
        ("None", "returned None, must be a list"),
        ("rewards[99]", r"raised IndexError\("),
    ],
)
def test_a_users_advantage_that_fails_is_named(tmp_path: Path, result: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"def wrong(rewards):\n    return {result}\n")
    section = AlgorithmSection(advantage=f"{tmp_path}/mine.py:wrong")
    name = r"algorithm\.advantage='.*mine\.py:wrong': "
    with pytest.raises((ValueError, RuntimeError), match=name + message):
        run(section)
