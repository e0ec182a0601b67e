"""The cost-model selector: tokens a strategy brings, divided by seconds it takes, each learned apart.

DESIGN 5.3. A bandit that learns only tokens per second must try every strategy at every batch size again and again. Here
acceptance is learned by depth for all batch sizes at once (`acceptance_model`), and seconds by rows and steps for all
strategies at once (`step_cost`), so one step informs every arm. Three rules make it safe:
- an arm that drafts runs only if the LOWER bound of its gain over plain decoding, always an arm, is above the hysteresis:
  an uncertain gain is never relied upon;
- another arm is tried only if what the trial may teach is worth more than it costs (`plan`), and only from a budget: a
  fixed share of the time, and of the time that drafting has saved. Every trial pays out of it what it lost. So trying
  costs at most that share, whatever the drafter does;
- plain decoding, the learned drafter and retrieval are each tried now and then, sooner if the budget permits, whatever is
  believed; and the learned drafter soon after it was replaced or had surprised.
One thing to know: it learns from every step whoever chose it, and what it learned is kept in its state, so a run pays for
learning once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tlt_megatron.speculation.acceptance_model import AcceptanceModel
from tlt_megatron.speculation.plan import Plan, make_plan
from tlt_megatron.speculation.selector import (
    Decision,
    DecisionTrace,
    check_state,
    committed_per_s,
)
from tlt_megatron.speculation.step_cost import CatchUpCost, StepCostModel
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

_MAX_BUDGET = 10.0  # steps of the present length: a long calm pays for no long loss
_NEW_BATCH = 1.25  # times the batch size before
_HICCUP = 2.0  # times the expected seconds: what is above is not the fault of the arm on trial
_REFRESH_S = 0.4  # between two looks at the models
_REFRESH_STEPS = (8, 512)
# A look takes about _LOOK_S. Looks have _LOOK_SHARE of the time, and may draw on as much as was not used of it.
_LOOK_S = 1e-3
_LOOK_SHARE = 0.015
_MAX_LOOK_CREDIT_S = 20e-3
# An arm rests between two trials, because machines are slow for several steps on end. One of at least `_NEAR` the rate of
# the best is tried although it does not seem worth it: after `_RETRY` steps, twice as many after every trial, if it was slow
# out of reason, and after `_STALE` * `probe_every` steps in any case.
_REST = 20
_RETRY = 10
_STALE = 3
_NEAR = 0.75
_LONG_TRIAL = 3  # steps
# Steps after the learned drafter was replaced, given up, or did far worse or better than expected, at which it is looked at
# again if it does not run: a batch begins all its responses at once, and beginnings tell little of what follows.
_RECHECKS = (8, 64)
_OVERDUE = 5  # times the patience with a kind of arms: then it is looked at whatever that costs
_CALM_STEPS = 8  # of plain decoding, at most, that are taken at one word and learned from together
_DRAFTING_PATIENCE = 4  # other drafters are looked at as many times less often while one runs
# Share of the time that looks at plain decoding may lose while drafting runs: where drafting gains little they cost little,
# and come often, since a small gain is soon a loss. Least and most of `probe_every` between two.
_PLAIN_SHARE = 0.004
_PLAIN_PATIENCE = (0.2, 8.0)
_PLAIN, _LEARNED, _RETRIEVED = range(3)


class CostModelSelector:
    """Adaptive in both directions; OFF is an arm whether it is listed or not."""

    def __init__(
        self,
        strategies: Sequence[SpeculationStrategy],
        *,
        half_life: float = 50_000.0,
        explore_share: float = 0.004,
        gain_share: float = 0.02,
        first_budget: float = 2.0,
        hysteresis: float = 0.02,
        caution: float = 0.5,
        horizon: float = 120.0,
        probe_every: int = 100,
    ) -> None:
        """`half_life`: steps after which half of what was learned of times is forgotten. `explore_share`: share of the
        time that trials may lose; `gain_share`: and of the time saved. `first_budget`: plain steps that they may lose at
        the start. `hysteresis`: relative gain that turning speculation on or off needs. `caution`: standard errors of the
        lower bound. `horizon`: steps for which a better arm pays its trial back. `probe_every`: steps after which drafting
        is looked at again while it is off."""
        drafting = [s for s in strategies if not s.is_off]
        if len(set(drafting)) != len(drafting):
            raise ValueError(f"strategies={', '.join(map(str, strategies))}: one is given twice")
        if not 0.0 < explore_share < 1.0:
            raise ValueError(f"explore_share={explore_share} is outside (0, 1)")
        self._strategies = (OFF, *drafting)
        self._index = {strategy: index for index, strategy in enumerate(self._strategies)}
        self._kinds = [_kinds(strategy) for strategy in self._strategies]
        self._acceptance = AcceptanceModel(drafting)
        self._cost = StepCostModel(self._strategies, half_life=half_life)
        self._catch_up = CatchUpCost()
        self._explore_share = explore_share
        self._gain_share = gain_share
        self._first_budget = first_budget
        self._hysteresis = hysteresis
        self._caution = caution
        self._horizon = horizon
        self._probe_every = probe_every
        self._budget_s = 0.0
        self._is_on = False
        self._num_observed = 0
        self._ran_at = [0] * len(self._strategies)  # the last step of each arm,
        self._checked_at = [0, 0, 0]  # and of each kind of arms
        self._rested_at = [0] * len(self._strategies)  # when an arm may be tried again
        self._num_tried = [0] * len(self._strategies)
        self._jumped_at = 0  # the last step that showed another drafter than the one known
        self._grew_at = 0  # the last step before a larger batch
        self._fitted_at = 0
        self._refresh_at = 0
        self._look_credit_s = _MAX_LOOK_CREDIT_S
        self._batch_size = 0
        self._plans: dict[int, Plan] = {}
        self._plan: Plan | None = None  # for the present batch size
        self._rechecks_at: list[int] = []  # the steps of _RECHECKS to come
        self._trial = 0  # the arm on trial, while steps are left
        self._trial_left = 0
        self._is_routine = False  # its kind of arms had not been seen for long
        self._is_calm = False
        self._calm_left = 0  # plain steps to be taken before anything else is considered
        self._calm_s: list[float] = []  # seconds of those that were taken
        self._trace = DecisionTrace()

    def choose(self, batch_size: int) -> SpeculationStrategy:
        """The best arm, or a trial that the budget pays for."""
        if self._calm_left > 0 and batch_size == self._batch_size:
            self._calm_left -= 1
            self._trace.chosen(batch_size, OFF, "exploit")
            return OFF
        self._end_calm()
        if batch_size != self._batch_size:
            self._resize(batch_size)
        if self._cost.is_empty:  # all is measured against a plain step
            self._trace.chosen(batch_size, OFF, "first")
            return OFF
        plan = self._plan
        if plan is None:
            plan = self._plan = self._plan_of(batch_size)
        if self._trial_left == 0:
            self._trial, self._trial_left = self._pick_trial(plan)
        if self._trial_left > 0:
            chosen = self._strategies[self._trial]
            self._trace.chosen(batch_size, chosen, "explore")
            return chosen
        if plan.best > 0 and not self._is_on:
            self._refresh_at = min(self._refresh_at, self._num_observed + 1)
        elif plan.best == 0 and self._is_on:
            self._doubt_drafter()
        self._is_on = plan.best > 0
        if not self._is_on:
            until = min([self._refresh_at, *self._rechecks_at[:1]])
            self._calm_left = min(_CALM_STEPS, until - self._num_observed) - 1
            self._is_calm = self._calm_left >= 0
        chosen = self._strategies[plan.best]
        self._trace.chosen(batch_size, chosen, "exploit")
        return chosen

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
        arm = self._index.get(strategy)
        if arm is None:
            return
        if self._is_calm and arm == 0 and batch_size == self._batch_size:
            self._calm_s.append(seconds)
        else:
            self._end_calm()
            self._learn(arm, batch_size, accepted_by_depth, [seconds])

    def _end_calm(self) -> None:
        """Learn from the plain steps that were taken without a thought."""
        taken, self._calm_s = self._calm_s, []
        self._calm_left, self._is_calm = 0, False
        if taken:
            self._learn(0, self._batch_size, (), taken)

    def _learn(
        self, arm: int, batch_size: int, accepted_by_depth: Sequence[int], times_s: list[float]
    ) -> None:
        """From a step, or from several plain ones in a row."""
        strategy, num_steps, total_s = self._strategies[arm], len(times_s), sum(times_s)
        num_tokens = num_steps * batch_size + sum(accepted_by_depth)
        self._num_observed += num_steps
        self._ran_at[arm] = self._num_observed
        for kind in self._kinds[arm]:
            self._checked_at[kind] = self._num_observed
        self._account(arm, num_tokens / batch_size / max(total_s, 1e-9), times_s)
        if strategy.is_learned and self._catch_up.is_due:
            plan = self._plan if batch_size == self._batch_size else None
            self._catch_up.caught_up(total_s - plan.seconds[arm] if plan else None)
        else:
            self._cost.observe(strategy, batch_size, *times_s)
        if not strategy.is_learned:
            self._catch_up.wrote(num_tokens)
        self._look_credit_s = min(self._look_credit_s + _LOOK_SHARE * total_s, _MAX_LOOK_CREDIT_S)
        if arm > 0 and self._acceptance.observe(strategy, batch_size, accepted_by_depth):
            self._jumped_at = self._refresh_at = self._num_observed
            self._trial_left, self._look_credit_s = 0, _MAX_LOOK_CREDIT_S
            if strategy.is_learned:
                self._doubt_drafter()
        is_time = self._num_observed >= self._refresh_at or self._acceptance.has_news
        if is_time and self._trial_left == 0 and self._look_credit_s >= 0.0:
            self._refresh(total_s / num_steps)

    def drafter_changed(self) -> None:
        """Look at the new one whatever it costs: what is known is of its predecessor."""
        self._end_calm()
        self._doubt_drafter()

    def _doubt_drafter(self) -> None:
        self._rechecks_at = [self._num_observed + steps for steps in _RECHECKS]

    def decisions(self) -> list[Decision]:
        """See `StrategySelector`."""
        return self._trace.take()

    def _account(self, arm: int, rate: float, times_s: list[float]) -> None:
        """What trials may lose, and what one has lost. `rate` is tokens per second and request."""
        total_s = sum(times_s)
        if self._num_observed == len(times_s):  # the first
            self._budget_s = self._first_budget * times_s[0]
        self._budget_s += self._explore_share * total_s
        plan = self._plan
        if plan is not None:
            if arm > 0:
                self._budget_s += self._gain_share * (rate / plan.rates[0] - 1.0) * total_s
            if self._trial_left > 0 and arm == self._trial:
                self._pay(plan, rate, total_s)
            else:
                self._trial_left = 0
        self._budget_s = min(self._budget_s, _MAX_BUDGET * total_s / len(times_s))

    def _pay(self, plan: Plan, rate: float, seconds: float) -> None:
        """For a step of the running trial. A lucky one pays back, else the noise alone would use up the budget."""
        expected_s = plan.seconds[self._trial]
        paid_s = seconds if seconds < _HICCUP * expected_s else expected_s
        self._budget_s -= paid_s - rate * seconds / plan.rates[plan.best]
        self._trial_left -= 1
        if self._trial_left == 0:
            # A routine look at a bad drafter that it is still bad teaches nothing; if it is not, the acceptance is news.
            if self._is_on or not self._is_routine or rate > plan.rates[plan.best]:
                self._refresh_at = self._num_observed
            self._rested_at[self._trial] = self._num_observed + _REST
            self._num_tried[self._trial] += 1

    def _resize(self, batch_size: int) -> None:
        """Requests have left or joined; more than a few new ones are another batch."""
        before, self._batch_size = self._batch_size, batch_size
        self._catch_up.resize(before, batch_size)
        self._plan = None
        if batch_size > _NEW_BATCH * before:
            self._trial_left = 0
            if self._num_observed > 0:
                self._grew_at = self._num_observed
                self._refresh(0.0)
                self._acceptance.resize(batch_size)
                self._cost.grow(before, batch_size)

    def _refresh(self, step_s: float) -> None:
        self._look_credit_s -= _LOOK_S
        num_steps = self._num_observed - self._fitted_at
        self._cost.fit(num_steps)
        self._acceptance.fit(num_steps)
        self._fitted_at = self._num_observed
        self._plans.clear()
        self._plan = None
        # While little is known, at the start, after a jump and of drafts for a larger batch, every step is news.
        now = self._num_observed
        num_settled = (now - self._jumped_at) // 6
        if self._is_on:
            num_settled = min(num_settled, (now - self._grew_at) // 2)
        least, most = _REFRESH_STEPS
        num_wanted = min(max(int(_REFRESH_S / max(step_s, 1e-6)), least), most)
        self._refresh_at = now + min(num_wanted, num_settled + 1)

    def _plan_of(self, batch_size: int) -> Plan:
        """Large batches of nearly the same size share one."""
        key = batch_size if batch_size <= 16 else round(16 * math.log2(batch_size))
        plan = self._plans.get(key)
        if plan is None:
            once_s = self._catch_up.expected_s(self._cost.row_s)
            plan = self._plans[key] = make_plan(
                batch_size,
                self._cost.estimates(batch_size),
                self._acceptance.estimates() if len(self._strategies) > 1 else None,
                [self._num_observed - ran_at for ran_at in self._ran_at],
                [once_s if s.is_learned else 0.0 for s in self._strategies],
                is_on=self._is_on,
                hysteresis=self._hysteresis,
                caution=self._caution,
                horizon=self._horizon,
            )
        return plan

    def _pick_trial(self, plan: Plan) -> tuple[int, int]:
        """Arm and steps: of a kind that was not seen for long, worth it, or given up by mistake perhaps. 0 steps: none."""
        now = self._num_observed
        if self._rechecks_at and now >= self._rechecks_at[0]:
            del self._rechecks_at[0]
            learned = [arm for arm in plan.others if self._strategies[arm].is_learned]
            if learned and not self._strategies[plan.best].is_learned:
                self._is_routine = True
                return learned[0], 1
        for kind, checked_at in enumerate(self._checked_at):
            waited, patience = now - checked_at, self._patience(plan, kind)
            if waited >= patience:
                arm = next((arm for arm in plan.others if kind in self._kinds[arm]), None)
                is_overdue = waited >= _OVERDUE * patience
                if arm is not None and (is_overdue or self._can_pay(plan, arm, 1)):
                    self._is_routine = True
                    return arm, 1
        self._is_routine = False
        if self._budget_s > 0.0:
            for arm, num_steps in plan.trials:
                if now >= self._rested_at[arm] and self._can_pay(plan, arm, num_steps):
                    return arm, num_steps
        is_rich = self._budget_s > 0.5 * _MAX_BUDGET * plan.seconds[plan.best]
        for arm in plan.others:
            if plan.rates[arm] < _NEAR * plan.rates[plan.best]:
                break
            patience = self._probe_every * _STALE if is_rich else math.inf
            if arm in self._cost.suspects:
                patience = min(_RETRY << min(self._num_tried[arm], 5), patience)
            if now - self._ran_at[arm] >= patience and self._can_pay(plan, arm, _LONG_TRIAL):
                return arm, _LONG_TRIAL
        return 0, 0

    def _patience(self, plan: Plan, kind: int) -> float:
        """Steps after which a kind of arms that does not run is looked at again."""
        if plan.best == 0:
            return self._probe_every
        if kind != _PLAIN:
            return self._probe_every * _DRAFTING_PATIENCE
        gain = plan.rates[plan.best] / plan.rates[0] - 1.0
        least, most = _PLAIN_PATIENCE
        return min(max(gain / _PLAIN_SHARE, least * self._probe_every), most * self._probe_every)

    def _can_pay(self, plan: Plan, arm: int, num_steps: int) -> bool:
        if arm == 0:
            return True  # plain decoding is never put off
        lost_s = num_steps * plan.seconds[arm] * (1.0 - plan.rates[arm] / plan.rates[plan.best])
        if self._strategies[arm].is_learned:
            lost_s += self._catch_up.expected_s(self._cost.row_s)
        # A full budget buys anything once: the price itself may be a mistake.
        return self._budget_s > min(max(lost_s, 0.0), 0.9 * _MAX_BUDGET * plan.seconds[plan.best])

    def state_dict(self) -> dict[str, object]:
        """Both models and the budget. Whoever goes on, this selector or a restored one, goes on with other requests."""
        self._end_calm()
        if self._num_observed > 0:
            self._refresh(0.0)
        self._batch_size, self._trial_left = 0, 0
        self._catch_up.forget()
        return {
            "kind": "cost_model",
            "strategies": [str(s) for s in self._strategies],
            "acceptance": self._acceptance.state_dict(),
            "cost": self._cost.state_dict(),
            "catch_up": self._catch_up.state_dict(),
            "budget_s": self._budget_s,
            "is_on": self._is_on,
            "num_observed": self._num_observed,
            "ran_at": list(self._ran_at),
            "rested_at": list(self._rested_at),
            "num_tried": list(self._num_tried),
            "checked_at": list(self._checked_at),
            "jumped_at": self._jumped_at,
            "rechecks_at": list(self._rechecks_at),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `StrategySelector`."""
        check_state(state, "cost_model", self._strategies)
        self._acceptance.load_state_dict(state["acceptance"])
        self._cost.load_state_dict(state["cost"])
        self._catch_up.load_state_dict(state["catch_up"])
        self._budget_s, self._is_on = state["budget_s"], state["is_on"]
        self._num_observed = self._fitted_at = state["num_observed"]
        self._ran_at, self._checked_at = list(state["ran_at"]), list(state["checked_at"])
        self._rested_at, self._jumped_at = list(state["rested_at"]), state["jumped_at"]
        self._num_tried = list(state["num_tried"])
        self._batch_size, self._trial_left = 0, 0
        self._is_calm, self._calm_left, self._calm_s = False, 0, []
        self._rechecks_at = list(state["rechecks_at"])
        self._refresh(0.0)


def _kinds(strategy: SpeculationStrategy) -> tuple[int, ...]:
    """What a step of it tells about."""
    if strategy.is_off:
        return (_PLAIN,)
    learned = (_LEARNED,) if strategy.is_learned else ()
    return (*learned, _RETRIEVED) if strategy.num_retrieved else learned
