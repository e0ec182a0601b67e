"""When a run is stopped: engines that disagree at the first batch, updates and weights that are not
finite.
"""

from __future__ import annotations

import math

import pytest
import torch

from tlt_megatron.policy.health import (
    EngineDifference,
    TrainingHealth,
    UnhealthyTrainingError,
)
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.types import OptimizerStats


def health(max_diff: float | None = None, rollout_dtype: str = "float32") -> TrainingHealth:
    return TrainingHealth(max_diff=max_diff, dtypes=("float32", rollout_dtype))


def difference(*nats: float) -> EngineDifference:
    rollout_N = torch.full((len(nats),), -1.0)
    return EngineDifference.of(rollout_N + torch.tensor(nats), rollout_N)


def check_updates(checks: TrainingHealth, step: int, norms: list[float], loss: float) -> None:
    stats = [
        OptimizerStats(grad_norm=norm, lr=0.1, is_skipped=not math.isfinite(norm)) for norm in norms
    ]
    checks.check_updates(step, stats, loss, SINGLE)


def test_difference_of_parts_is_that_of_the_whole() -> None:
    training_N, rollout_N = -torch.rand(2, 7)
    parts = [
        EngineDifference.of(training_N[part], rollout_N[part])
        for part in (slice(0, 3), slice(3, 3), slice(3, 7))
    ]
    metrics = EngineDifference.over(parts).metrics()
    probs_N = (training_N.exp() - rollout_N.exp()).abs()
    assert metrics == pytest.approx(
        {
            "train/train_rollout_logprob_abs_diff": float((training_N - rollout_N).abs().mean()),
            "train/train_rollout_logprob_abs_diff_max": float((training_N - rollout_N).abs().max()),
            "training/rollout_probs_diff_mean": float(probs_N.mean()),
            "training/rollout_probs_diff_max": float(probs_N.max()),
            "training/rollout_probs_diff_std": float(probs_N.std(correction=0)),
        },
        rel=1e-4,
    )


def test_nan_is_not_lost_in_maxima() -> None:
    whole = EngineDifference.over([difference(0.0), difference(math.nan, 0.1), difference(0.2)])
    assert all(math.isnan(value) for value in whole.metrics().values())


@pytest.mark.parametrize(
    ("rollout_dtype", "nats", "max_diff", "is_refused"),
    [
        ("float32", (5e-4, -5e-4), None, False),
        ("float32", (0.0, 2e-3), None, True),
        ("float64", (0.0, 2e-3), None, True),
        ("bfloat16", (0.0, 0.15), None, False),
        ("bfloat16", (0.15, -0.15), None, True),
        ("float32", (0.0, 2e-3), 0.01, False),
        ("bfloat16", (0.01, 0.01), 0.001, True),
        ("float32", (0.0, math.nan), None, True),
        ("bfloat16", (0.0, math.nan), None, True),
    ],
)
def test_engines_that_differ_stop_the_run(
    rollout_dtype: str, nats: tuple[float, ...], max_diff: float | None, is_refused: bool
) -> None:
    checks = health(max_diff, rollout_dtype)
    if is_refused:
        with pytest.raises(UnhealthyTrainingError, match=r"step 8: .* 2 sampled tokens differ"):
            checks.check_engines(8, difference(*nats))
    else:
        checks.check_engines(8, difference(*nats))


def test_engines_are_checked_at_the_first_batch_alone() -> None:
    checks = health()
    checks.check_engines(1, difference(0.0))
    checks.check_engines(2, difference(1.0))


def test_bad_updates_in_a_row_stop_the_run_whatever_the_steps() -> None:
    checks = health()
    check_updates(checks, 1, [math.inf, 1.0, math.nan], 0.1)
    check_updates(checks, 2, [math.inf], 0.1)
    with pytest.raises(UnhealthyTrainingError, match=r"step 3: 3 updates in a row .* norm inf"):
        check_updates(checks, 3, [math.inf], 0.1)


def test_a_good_update_starts_the_count_anew() -> None:
    checks = health()
    for step in range(10):
        check_updates(checks, step, [math.nan, math.nan, 1.0], 0.1)


@pytest.mark.parametrize("later", [1.0, math.nan])
def test_a_loss_that_stays_nan_stops_the_run(later: float) -> None:
    """Whether the gradients are finite or not."""
    checks = health()
    check_updates(checks, 1, [1.0], math.nan)
    check_updates(checks, 2, [later], math.nan)
    with pytest.raises(UnhealthyTrainingError, match="step 3: 3 updates in a row"):
        check_updates(checks, 3, [later], math.nan)
