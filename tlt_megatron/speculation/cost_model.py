"""The cost-model selector: tokens a strategy brings, divided by seconds it takes, each learned apart.

DESIGN 5.3. A bandit that learns only tokens per second must try every strategy at every batch size again and again. Here
acceptance is learned by depth for all batch sizes at once (`acceptance_model`), and seconds by rows and steps for all
strategies at once (`step_cost`), so one step informs every arm. Three rules make it safe:
- the arm of the highest LOWER bound runs, and plain decoding, always an arm, counts in full: an uncertain gain is never
  relied upon;
- another arm is tried only if its UPPER bound promises a gain, and only from a budget of a fixed share of the time, out of
  which every trial pays what it lost. So trying costs at most that share, whatever the drafter does. The other side of the
  switch, on or off, is looked at now and then in any case;
- turning speculation on or off needs a gain above the hysteresis.
One thing to know: knowledge fades, so bounds widen by themselves, and what lost long ago is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.speculation.acceptance_model import AcceptanceModel
from tlt_megatron.speculation.selector import (
    Decision,
    DecisionTrace,
    check_state,
    committed_per_s,
)
from tlt_megatron.speculation.step_cost import StepCostModel
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

_FIRST_STEPS = 3  # plain, because all is measured against them and one may be a hiccup
_TRIAL_STEPS = 3  # after which a trial is judged at the latest
_MAX_BUDGET = 20.0  # steps of the present length: a long calm pays for no long loss


@dataclass(slots=True)
class _Arm:
    """A strategy at one batch size."""

    index: int  # 0 is OFF
    strategy: SpeculationStrategy
    seconds: float
    tokens_per_s: float
    log_lower: float  # of log tokens_per_s
    accept_covariance: list[float]  # of log tokens per step, with each drafting arm
    variance: float  # of log tokens_per_s


@dataclass(slots=True)
class _Plan:
    """What to do at one batch size until more is known."""

    best: _Arm
    trial: _Arm | None  # worth trying, if the budget allows
    is_owed: bool  # the trial is plain decoding that might be faster: never to be put off
    probe: _Arm | None  # the best arm on the other side of the switch


class CostModelSelector:
    """Adaptive in both directions; OFF is an arm whether it is listed or not."""

    def __init__(
        self,
        strategies: Sequence[SpeculationStrategy],
        *,
        half_life: float = 400.0,
        explore_share: float = 0.008,
        first_budget: float = 2.0,
        hysteresis: float = 0.02,
        caution: float = 0.5,
        hope: float = 1.5,
        probe_every: int = 100,
        refresh_every: int = 24,
    ) -> None:
        """`half_life`: steps after which a measured time counts half. `explore_share`: share of the time that trials may
        lose. `first_budget`: plain steps that they may lose at the start. `hysteresis`: relative gain that turning
        speculation on or off needs. `caution`, `hope`: standard errors of the lower and the upper bound.
        `probe_every`: plain steps after which drafting is looked at again; the other way round after four times as many.
        `refresh_every`: steps between two looks at the models."""
        drafting = [s for s in strategies if not s.is_off]
        if len(set(drafting)) != len(drafting):
            raise ValueError(f"strategies={', '.join(map(str, strategies))}: one is given twice")
        if not 0.0 < explore_share < 1.0:
            raise ValueError(f"explore_share={explore_share} is outside (0, 1)")
        self._strategies = (OFF, *drafting)
        self._listed = frozenset(self._strategies)
        self._acceptance = AcceptanceModel(drafting)
        self._cost = StepCostModel(self._strategies, half_life=half_life)
        self._explore_share = explore_share
        self._first_budget = first_budget
        self._hysteresis = hysteresis
        self._caution = caution
        self._hope = hope
        self._probe_every = probe_every
        self._refresh_every = refresh_every
        self._budget_s = 0.0
        self._is_on = False
        self._num_observed = 0
        self._checked_at = [0, 0]  # the last step that decoded plainly, that drafted
        self._jumped_at = 0  # the last step that showed another drafter than the one known
        self._fitted_at = 0
        self._refresh_at = 0
        self._plans: dict[int, _Plan] = {}
        self._trial_rate = 0.0  # tokens per second that the running trial forgoes; 0 if none runs
        self._trace = DecisionTrace()

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """The best arm, or a trial that the budget pays for."""
        self._trial_rate = 0.0
        if self._num_observed < _FIRST_STEPS:
            self._trace.chosen(batch_size, OFF, "first")
            return OFF
        plan = self._plans.get(batch_size)
        if plan is None:
            plan = self._plans[batch_size] = self._make_plan(batch_size)
        best, trial, is_due = plan.best, plan.trial, plan.is_owed
        num_unchecked = self._num_observed - self._checked_at[best.strategy.is_off]
        if num_unchecked >= (self._probe_every if best.strategy.is_off else 4 * self._probe_every):
            trial, is_due = plan.probe, True
        if trial is not None:
            expected_loss_s = trial.seconds * (1.0 - trial.tokens_per_s / best.tokens_per_s)
            if is_due or self._budget_s > max(expected_loss_s, 0.0):
                self._trial_rate = best.tokens_per_s
                self._trace.chosen(batch_size, trial.strategy, "explore")
                return trial.strategy
        self._is_on = not best.strategy.is_off
        self._trace.chosen(batch_size, best.strategy, "exploit")
        return best.strategy

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
    ) -> None:
        """Learn from any step of a listed strategy, also one that was not chosen here."""
        rate = committed_per_s(batch_size, accepted_by_depth, seconds)
        self._trace.observed(strategy, batch_size, rate)
        if strategy not in self._listed:
            return
        if self._cost.is_empty:
            self._budget_s = self._first_budget * seconds
        self._budget_s += self._explore_share * seconds
        if self._trial_rate > 0.0:
            # A lucky trial pays back, else the noise alone would use up the budget.
            self._budget_s -= seconds * (1.0 - rate / self._trial_rate)
        self._budget_s = min(self._budget_s, _MAX_BUDGET * seconds)
        self._cost.observe(strategy, batch_size, seconds)
        self._num_observed += 1
        if self._trial_rate > 0.0:
            self._refresh_at = min(self._refresh_at, self._num_observed + _TRIAL_STEPS - 1)
        self._checked_at[not strategy.is_off] = self._num_observed
        if not strategy.is_off and self._acceptance.observe(
            strategy, batch_size, accepted_by_depth
        ):
            self._jumped_at = self._refresh_at = self._num_observed
        if self._num_observed >= self._refresh_at:
            self._refresh()

    def decisions(self) -> list[Decision]:
        """See `StrategySelector`."""
        return self._trace.take()

    def _refresh(self) -> None:
        self._cost.fit()
        self._acceptance.fit(self._num_observed - self._fitted_at)
        self._start_plans()

    def _start_plans(self) -> None:
        self._fitted_at = self._num_observed
        self._plans.clear()
        # While little is known, at the start and after a jump, every step is news.
        num_settled = self._num_observed - self._jumped_at
        self._refresh_at = self._num_observed + min(self._refresh_every, num_settled // 6 + 1)

    def _make_plan(self, batch_size: int) -> _Plan:
        arms = [self._arm(index, batch_size) for index in range(len(self._strategies))]
        plain, drafting = arms[0], arms[1:]
        if not drafting:
            return _Plan(best=plain, trial=None, is_owed=False, probe=None)
        best_drafting = max(drafting, key=lambda arm: arm.log_lower)
        stay = self._hysteresis if self._is_on else -self._hysteresis
        best = best_drafting if best_drafting.log_lower + stay > plain.log_lower else plain
        others = [arm for arm in arms if arm is not best]
        promises = [self._promise(arm, best) for arm in others]
        trial = others[promises.index(max(promises))] if max(promises) > 0.0 else None
        # Of the doubts, only that about the plain step itself goes away by running it.
        plain_gain = math.log(plain.tokens_per_s / best.tokens_per_s)
        plain_gain += self._caution * math.sqrt(plain.variance)
        is_owed = best is not plain and plain_gain > self._hysteresis
        probe = max(drafting, key=lambda arm: arm.tokens_per_s) if best is plain else plain
        return _Plan(best=best, trial=plain if is_owed else trial, is_owed=is_owed, probe=probe)

    def _promise(self, arm: _Arm, best: _Arm) -> float:
        """Upper bound of the log of the gain over the best arm, less what a change needs. What both arms share, such as the
        drafter's quality, cancels."""
        variance = arm.variance + best.variance
        if arm.index > 0 and best.index > 0:
            variance -= 2.0 * arm.accept_covariance[best.index - 1]
        gain = math.log(arm.tokens_per_s / best.tokens_per_s)
        is_switch = arm.strategy.is_off != best.strategy.is_off
        needed = self._hysteresis if is_switch else self._hysteresis / 2
        return gain + self._hope * math.sqrt(max(variance, 0.0)) - needed

    def _arm(self, index: int, batch_size: int) -> _Arm:
        strategy = self._strategies[index]
        cost = self._cost.estimate(strategy, batch_size)
        tokens, covariance, variance = 1.0, [], cost.log_error**2
        if index > 0:
            accepted = self._acceptance.estimates()
            tokens = 1.0 + accepted.means[index - 1]
            covariance = accepted.covariance[index - 1]
            variance += covariance[index - 1]
        rate = batch_size * tokens / cost.seconds
        # Plain decoding gets the benefit of the doubt: once it runs, the doubt is gone.
        caution = self._caution if index > 0 else 0.0
        return _Arm(
            index=index,
            strategy=strategy,
            seconds=cost.seconds,
            tokens_per_s=rate,
            log_lower=math.log(rate) - caution * math.sqrt(variance),
            accept_covariance=covariance,
            variance=variance,
        )

    def state_dict(self) -> dict[str, object]:
        """Both models and the budget."""
        if self._num_observed > 0:
            self._refresh()
        return {
            "kind": "cost_model",
            "strategies": [str(s) for s in self._strategies],
            "acceptance": self._acceptance.state_dict(),
            "cost": self._cost.state_dict(),
            "budget_s": self._budget_s,
            "is_on": self._is_on,
            "num_observed": self._num_observed,
            "checked_at": list(self._checked_at),
            "jumped_at": self._jumped_at,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `StrategySelector`."""
        check_state(state, "cost_model", self._strategies)
        self._acceptance.load_state_dict(state["acceptance"])
        self._cost.load_state_dict(state["cost"])
        self._budget_s, self._is_on = state["budget_s"], state["is_on"]
        self._num_observed, self._checked_at = state["num_observed"], list(state["checked_at"])
        self._jumped_at, self._trial_rate = state["jumped_at"], 0.0
        self._start_plans()
