"""How many drafted tokens each strategy gets accepted, learned so that one observation informs every strategy.

Used by the cost-model selector. The chance p that depth d of strategy s is accepted once depth d - 1 was is kept as
x[s, d] = log(-log(1 - p)): a tree that tries g times as hard as a chain misses with the g-th power of its chance, which on
this scale is a constant offset. All x are jointly normal. Before anything is seen they covary because they share the
drafter's quality, a depth, a width; a Kalman filter then does the rest. One thing to know: the quality drifts and jumps,
the shapes hardly do, so a drafter that has changed is seen in one strategy and believed in all. Batch size plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_megatron.speculation.strategy import SpeculationStrategy

# An unknown drafter accepts 1 - exp(-exp(-0.7)) = 0.39 of the tokens of a chain, 0.8 with one standard deviation of luck:
# too few to rely upon, enough to be tried. A tree with room for w children at each node tries as hard as
# 1 + _WIDTH_GAIN * log2(w) chains.
_PRIOR_QUALITY = -0.7
_WIDTH_GAIN = 0.6
# Prior variances of the summands of x.
_QUALITY = 1.4
_DEPTH = 0.05
_WIDTH = 0.10
_STRATEGY = 0.04
_CELL = 0.03
# What a step adds to them: the quality follows the policy within some 100 steps.
_QUALITY_DRIFT = 2e-4
_SHAPE_DRIFT = 1e-4  # as a share of the prior variances of the shapes
_LIMITS = (-6.0, 2.5)  # of x: p between 0.002 and 0.999995
_MAX_INNOVATION = 2.0
_OVERDISPERSION = 1.5  # requests of one prompt, and steps of one request, are alike

_JUMP_MEMORY = 0.93  # share of the accumulated surprise that stays for the next step
_JUMP_SIGMAS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceEstimates:
    """Drafted tokens that a request accepts in one step, for each strategy in order."""

    means: list[float]
    variances: list[float]  # of one request
    covariance: list[list[float]]  # of what is known of log(1 + mean), strategy by strategy


class AcceptanceModel:
    """Accept statistics of a set of strategies that draft. `observe` only notes; `fit` learns."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        self._strategies = tuple(strategies)
        cells = [(s, d) for s in strategies for d in range(s.num_steps)]
        self._starts = {s: cells.index((s, 0)) for s in strategies}
        self._x = np.array([_PRIOR_QUALITY + _prior_offset(s) for s, _ in cells], dtype=np.float64)

        def same(keys: list[object]) -> np.ndarray:
            return np.array([float(a == b) for a in keys for b in keys]).reshape(
                len(keys), len(keys)
            )

        self._shapes = (
            _DEPTH * same([d for _, d in cells])
            + _WIDTH * same([s.topk for s, _ in cells])
            + _STRATEGY * same([str(s) for s, _ in cells])
            + _CELL * np.eye(len(cells))
        )
        self._covariance = self._shapes + _QUALITY
        self._most_doubt = 2.0 * float(self._covariance.trace())
        self._noted: dict[SpeculationStrategy, list[int]] = {}  # reached at depth 1, 2, ..
        self._surprise = 0.0
        self._surprise_variance = 0.0
        self._estimates: AcceptanceEstimates | None = None

    def observe(
        self, strategy: SpeculationStrategy, batch_size: int, accepted_by_depth: Sequence[int]
    ) -> bool:
        """Note a step. True if acceptance has jumped."""
        noted = self._noted.get(strategy)
        if noted is None:
            self._noted[strategy] = [batch_size, *accepted_by_depth]
        else:
            noted[0] += batch_size
            for depth, accepted in enumerate(accepted_by_depth, 1):
                noted[depth] += accepted
        return self._note_surprise(strategy, batch_size, sum(accepted_by_depth))

    def fit(self, num_steps: int) -> None:
        """Learn what was noted; `num_steps` steps have passed since the last time, drafting or not."""
        if self._covariance.trace() < self._most_doubt:
            self._covariance += num_steps * (_QUALITY_DRIFT + _SHAPE_DRIFT * self._shapes)
        for strategy, noted in self._noted.items():
            start = self._starts[strategy]
            for depth in range(strategy.num_steps):
                if noted[depth] == 0:
                    break
                self._learn(start + depth, noted[depth], noted[depth + 1])
        self._noted.clear()
        self._estimates = None

    def estimates(self) -> AcceptanceEstimates:
        """What is known since the last `fit`."""
        if self._estimates is None:
            self._estimates = self._estimate()
        return self._estimates

    def _learn(self, index: int, reached: int, accepted: int) -> None:
        rate, slope = _rate(float(self._x[index]))
        noise = _OVERDISPERSION * (rate * (1.0 - rate) + 0.1 / reached) / (reached * slope * slope)
        column = self._covariance[index].copy()
        innovation = (accepted / reached - rate) / slope
        gain = column / (column[index] + noise)
        if abs(innovation) > _MAX_INNOVATION:
            # Too far for the slope to tell where to: go a part of the way, and stay in doubt.
            self._x += gain * math.copysign(_MAX_INNOVATION, innovation)
            return
        self._x += gain * innovation
        self._covariance -= np.outer(gain, column)

    def _estimate(self) -> AcceptanceEstimates:
        means, variances = [], []
        gradients = np.zeros((len(self._strategies), len(self._x)))
        x = self._x.tolist()
        for row, strategy in enumerate(self._strategies):
            start, survival, mean, second = self._starts[strategy], 1.0, 0.0, 0.0
            survivals, relative = [], []
            for depth in range(strategy.num_steps):
                rate, slope = _rate(x[start + depth])
                survival *= rate
                survivals.append(survival)
                relative.append(slope / rate)
                mean += survival
                second += (2 * depth + 1) * survival
            tail, slopes = mean, []
            for survival, share in zip(survivals, relative, strict=True):
                slopes.append(share * tail / (1.0 + mean))
                tail -= survival
            gradients[row, start : start + strategy.num_steps] = slopes
            means.append(mean)
            variances.append(max(second - mean * mean, 0.0) + 1e-3)
        covariance = gradients @ self._covariance @ gradients.T
        return AcceptanceEstimates(means=means, variances=variances, covariance=covariance.tolist())

    def _note_surprise(self, strategy: SpeculationStrategy, batch_size: int, accepted: int) -> bool:
        """A leaky sum of residuals against its own standard deviation, in the manner of Page (1954), on both sides."""
        known, row = self.estimates(), self._strategies.index(strategy)
        mean = known.means[row]
        doubt = (batch_size * (1.0 + mean)) ** 2 * known.covariance[row][row]
        variance = _OVERDISPERSION * batch_size * known.variances[row] + doubt
        self._surprise = _JUMP_MEMORY * self._surprise + accepted - batch_size * mean
        self._surprise_variance = _JUMP_MEMORY**2 * self._surprise_variance + variance
        if abs(self._surprise) <= _JUMP_SIGMAS * math.sqrt(self._surprise_variance):
            return False
        # Trees gain over chains differently at another quality, so the shapes are in doubt again too.
        if self._covariance.trace() < self._most_doubt:
            self._covariance += 0.1 * self._shapes + _QUALITY
        self._surprise = self._surprise_variance = 0.0
        self._estimates = None
        return True

    def state_dict(self) -> dict[str, object]:
        """JSON-able. What was noted since the last `fit` is not in it."""
        return {
            "x": self._x.tolist(),
            "covariance": self._covariance.tolist(),
            "surprise": [self._surprise, self._surprise_variance],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of the same strategies."""
        self._noted.clear()
        self._estimates = None
        self._x = np.array(state["x"], dtype=np.float64)
        self._covariance = np.array(state["covariance"], dtype=np.float64)
        self._covariance = self._covariance.reshape(len(self._x), len(self._x))
        self._surprise, self._surprise_variance = state["surprise"]


def _prior_offset(strategy: SpeculationStrategy) -> float:
    children = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)
    return math.log(1.0 + _WIDTH_GAIN * math.log2(max(children, 1.0)))


def _rate(x: float) -> tuple[float, float]:
    """p, and its slope."""
    hazard = math.exp(min(max(x, _LIMITS[0]), _LIMITS[1]))
    miss = math.exp(-hazard)
    return 1.0 - miss, hazard * miss
