"""How long a step of each strategy takes at each batch size, learned from the steps that ran.

Used by the cost-model selector. log seconds is the log of a law (a sum over rows to verify, sequences, draft steps, drafted
and retrieved rows), plus a correction for each strategy and batch size, because real machines have steps where the law has
a line, plus a level that all steps of the moment share: contexts grow, other processes come and go. All of it is jointly
normal. One thing to know: the level cancels where strategies are compared, so none is liked better for having been measured
in better times.

Shapes: S strategies, F coefficients of the law, N quantities (the law, the level, the corrections).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_megatron.speculation.belief import Belief
from tlt_megatron.speculation.strategy import SpeculationStrategy

# The law before anything is seen, in units of a plain step's constant part: rows are cheap until the machine is full, and
# cheaper by the dozen; a draft step is a small fraction of the target. Mean and standard deviation of each coefficient.
_LAW = (
    (1.0, 0.2),  # constant
    (0.015, 0.02),  # rows
    (0.02, 0.05),  # rows up to 4
    (0.01, 0.02),  # rows up to 16
    (0.005, 0.01),  # rows up to 64
    (0.002, 0.01),  # rows above 128
    (0.01, 0.02),  # sequences
    (0.05, 0.10),  # drafting at all
    (0.08, 0.08),  # draft steps
    (0.002, 0.004),  # drafted rows
    (0.05, 0.10),  # a tree
    (0.05, 0.10),  # retrieving at all
    (0.002, 0.004),  # retrieved rows
)
_NUM_LAW = len(_LAW)
_LEAST_LAW = 0.02 * np.array([mean for mean, _ in _LAW])
_SCALE = 0.5  # variance of the log of all coefficients together: the first step may be a hiccup
_STRATEGY = 0.006  # variance of the correction of a strategy at all batch sizes,
_CELL = 0.006  # and around one batch size
_KNOTS = 9  # batch sizes 1, 2, 4, .. 256 have a correction, those between them a mixture
_KNOT_REACH = 1.5  # doublings over which corrections are alike
_LEVEL = 0.03  # variance of the level
_LEVEL_STEPS = 150.0  # after which it is another
_DRAFTER_SHARE = 0.05  # of a row of the target, what the learned drafter takes to read a token
_PROMPT_TOKENS = 20  # that new requests are held to have
STEP_NOISE = 0.08**2  # variance of the log of one measured step
_MOMENT_NOISE = 0.05**2  # of what steps of the same moment share, however many there are
_MEDIAN_NOISE = 1.5  # variance of a median over that of a mean
_SURPRISING = 2.0  # standard deviations from which on steps may have been held up by something


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimates:
    """One step of each strategy, in order."""

    seconds_S: np.ndarray
    covariance_SS: np.ndarray  # of what is known of log seconds


class StepCostModel:
    """Seconds by (strategy, batch size). OFF is one of the strategies.

    `observe` only notes; `fit` learns what was noted since the last one, so that a step costs next to nothing.
    """

    def __init__(self, strategies: Sequence[SpeculationStrategy], *, half_life: float) -> None:
        """`half_life` in observed steps: after it, half of what was learned is forgotten."""
        self._strategies = tuple(strategies)
        self._index = {strategy: index for index, strategy in enumerate(strategies)}
        self._forget = math.log(2.0) / half_life
        self._unit_s = 0.0  # the constant part of a plain step at first sight; 0 before it
        self._belief = _prior(len(self._strategies))
        self.suspects: set[int] = (
            set()
        )  # indices of strategies that were slow out of reason when they ran last
        self._terms: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by batch size
        self._noted: dict[tuple[SpeculationStrategy, int], list[float]] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing was learned."""
        return self._unit_s == 0.0

    @property
    def row_s(self) -> float:
        """Seconds that one more row takes where many are verified."""
        return self._unit_s * float(self._belief.mean_N[1])

    def observe(self, strategy: SpeculationStrategy, batch_size: int, *times_s: float) -> None:
        """Steps that took so many seconds each."""
        noted = self._noted.setdefault((strategy, batch_size), [])
        noted += (max(seconds, 1e-9) for seconds in times_s)

    def grow(self, before: int, now: int) -> None:
        """The batch had `before` requests, others have joined: the level is theirs too. Fit before."""
        self._belief.relax(_NUM_LAW, before / now, _LEVEL)

    def fit(self, num_steps: int) -> None:
        """Learn what was noted; `num_steps` steps have passed since the last time."""
        if num_steps > 0:
            self._belief.fade(1.0 - math.exp(-self._forget * num_steps))
            self._belief.relax(_NUM_LAW, math.exp(-num_steps / _LEVEL_STEPS), _LEVEL)
        for (strategy, batch_size), noted in self._noted.items():
            self._learn(self._index[strategy], batch_size, noted)
        self._noted.clear()

    def estimates(self, batch_size: int) -> CostEstimates:
        """Of all strategies. Something must have been learned."""
        features_SF, rows_SN = self._terms_of(batch_size)
        mean_N = self._belief.mean_N
        law_S = features_SF @ mean_N[:_NUM_LAW]
        rows_SN[:, :_NUM_LAW] = features_SF / law_S[:, None]
        seconds_S = self._unit_s * law_S * np.exp(rows_SN[:, _NUM_LAW:] @ mean_N[_NUM_LAW:])
        covariance_SS = rows_SN @ self._belief.covariance_NN @ rows_SN.T
        return CostEstimates(seconds_S=seconds_S, covariance_SS=covariance_SS)

    def _learn(self, strategy: int, batch_size: int, noted: list[float]) -> None:
        """The median of several steps, or a single one; it weighs less if it surprises."""
        features_SF, rows_SN = self._terms_of(batch_size)
        features_F, row_N, mean_N = features_SF[strategy], rows_SN[strategy], self._belief.mean_N
        law = float(features_F @ mean_N[:_NUM_LAW])
        median_s = sorted(noted)[(len(noted) - 1) // 2]
        if self._unit_s == 0.0:
            self._unit_s = median_s / law
        row_N[:_NUM_LAW] = features_F / law
        expected = math.log(self._unit_s * law) + float(row_N[_NUM_LAW:] @ mean_N[_NUM_LAW:])
        innovation = math.log(median_s) - expected
        noise = STEP_NOISE * (_MEDIAN_NOISE if len(noted) > 2 else 1.0) / len(noted)
        noise += _MOMENT_NOISE
        doubt = noise + float(row_N @ self._belief.covariance_NN @ row_N)
        # A machine is slow by accident, but never fast: a fast step is believed.
        excess = innovation * innovation - _SURPRISING**2 * doubt if innovation > 0.0 else 0.0
        if excess > 0.0:
            noise += excess if len(noted) <= 3 else excess / len(noted)
            self.suspects.add(strategy)
        else:
            self.suspects.discard(strategy)
        self._belief.learn(row_N[None], np.array([innovation]), np.array([noise]))
        self._keep_positive()

    def _keep_positive(self) -> None:
        """No part of the law makes a step faster, and the law has a logarithm."""
        belief = self._belief
        for i, least in enumerate(_LEAST_LAW.tolist()):
            value = float(belief.mean_N[i])  # as it is now: what was raised before has moved it
            if value < least:
                row_1N = np.zeros((1, len(belief.mean_N)))
                row_1N[0, i] = 1.0
                noise = 0.1 * belief.covariance_NN[i, i] + 1e-12
                belief.learn(row_1N, np.array([least - value]), np.array([noise]))
        # Raising one lowers others, those raised before it among them.
        np.maximum(belief.mean_N[:_NUM_LAW], _LEAST_LAW, out=belief.mean_N[:_NUM_LAW])

    def _terms_of(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Features of the law [S, F], and how log seconds moves with each quantity [S, N] (the law's part not filled in)."""
        terms = self._terms.get(batch_size)
        if terms is None:
            features_SF = np.array([_features(s, batch_size) for s in self._strategies])
            rows_SN = np.zeros((len(self._strategies), len(self._belief.mean_N)))
            rows_SN[:, _NUM_LAW] = 1.0
            knot = min(math.log2(batch_size), _KNOTS - 1.0)
            lower = min(int(knot), _KNOTS - 2)
            for index, row_N in enumerate(rows_SN):
                start = _start_of(index)
                row_N[start] = 1.0
                row_N[start + 1 + lower] = 1.0 - (knot - lower)
                row_N[start + 2 + lower] = knot - lower
            terms = self._terms[batch_size] = (features_SF, rows_SN)
        return terms

    def state_dict(self) -> dict[str, object]:
        """JSON-able. What was noted since the last `fit` is not in it."""
        return {
            "unit_s": self._unit_s,
            "belief": self._belief.state_dict(),
            "suspects": sorted(self.suspects),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of the same strategies."""
        self._noted.clear()
        self._unit_s, self.suspects = state["unit_s"], set(state["suspects"])
        self._belief.load_state_dict(state["belief"])


class CatchUpCost:
    """What the learned drafter loses by pausing: it has to read what was written without it before it drafts again.

    That price is paid in its first step, once, so it is kept apart from what steps cost.
    """

    def __init__(self) -> None:
        self._token_s = _Slope(512.0)  # seconds for each token that it has not read
        self._request_s = _Slope(16.0)  # and for each request of which it has read nothing
        self._num_unread = 0.0
        self._num_new = 0  # how long these are is not known

    @property
    def is_due(self) -> bool:
        """The next step of the learned drafter will catch up."""
        return self._num_unread > 0.0 or self._num_new > 0

    def expected_s(self, row_s: float) -> float:
        """How long that will take. `row_s`: seconds of a row of the target, by which one goes before anything is known."""
        token_s = _DRAFTER_SHARE * row_s
        request_s = _PROMPT_TOKENS * token_s
        return (
            self._token_s.value(token_s) * self._num_unread
            + self._request_s.value(request_s) * self._num_new
        )

    def resize(self, before: int, now: int) -> None:
        """The batch had `before` requests."""
        if now > before:
            self._num_new += now - before
        else:
            self._num_unread *= now / before
            self._num_new = min(self._num_new, now)

    def forget(self) -> None:
        """No request runs any more."""
        self._num_unread, self._num_new = 0.0, 0

    def wrote(self, num_tokens: int) -> None:
        """Running requests got tokens without the learned drafter."""
        self._num_unread += num_tokens

    def caught_up(self, extra_s: float | None) -> None:
        """A step of it took `extra_s` longer than it otherwise would have. None: that is not known."""
        if extra_s is not None:
            if self._num_new > 0:
                self._request_s.learn(self._num_new, extra_s)
            else:
                self._token_s.learn(self._num_unread, extra_s)
        self.forget()

    def state_dict(self) -> dict[str, object]:
        """JSON-able; what is unread is not in it."""
        return {"token_s": self._token_s.sums, "request_s": self._request_s.sums}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        self._token_s.sums, self._request_s.sums = list(state["token_s"]), list(state["request_s"])
        self.forget()


class _Slope:
    """Seconds over a count by least squares through 0, the latest ten or so measurements."""

    def __init__(self, ridge: float) -> None:
        """`ridge`: counts below it tell little beside the noise."""
        self._ridge = ridge
        self.sums = [0.0, 0.0]  # of count * seconds, of count squared

    def value(self, prior: float) -> float:
        """With `prior` as what was believed at first."""
        weight = self._ridge**2
        return max(self.sums[0] + weight * prior, 0.0) / (self.sums[1] + weight)

    def learn(self, count: float, seconds: float) -> None:
        self.sums = [0.9 * self.sums[0] + count * seconds, 0.9 * self.sums[1] + count * count]


def _prior(num_strategies: int) -> Belief:
    size = _start_of(num_strategies)
    mean_N, covariance_NN = np.zeros(size), np.zeros((size, size))
    law = np.array(_LAW)
    mean_N[:_NUM_LAW] = law[:, 0]
    covariance_NN[:_NUM_LAW, :_NUM_LAW] = _SCALE * np.outer(law[:, 0], law[:, 0])
    covariance_NN[range(_NUM_LAW), range(_NUM_LAW)] += law[:, 1] ** 2
    covariance_NN[_NUM_LAW, _NUM_LAW] = _LEVEL
    knots = np.arange(_KNOTS)
    alike = _CELL * np.exp(-np.abs(knots[:, None] - knots) / _KNOT_REACH)
    for index in range(num_strategies):
        start, end = _start_of(index), _start_of(index + 1)
        covariance_NN[start, start] = _STRATEGY
        covariance_NN[start + 1 : end, start + 1 : end] = alike
    return Belief(mean_N, covariance_NN)


def _start_of(strategy: int) -> int:
    """Where the corrections of a strategy stand: at all batch sizes, then at each knot."""
    return _NUM_LAW + 1 + strategy * (1 + _KNOTS)


def _features(strategy: SpeculationStrategy, batch_size: int) -> tuple[float, ...]:
    """In the order of _LAW."""
    rows, steps = batch_size * strategy.num_rows, strategy.num_steps
    return (
        1.0,
        rows,
        min(rows, 4),
        min(rows, 16),
        min(rows, 64),
        max(rows - 128, 0),
        batch_size,
        float(strategy.is_learned),
        steps,
        steps * batch_size * strategy.topk,
        float(not (strategy.is_off or strategy.is_chain)),
        float(strategy.num_retrieved > 0),
        batch_size * strategy.num_retrieved,
    )
