"""The roofline that is fitted on the paper's table 4."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.bench.paper import Fit, fit

BATCH_1 = {16: 3.22, 32: 3.46, 48: 3.56, 64: 3.62}  # speedups at draft depth 10


def _error(found: Fit) -> float:
    """Return the sum of what the fit makes least: squared errors of a speculative pass's seconds
    x speedup.
    """
    accepted = (6.80, 7.63, 7.97, 8.21)
    return sum(
        (found.speculative(1, 10, verify) - a * found.plain(1) / speedup) ** 2
        for a, (verify, speedup) in zip(accepted, BATCH_1.items(), strict=True)
    )


@pytest.mark.parametrize("name", ["pass_s", "draft_s"])
def test_no_other_overhead_fits_the_batch_1_column_better(name: str) -> None:
    found = fit()
    for factor in (0.9, 1.1):
        other = replace(found, **{name: factor * getattr(found, name)})
        assert _error(other) > _error(found)


def test_the_fitted_column_is_met_within_2_percent() -> None:
    found = fit()
    computed = [found.speedup(1, 10, verify) for verify in BATCH_1]
    assert computed == pytest.approx(list(BATCH_1.values()), rel=0.02)


def test_a_rollout_speculates_only_below_32_requests() -> None:
    found = fit()
    plain_s, tlt_s = found.rollout_s([2] * 32)
    assert plain_s == tlt_s == found.plain(32)
    plain_s, tlt_s = found.rollout_s([2])
    assert plain_s / tlt_s == pytest.approx(found.speedup(1, 10, 64))
