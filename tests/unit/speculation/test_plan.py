"""Which arm runs and which are worth trying, for beliefs given by hand. Arms: plain and two that draft."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tlt_megatron.speculation.acceptance_model import AcceptanceEstimates
from tlt_megatron.speculation.plan import Plan, make_plan
from tlt_megatron.speculation.step_cost import CostEstimates


def plan_of(
    tokens: list[float], doubts: list[float], *, shared: float = 0.0, **settings: object
) -> Plan:
    """Steps of 1 s. `doubts`: variances of log tokens of the two arms, `shared` their covariance."""
    cost = CostEstimates(seconds_S=np.ones(3), covariance_SS=np.zeros((3, 3)))
    covariance = np.array([[doubts[0], shared], [shared, doubts[1]]])
    accepted = AcceptanceEstimates(
        mean_S=np.array(tokens) - 1.0, variance_S=np.ones(2), covariance_SS=covariance
    )
    defaults = {"is_on": False, "hysteresis": 0.02, "caution": 1.0, "horizon": 100.0}
    return make_plan(64, cost, accepted, [0, 0, 0], [0.0, 0.0, 0.0], **(defaults | settings))


def test_uncertain_gain_is_tried_but_not_relied_upon() -> None:
    plan = plan_of([1.3, 0.9], [0.25, 1e-6])
    assert plan.best == 0
    assert plan.trials[0][0] == 1
    assert plan_of([1.3, 0.9], [0.01, 1e-6]).best == 1


def test_hysteresis_keeps_what_runs() -> None:
    tokens, doubts = [math.exp(0.1), 0.5], [1e-8, 1e-8]
    assert plan_of(tokens, doubts, hysteresis=0.2, is_on=False).best == 0
    assert plan_of(tokens, doubts, hysteresis=0.2, is_on=True).best == 1


def test_arm_that_is_surely_worse_is_not_tried() -> None:
    assert plan_of([2.0, 1.6], [1e-4, 1e-4]).trials == []


def test_what_the_running_arm_teaches_anyway_is_not_worth_a_trial() -> None:
    """The same doubt about the second arm: its own, or what both arms share."""
    apart = plan_of([2.0, 1.8], [1e-6, 0.04])
    together = plan_of([2.0, 1.8], [0.04, 0.04], shared=0.04)
    assert [arm for arm, _ in apart.trials] == [2, 2]
    assert together.trials == []


def test_price_of_turning_to_an_arm_is_weighed() -> None:
    cost = CostEstimates(seconds_S=np.ones(2), covariance_SS=np.zeros((2, 2)))
    accepted = AcceptanceEstimates(
        mean_S=np.array([0.1]), variance_S=np.ones(1), covariance_SS=np.array([[0.09]])
    )
    settings = {"is_on": False, "hysteresis": 0.02, "caution": 1.0, "horizon": 100.0}
    assert make_plan(64, cost, accepted, [0, 0], [0.0, 0.0], **settings).trials
    assert not make_plan(64, cost, accepted, [0, 0], [0.0, 1000.0], **settings).trials


def test_rates_are_tokens_per_second_and_request() -> None:
    plan = plan_of([2.0, 1.5], [1e-8, 1e-8])
    assert plan.rates == pytest.approx([1.0, 2.0, 1.5])
    assert plan.others == [2, 0]
