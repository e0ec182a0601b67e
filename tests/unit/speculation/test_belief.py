"""The Kalman filter, on examples worked by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tlt_megatron.speculation.belief import Belief


def test_measuring_one_informs_what_covaries() -> None:
    """Variances 1, covariance 0.5, noise 1: gains 1/2 and 1/4; variances 1/2 and 1 - 0.25/2 = 7/8."""
    belief = Belief(np.zeros(2), np.array([[1.0, 0.5], [0.5, 1.0]]))
    belief.learn(np.array([[1.0, 0.0]]), np.array([2.0]), np.array([1.0]))
    assert belief.mean_N == pytest.approx([1.0, 0.5])
    assert belief.covariance_NN.diagonal() == pytest.approx([0.5, 0.875])


def test_measurements_at_once_equal_measurements_in_turn() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    rows, innovations, noises = (
        rng.normal(size=(3, 4)),
        rng.normal(size=3),
        np.array([1.0, 0.3, 2.0]),
    )
    at_once, in_turn = Belief(np.zeros(4), root @ root.T), Belief(np.zeros(4), root @ root.T)
    at_once.learn(rows, innovations, noises)
    for row, innovation, noise in zip(rows, innovations, noises, strict=True):
        left = innovation - row @ in_turn.mean_N
        in_turn.learn(row[None], np.array([left]), np.array([noise]))
    assert at_once.mean_N == pytest.approx(in_turn.mean_N)
    assert at_once.covariance_NN == pytest.approx(in_turn.covariance_NN)


def test_time_blurs_towards_the_first_doubts_and_no_further() -> None:
    belief = Belief(np.zeros(1), np.array([[4.0]]))
    belief.learn(np.ones((1, 1)), np.array([1.0]), np.array([1e-6]))
    for _ in range(2000):
        belief.fade(0.01)
    assert belief.covariance_NN[0, 0] == pytest.approx(4.0, rel=1e-6)
    belief.relax(0, 0.5, 2.0)
    assert belief.mean_N[0] == pytest.approx(0.5)
    assert belief.covariance_NN[0, 0] == pytest.approx(0.25 * 4.0 + 0.75 * 2.0)
    belief.widen(0, 1.0, limit=2.0)
    assert belief.covariance_NN[0, 0] == pytest.approx(2.5)


def test_state_round_trip_is_exact() -> None:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(5, 5))
    belief, restored = Belief(rng.normal(size=5), root @ root.T), Belief(np.zeros(5), np.eye(5))
    belief.learn(rng.normal(size=(2, 5)), rng.normal(size=2), np.ones(2))
    restored.load_state_dict(json.loads(json.dumps(belief.state_dict())))
    assert (restored.mean_N == belief.mean_N).all()
    assert (restored.covariance_NN == belief.covariance_NN).all()
