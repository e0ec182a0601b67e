"""Chances that a draft is accepted, against values worked by hand."""

from __future__ import annotations

import pytest
import torch

from tools.bench.coupling import acceptances, shared_noise


def test_shared_noise_on_two_tokens() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): 1 / (1 + max(1/3, 1)) + 1 / (1 + max(3, 1)) = 1/2 + 1/4."""
    p, q = torch.tensor([[0.75, 0.25]]).double(), torch.tensor([[0.5, 0.5]]).double()
    assert shared_noise(p, q).item() == pytest.approx(0.75)
    assert shared_noise(p, p).item() == pytest.approx(1.0)


def test_schemes_on_equal_and_on_disjoint_distributions() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 0.0, 0.4, 0.3, 0.2, 0.1]])
    generator = torch.Generator().manual_seed(0)
    equal, disjoint = acceptances(p, p, generator), acceptances(p, q, generator)
    for name in ("1: rejection, sampled draft (1 - TV)", "2: SpecInfer, sampled drafts"):
        assert equal[name] == pytest.approx(1.0)
    assert equal["1: shared noise"] == pytest.approx(1.0)
    assert equal["1: independent draws"] == pytest.approx(0.25 + 0.09 + 0.04)
    assert equal["2: greedy drafts"] == pytest.approx(0.8)
    assert all(value == pytest.approx(0.0, abs=1e-6) for value in disjoint.values())
