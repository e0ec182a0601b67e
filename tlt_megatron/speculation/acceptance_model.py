"""How many drafted tokens each strategy gets accepted, learned so that one observation informs every strategy.

Used by the cost-model selector. The chance p that depth d is accepted once depth d - 1 was is modelled as
`log(-log(1 - p)) = quality + depth d + strategy + (strategy, depth)`: a tree that tries g times as hard as a chain misses
with the g-th power of its chance, which on this scale is a constant offset. Each term is a mean and a variance, updated as
in a Kalman filter without cross terms. The drafter's quality moves fast and is shared by all; the offsets, which are
properties of tree shapes, move slowly. One thing to know: batch size plays no part, acceptance does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.speculation.strategy import SpeculationStrategy

# Prior means: an unknown drafter accepts 1 - exp(-exp(-0.7)) = 0.39 of the tokens of a chain, 0.8 with one standard
# deviation of luck: too few to rely upon, enough to be tried. A tree with room for w children at each node tries as hard
# as 1 + _WIDTH_GAIN * log2(w) chains.
_PRIOR_QUALITY = -0.7
_WIDTH_GAIN = 0.6
_PRIOR_VARIANCES = (1.4, 0.04, 0.15, 0.03)  # quality, depth, strategy, (strategy, depth)
_CHAIN_VARIANCE = 0.05  # chains are the reference: their offset is less free
# Variance that a step adds: quality follows the policy within some 100 steps, shapes hardly change.
_QUALITY_DRIFT = 2e-4
_OFFSET_DRIFT = 1e-5
_LIMITS = (-6.0, 2.5)  # of the sum: p between 0.002 and 0.999995
_MAX_INNOVATION = 2.0
_OVERDISPERSION = 1.5  # requests of one prompt, and steps of one request, are alike

_JUMP_MEMORY = 0.93  # share of the accumulated surprise that stays for the next step
_JUMP_SIGMAS = 4.0
_JUMP_VARIANCE = 1.0  # of the quality, after a jump


@dataclass(slots=True)
class AcceptanceEstimate:
    """Drafted tokens that a request accepts in one step of a strategy."""

    mean: float
    own_error: float  # standard error of the mean, from what is known of this strategy alone
    shared_error: (
        float  # from what is known of the drafter's quality; the same sign for all strategies
    )
    variance: float  # of one request


class AcceptanceModel:
    """Accept statistics of a set of strategies that draft."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        self._quality, self._quality_variance = _PRIOR_QUALITY, _PRIOR_VARIANCES[0]
        num_depths = max((s.num_steps for s in strategies), default=0)
        self._depths = [_Term(0.0, _PRIOR_VARIANCES[1]) for _ in range(num_depths)]
        self._own = {s: _Term(*_prior_offset(s)) for s in strategies}
        variance = _PRIOR_VARIANCES[3]
        self._cells = {s: [_Term(0.0, variance) for _ in range(s.num_steps)] for s in strategies}
        self._noted: dict[SpeculationStrategy, list[int]] = {}  # reached at depth 1, 2, ..
        self._step = 0
        self._surprise = 0.0
        self._surprise_variance = 0.0

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        expected: AcceptanceEstimate,
    ) -> bool:
        """Note a step, of which `expected` was what `estimate` said. True if acceptance has jumped."""
        noted = self._noted.get(strategy)
        if noted is None:
            self._noted[strategy] = [batch_size, *accepted_by_depth]
        else:
            noted[0] += batch_size
            for depth, accepted in enumerate(accepted_by_depth, 1):
                noted[depth] += accepted
        return self._note_surprise(batch_size, sum(accepted_by_depth), expected)

    def fit(self, num_steps: int) -> None:
        """Learn what was noted; `num_steps` steps have passed since the last time, drafting or not."""
        self._step += num_steps
        if self._quality_variance < _PRIOR_VARIANCES[0]:
            self._quality_variance += _QUALITY_DRIFT * num_steps
        for strategy, noted in self._noted.items():
            for depth in range(strategy.num_steps):
                if noted[depth] == 0:
                    break
                self._learn(strategy, depth, noted[depth], noted[depth + 1])
        self._noted.clear()

    def _learn(
        self, strategy: SpeculationStrategy, depth: int, reached: int, accepted: int
    ) -> None:
        shape, own, cell = self._depths[depth], self._own[strategy], self._cells[strategy][depth]
        step = self._step
        rate, slope = _rate(self._quality + shape.mean + own.mean + cell.mean)
        variances = [term.variance_at(step) for term in (shape, own, cell)]
        noise = _OVERDISPERSION * (rate * (1.0 - rate) + 0.1 / reached) / (reached * slope * slope)
        total = self._quality_variance + sum(variances) + noise
        innovation = (accepted / reached - rate) / slope
        if abs(innovation) > _MAX_INNOVATION:
            # Too far for the slope to tell where to: go a part of the way, and stay in doubt.
            self._quality += self._quality_variance / total * math.copysign(_MAX_INNOVATION, innovation)
            return
        pull = innovation / total
        self._quality += self._quality_variance * pull
        self._quality_variance *= 1.0 - self._quality_variance / total
        for term, variance in zip((shape, own, cell), variances, strict=True):
            term.update(variance, pull, total, step)

    def estimate(self, strategy: SpeculationStrategy) -> AcceptanceEstimate:
        """Mean accepted tokens, their error by the delta method, and their spread."""
        own, cells, step = self._own[strategy], self._cells[strategy], self._step
        survival, mean, second = 1.0, 0.0, 0.0
        relative, local, survivals = [], [], []
        for depth in range(strategy.num_steps):
            shape, cell = self._depths[depth], cells[depth]
            rate, slope = _rate(self._quality + shape.mean + own.mean + cell.mean)
            survival *= rate
            survivals.append(survival)
            mean += survival
            second += (2 * depth + 1) * survival
            relative.append(slope / rate)
            local.append(shape.variance_at(step) + cell.variance_at(step))
        # d mean / d logit of a depth: its relative slope times the survivals from there on.
        tail, common, separate = mean, 0.0, 0.0
        for depth, share in enumerate(relative):
            slope = share * tail
            common += slope
            separate += slope * slope * local[depth]
            tail -= survivals[depth]
        return AcceptanceEstimate(
            mean=mean,
            own_error=math.sqrt(separate + common * common * own.variance_at(step)),
            shared_error=common * math.sqrt(self._quality_variance),
            variance=max(second - mean * mean, 0.0) + 1e-3,
        )

    def _note_surprise(self, batch_size: int, accepted: int, expected: AcceptanceEstimate) -> bool:
        """A leaky sum of residuals against its own standard deviation, in the manner of Page (1954), on both sides."""
        residual = accepted - batch_size * expected.mean
        error = batch_size * (expected.own_error + expected.shared_error)
        variance = _OVERDISPERSION * batch_size * expected.variance + error * error
        self._surprise = _JUMP_MEMORY * self._surprise + residual
        self._surprise_variance = _JUMP_MEMORY**2 * self._surprise_variance + variance
        if abs(self._surprise) <= _JUMP_SIGMAS * math.sqrt(self._surprise_variance):
            return False
        self._quality_variance = max(self._quality_variance, _JUMP_VARIANCE)
        self._surprise = self._surprise_variance = 0.0
        return True

    def _terms(self) -> dict[str, list[_Term]]:
        return {"depths": self._depths} | {
            str(s): [own, *self._cells[s]] for s, own in self._own.items()
        }

    def state_dict(self) -> dict[str, object]:
        """JSON-able. What was noted since the last `fit` is not in it."""
        terms = {
            name: [[term.mean, term.variance_at(self._step)] for term in group]
            for name, group in self._terms().items()
        }
        surprise = [self._surprise, self._surprise_variance]
        return terms | {"quality": [self._quality, self._quality_variance], "surprise": surprise}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of the same strategies."""
        self._noted.clear()
        self._quality, self._quality_variance = state["quality"]
        self._surprise, self._surprise_variance = state["surprise"]
        for name, group in self._terms().items():
            for term, (mean, variance) in zip(group, state[name], strict=True):
                term.mean, term.variance, term.seen_at = mean, variance, self._step


class _Term:
    """One summand: a mean, and a variance that grows while it is not observed."""

    __slots__ = ("ceiling", "mean", "seen_at", "variance")

    def __init__(self, mean: float, variance: float) -> None:
        self.mean = mean
        self.variance = self.ceiling = variance
        self.seen_at = 0

    def variance_at(self, step: int) -> float:
        grown = self.variance + _OFFSET_DRIFT * (step - self.seen_at)
        return grown if grown < self.ceiling else self.ceiling

    def update(self, variance: float, pull: float, total: float, step: int) -> None:
        self.mean += variance * pull
        self.variance = variance * (1.0 - variance / total)
        self.seen_at = step


def _prior_offset(strategy: SpeculationStrategy) -> tuple[float, float]:
    if strategy.is_chain:
        return 0.0, _CHAIN_VARIANCE
    children = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)
    return math.log(1.0 + _WIDTH_GAIN * math.log2(max(children, 1.0))), _PRIOR_VARIANCES[2]


def _rate(logit: float) -> tuple[float, float]:
    """p of a sum of terms, and its slope."""
    hazard = math.exp(min(max(logit, _LIMITS[0]), _LIMITS[1]))
    miss = math.exp(-hazard)
    return 1.0 - miss, hazard * miss
