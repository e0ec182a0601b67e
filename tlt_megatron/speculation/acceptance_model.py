"""How many drafted tokens each strategy gets accepted, learned so that one observation informs every strategy.

Used by the cost-model selector. The chance p that depth d of strategy s is accepted once depth d - 1 was is kept as
x = log(-log(1 - p)): a tree that tries g times as hard as a chain misses with the g-th power of its chance, which on this
scale is an offset. x is a sum of what strategies share: the quality of the drafter, how the texts of the moment differ from
others, a depth, a width (`acceptance_shape`). Retrieved tokens have a quality of their own. All summands are jointly
normal. One thing to know: qualities drift and jump, the shapes hardly do, so a drafter that has changed is seen in one
strategy and believed in all.

Shapes: S strategies, D depths, N summands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_megatron.speculation.acceptance_shape import (
    LEARNED,
    LEARNED_TEXT,
    LEAST_RATE,
    QUALITY_VARIANCE,
    RETRIEVED,
    RETRIEVED_TEXT,
    TEXT_VARIANCE,
    AcceptanceShape,
)
from tlt_megatron.speculation.strategy import SpeculationStrategy

_QUALITY_DRIFT = (
    3e-5  # variance that a step adds: the quality follows the policy within some 10,000 steps
)
_SHAPE_FADE = 1e-5  # share of what was learned of the shapes that a step takes away
_TEXT_STEPS = 150.0  # after which a request writes about something else
_SWEEPS = 4
_MAX_STEP = 2.0  # of x in one sweep: the slope does not tell beyond
_SMALL_STEP = 0.3
_OVERDISPERSION = 1.3  # steps of one request are alike

_NEWS_SIGMAS = 2.5  # of what steps bring by chance: then it is time to fit
_JUMP_MEMORY = 0.93  # share of the accumulated surprise that stays for the next step
_JUMP_SIGMAS = 4.0
_NOTHING = math.log(0.0025)  # chance of a run of steps that accept nothing at all
_SUDDEN_SIGMAS = 5.0  # of a single step,
_SUDDEN_VARIANCE = 1.5  # where a few tokens are no news in any case
_JUMP = 4.0  # variance of a jump; from good to useless x falls by 4
_BEGINNING = 8  # steps of a new batch in which no jump is seen: all its responses begin at once, as they seldom go on
_JUMP_REQUESTS = (
    4.0  # so many that jump together are as likely of another text as before another drafter
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceEstimates:
    """Drafted tokens that a request accepts in one step, for each strategy in order."""

    mean_S: np.ndarray
    variance_S: np.ndarray  # of one request
    covariance_SS: np.ndarray  # of what is known of log(1 + mean)


class AcceptanceModel:
    """Accept statistics of a set of strategies that draft. `observe` only notes; `fit` learns."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        self._index = {strategy: index for index, strategy in enumerate(strategies)}
        self._shape = AcceptanceShape(strategies)
        self._belief = self._shape.prior()
        self._noted: dict[SpeculationStrategy, list[int]] = {}  # reached at depth 0, 1, 2, ..
        self._batch_size = 0  # of the latest step
        self._text_size = 0  # batch size that the text summands stand for
        self._beginning = 0  # steps of it that are left
        self._surprise = 0.0
        self._surprise_variance = 0.0
        self._log_nothing = 0.0  # chance that the latest steps in a row accept nothing
        self._news = 0.0  # residuals since the last fit
        self._news_variance = 0.0
        self._estimates: AcceptanceEstimates | None = None
        self._expected: list[tuple[float, ...]] = []  # what surprises are measured against

    def observe(
        self, strategy: SpeculationStrategy, batch_size: int, accepted_by_depth: Sequence[int]
    ) -> bool:
        """Note a step. True if acceptance has jumped."""
        self._batch_size = batch_size
        noted = self._noted.get(strategy)
        if noted is None:
            self._noted[strategy] = [batch_size, *accepted_by_depth]
        else:
            noted[0] += batch_size
            for depth, accepted in enumerate(accepted_by_depth, 1):
                noted[depth] += accepted
        return self._note_surprise(strategy, batch_size, sum(accepted_by_depth))

    @property
    def has_news(self) -> bool:
        """What was noted is more than chance, if the estimates are right: it is time to fit."""
        return self._news * self._news > _NEWS_SIGMAS**2 * self._news_variance

    def resize(self, batch_size: int) -> None:
        """So many requests run now. Fit before others join."""
        self._batch_size = batch_size
        self._beginning = _BEGINNING
        self._age_text(0)
        self._estimates = None

    def fit(self, num_steps: int) -> None:
        """Learn what was noted; `num_steps` steps have passed since the last time, drafting or not."""
        if num_steps > 0:
            self._belief.fade(min(_SHAPE_FADE * num_steps, 1.0))
            for index in (LEARNED, RETRIEVED):
                drift = num_steps * _QUALITY_DRIFT
                self._belief.widen(index, drift, limit=QUALITY_VARIANCE)
            if self._batch_size > 0:
                self._age_text(num_steps)
        for strategy, noted in self._noted.items():
            self._learn(self._index[strategy], noted)
        self._noted.clear()
        self._news = self._news_variance = 0.0
        self._estimates = None

    def estimates(self) -> AcceptanceEstimates:
        """What is known since the last `fit`."""
        if self._estimates is None:
            self._estimates = self._estimate()
        return self._estimates

    def _age_text(self, num_steps: int) -> None:
        """Texts change their nature. Those who stay of a shrinking batch differ from the mean of all, the more the fewer
        they are, and nothing is known of those who join."""
        now, before = self._batch_size, self._text_size or self._batch_size
        keep = math.exp(-num_steps / _TEXT_STEPS) * min(before / now, 1.0)
        for index in (LEARNED_TEXT, RETRIEVED_TEXT):
            self._belief.relax(index, keep, TEXT_VARIANCE / now)
            self._belief.widen(index, TEXT_VARIANCE * max(1.0 / now - 1.0 / before, 0.0))
        self._text_size = now

    def _learn(self, strategy: int, noted: Sequence[int]) -> None:
        """An iterated Kalman step (Bell and Cathey 1993): what was counted is weighed with the slope where it leads to."""
        num_seen = 0  # depths that a request reached
        while num_seen < len(noted) - 1 and noted[num_seen] > 0:
            num_seen += 1
        if num_seen == 0:
            return
        reached_D = np.array(noted[:num_seen], dtype=np.float64)
        share_D = np.array(noted[1 : num_seen + 1], dtype=np.float64) / reached_D
        shift_N = np.zeros(len(self._belief.mean_N))
        for sweep in range(_SWEEPS):
            rates_SD, slopes_SD, rows_SDN = self._shape.linearize(
                self._belief.mean_N + shift_N, strategy
            )
            rate_D, slope_D = rates_SD[0, :num_seen], slopes_SD[0, :num_seen]
            rows_DN = rows_SDN[0, :num_seen]
            noise_D = _OVERDISPERSION * (rate_D * (1.0 - rate_D) + 0.1 / reached_D)
            noise_D /= reached_D * slope_D * slope_D
            step_D = np.clip((share_D - rate_D) / slope_D, -_MAX_STEP, _MAX_STEP)
            # At the least rate that is told apart, more misses say nothing: the mean would fall without end, and to NaN.
            step_D[(rate_D <= LEAST_RATE) & (step_D < 0.0)] = 0.0
            innovation_D = step_D + rows_DN @ shift_N
            if sweep == _SWEEPS - 1 or np.abs(step_D).max() < _SMALL_STEP:
                break
            shift_N = self._belief.shift_N(rows_DN, innovation_D, noise_D)
        self._belief.learn(rows_DN, innovation_D, noise_D)

    def _estimate(self) -> AcceptanceEstimates:
        rate_SD, slope_SD, rows_SDN = self._shape.linearize(self._belief.mean_N)
        survival_SD = np.cumprod(rate_SD, axis=1)
        mean_S = survival_SD.sum(axis=1)
        odd_D = 2.0 * np.arange(rate_SD.shape[1]) + 1.0
        variance_S = np.maximum(survival_SD @ odd_D - mean_S * mean_S, 0.0) + 1e-3
        variance_S *= _OVERDISPERSION
        tail_SD = np.cumsum(survival_SD[:, ::-1], axis=1)[:, ::-1]
        weight_SD = tail_SD * slope_SD / (np.maximum(rate_SD, 1e-9) * (1.0 + mean_S[:, None]))
        gradient_SN = (weight_SD[:, None, :] @ rows_SDN)[:, 0]
        covariance_SS = gradient_SN @ self._belief.covariance_NN @ gradient_SN.T
        text_S = gradient_SN[:, LEARNED_TEXT] + gradient_SN[:, RETRIEVED_TEXT]
        nothing_S = np.log1p(-np.minimum(rate_SD[:, 0], 0.999))
        expected = np.stack(
            [mean_S, variance_S, covariance_SS.diagonal(), text_S * text_S, nothing_S], axis=1
        )
        self._expected = [tuple(values) for values in expected.tolist()]
        return AcceptanceEstimates(
            mean_S=mean_S, variance_S=variance_S, covariance_SS=covariance_SS
        )

    def _note_surprise(self, strategy: SpeculationStrategy, batch_size: int, accepted: int) -> bool:
        """A leaky sum of residuals against its own standard deviation, in the manner of Page (1954), on both sides; single
        steps that leave no doubt; and runs of steps that accept nothing, by which few requests show it soonest."""
        self.estimates()
        mean, request_variance, doubt, text, nothing = self._expected[self._index[strategy]]
        if batch_size < self._text_size:
            doubt += text * TEXT_VARIANCE * (1.0 / batch_size - 1.0 / self._text_size)
        variance = batch_size * request_variance + (batch_size * (1.0 + mean)) ** 2 * doubt
        residual = accepted - batch_size * mean
        self._news += residual
        self._news_variance += batch_size * request_variance
        if self._beginning > 0:
            self._beginning -= 1
            return False
        self._surprise = _JUMP_MEMORY * self._surprise + residual
        self._surprise_variance = _JUMP_MEMORY**2 * self._surprise_variance + variance
        self._log_nothing = 0.0 if accepted else self._log_nothing + batch_size * nothing
        is_slow = abs(self._surprise) > _JUMP_SIGMAS * math.sqrt(self._surprise_variance)
        is_sudden = abs(residual) > _SUDDEN_SIGMAS * math.sqrt(variance + _SUDDEN_VARIANCE)
        if not (is_slow or is_sudden or self._log_nothing < _NOTHING):
            return False
        # Trees gain over chains differently at another quality, so the shapes are in doubt again too.
        self._belief.doubt(0.1)
        share = batch_size / (batch_size + _JUMP_REQUESTS)
        if strategy.is_learned:
            self._belief.widen(LEARNED, share * _JUMP, limit=_JUMP)
            self._belief.widen(LEARNED_TEXT, (1.0 - share) * _JUMP, limit=_JUMP)
        if strategy.num_retrieved > 0:
            self._belief.widen(RETRIEVED, share * _JUMP, limit=_JUMP)
            self._belief.widen(RETRIEVED_TEXT, (1.0 - share) * _JUMP, limit=_JUMP)
        self._surprise = self._surprise_variance = self._log_nothing = 0.0
        self._estimates = None
        return True

    def state_dict(self) -> dict[str, object]:
        """JSON-able. What was noted since the last `fit` is not in it."""
        return {
            "belief": self._belief.state_dict(),
            "batch_sizes": [self._batch_size, self._text_size],
            "surprise": [self._surprise, self._surprise_variance],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of the same strategies."""
        self._noted.clear()
        self._estimates = None
        self._belief.load_state_dict(state["belief"])
        self._batch_size, self._text_size = state["batch_sizes"]
        self._surprise, self._surprise_variance = state["surprise"]
