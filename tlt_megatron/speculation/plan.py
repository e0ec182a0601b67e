"""What to do at one batch size, given what is known of all arms: which one runs, and what else is worth trying.

Used by the cost-model selector. Values of trials follow the knowledge gradient (Frazier, Powell, Dayanik 2008): how far a
few steps of an arm are expected to move what is believed of every arm, and what that is worth until things have changed.
One thing to know: the arm that runs teaches for free, so a trial counts for what it teaches beyond that.

Shapes: A arms; arm 0 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlt_megatron.speculation.acceptance_model import AcceptanceEstimates
from tlt_megatron.speculation.step_cost import STEP_NOISE, CostEstimates

_TRIAL_STEPS = (3, 1)  # of three, the middle one counts: one may be a hiccup
_MAX_HORIZON = 2000.0  # steps


@dataclass(slots=True)
class Plan:
    """Arms are indices."""

    best: int
    trials: list[
        tuple[int, int]
    ]  # (arm, steps) worth trying if there is time for it, the best first
    seconds: list[float]  # of a step of each arm
    rates: list[float]  # tokens per second and request of each arm
    others: list[int]  # all arms but the best, the fastest first


def make_plan(
    batch_size: int,
    cost: CostEstimates,
    accepted: AcceptanceEstimates | None,
    idle: Sequence[int],
    once_s: Sequence[float],
    *,
    is_on: bool,
    hysteresis: float,
    caution: float,
    horizon: float,
) -> Plan:
    """`accepted` is of the arms that draft (None: there are none). `idle`: steps since each arm ran. `once_s`: what turning
    to an arm costs once. `horizon`: steps for which a better arm pays its trial back; an arm idle for longer is owed more,
    so that none is given up for good."""
    num_arms = len(cost.seconds_S)
    mean_A, noise_A = np.zeros(num_arms), np.zeros(num_arms)  # noise: of log tokens in one step
    gain_AA = np.zeros((num_arms, num_arms))  # covariance of log tokens
    if accepted is not None:
        mean_A[1:], gain_AA[1:, 1:] = accepted.mean_S, accepted.covariance_SS
        noise_A[1:] = accepted.variance_S / (batch_size * (1.0 + accepted.mean_S) ** 2)
    rate_A = (1.0 + mean_A) / cost.seconds_S
    log_A = np.log(rate_A)
    switch = -hysteresis if is_on else hysteresis
    best = _best(log_A, gain_AA + cost.covariance_SS, caution=caution, needed=switch)
    is_switch_A = (np.arange(num_arms) > 0) != (best > 0)
    hoped_A = log_A - log_A[best] - hysteresis * is_switch_A
    lost_A = cost.seconds_S * np.maximum(1.0 - rate_A / rate_A[best], 0.0)
    horizon_s_A = cost.seconds_S[best] * np.clip(np.array(idle), horizon, _MAX_HORIZON)
    trials: list[tuple[float, int, int]] = []
    for num_steps in _TRIAL_STEPS:
        told_AA = _told(cost.covariance_SS, STEP_NOISE / num_steps, best)
        told_AA += _told(gain_AA, noise_A / num_steps, best)
        gained_A = _expected_gain(hoped_A, np.sqrt(told_AA)).max(axis=1)
        value_A = horizon_s_A * (gained_A - gained_A[best]) - num_steps * lost_A - np.array(once_s)
        values = enumerate(value_A.tolist())
        trials += [(value, arm, num_steps) for arm, value in values if value > 0.0 and arm != best]
    order = np.argsort(-log_A).tolist()
    return Plan(
        best=best,
        trials=[(arm, num_steps) for _, arm, num_steps in sorted(trials, reverse=True)],
        seconds=cost.seconds_S.tolist(),
        rates=rate_A.tolist(),
        others=[arm for arm in order if arm != best],
    )


def _best(log_A: np.ndarray, variance_AA: np.ndarray, *, caution: float, needed: float) -> int:
    """By the lower bound of the gain over plain decoding."""
    variance_A = variance_AA.diagonal() + variance_AA[0, 0] - 2.0 * variance_AA[0]
    lower_A = log_A - log_A[0] - caution * np.sqrt(np.maximum(variance_A, 0.0))
    lower_A[0] = needed
    return int(lower_A.argmax())


def _told(variance_AA: np.ndarray, noise_A: np.ndarray | float, best: int) -> np.ndarray:
    """[A, A]: how far a trial of arm i is expected to move the distance of arm j from the best arm (variance of the
    posterior mean)."""
    shift_AA = variance_AA - variance_AA[:, best : best + 1]
    return shift_AA**2 / (variance_AA.diagonal() + noise_A + 1e-12)[:, None]


def _expected_gain(mean_A: np.ndarray, deviation_AA: np.ndarray) -> np.ndarray:
    """E max(X, 0) of normal X; the distribution function as in Page (1977), good to 0.0002."""
    deviation_AA = deviation_AA + 1e-9
    z_AA = np.clip(mean_A / deviation_AA, -6.0, 6.0)
    below_AA = 0.5 * (1.0 + np.tanh(0.7978846 * (z_AA + 0.044715 * z_AA**3)))
    return np.maximum(mean_A * below_AA + 0.3989423 * deviation_AA * np.exp(-0.5 * z_AA**2), 0.0)
