"""The cost-model selector: expected tokens of a decode pass over its expected seconds; the best strategy runs.

Sampling is noise-keyed, so the tokens do not depend on the strategy. One pass therefore tells about the acceptance of every
strategy (`AcceptanceTable`), and its seconds about the cost of every strategy (`PassCost`). Only kinds of strategies that do
not run at all are probed now and then: plain decoding, the learned drafter, retrieval. Probes may lose a fixed share of the
time. The selector uses no clock and no random numbers, so it is deterministic in what it observes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.pass_cost import PassCost
from tlt_megatron.speculation.selector import Decision, fits

# ---- acceptance; counts are in independent requests, see `_CORRELATION`
_CORRELATION = 0.1  # between requests of one pass: n of them tell as much as n / (1 + (n - 1) / 10); of recorded runs
_HALF_LIFE = 150.0  # requests after which a count weighs half
_UNMEASURED = 10.0  # times as fast: depths that the strategies of late do not reach
_PRIOR = 1.0  # requests; weight of the rate of the depth above
_UNKNOWN = 0.3  # acceptance of an unknown drafter: too low to rely on
_MAX_RATE = 0.995  # of acceptance; 1 - _MAX_RATE is the lowest
_CHANGE = 0.003  # chance per pass that drafter or text have changed
_PATIENCE = 0.9  # share of the evidence of a change that is left after another pass
_WIDTH_GAIN = 3.0  # about 1 / (change of a tree's acceptance per unit of log w)
# ---- choice
_PROBE_SHARE = 0.005  # of the time that probes of one kind may lose
_FIRST_BUDGET = 2.0  # passes that they may lose at the start
_MAX_BUDGET = 10.0  # passes; a long time without probes must not fund a long loss
_REST = (2.0, 128.0)  # passes between two probes of a kind: doubles from the first to the second
_NEW_DRAFTER = 4  # passes of its probe: the first one also reads the prompts and drafts beginnings, which is hard
_REFIT = 8  # passes between two fits of the pass costs (about 0.2 ms each)

Counts = list[tuple[float, float]]  # [right, wrong] by depth


@dataclass
class _Part:
    """Acceptance by depth of one part of a draft, learned or retrieved, given that the depth above was right.

    Two counts compete, with the odds of their beta-binomial likelihoods: one of the usual acceptance, and one that begins anew
    with the pass since which things may have changed. The estimate is their mean by these odds.
    """

    usual: Counts = field(default_factory=list)
    recent: Counts = field(default_factory=list)
    odds: float = 0.0  # that things have changed
    seen_at: int = 0  # the latest pass
    by_depth: list[float] = field(default_factory=lambda: [_UNKNOWN])  # the estimate

    def rates(self, num_depths: int) -> list[float]:
        """Return the acceptance of each depth. Deeper ones than were tried are like the last."""
        return (self.by_depth + self.by_depth[-1:] * num_depths)[:num_depths]

    def observe(self, tried: Sequence[float], right: Sequence[float], now: int) -> None:
        """Count what pass `now` tried at each depth, and what was right."""
        new = []
        for n, k in zip(tried, right, strict=True):
            weight = 1.0 / (1.0 + _CORRELATION * max(n - 1.0, 0.0))
            new.append((k * weight, max(n - k, 0.0) * weight))
        first_odds = _CHANGE * (now - self.seen_at)
        self.seen_at = now
        self.odds *= _PATIENCE
        if self.odds < first_odds:
            self.odds, self.recent = first_odds, []
        evidence = _log_likelihood(self.recent, new) - _log_likelihood(self.usual, new)
        self.odds *= math.exp(min(max(evidence, -20.0), 20.0))
        fade = 0.5 ** (sum(new[0]) / _HALF_LIFE)
        self.usual, self.recent = (_add(c, new, fade) for c in (self.usual, self.recent))
        if self.odds > 1.0 / _CHANGE:
            self.usual, self.recent, self.odds = self.recent, [], 0.0
        share = self.odds / (1.0 + self.odds)
        num_depths = max(len(self.usual), len(self.recent))
        usual, recent = (_priors(c, num_depths) for c in (self.usual, self.recent))
        self.by_depth = [
            (1.0 - share) * _clip(a / (a + b)) + share * _clip(c / (c + d))
            for (a, b), (c, d) in zip(usual, recent, strict=True)
        ]


def _add(counts: Counts, new: Counts, fade: float) -> Counts:
    """Scale `counts` by `fade` and add `new`. Deeper counts than those of `new` fade faster."""
    pairs = itertools.zip_longest(counts, new, fillvalue=(0.0, 0.0))
    added = [(a * fade + c, b * fade + d) for (a, b), (c, d) in pairs]
    fast = fade**_UNMEASURED
    return added[: len(new)] + [(a * fast, b * fast) for a, b in counts[len(new) :]]


def _priors(counts: Counts, num_depths: int) -> list[tuple[float, float]]:
    """Return the beta distribution (right, wrong) of each depth. A depth with few counts is like the one above it."""
    priors, rate = [], _UNKNOWN
    for depth in range(num_depths):
        right, wrong = counts[depth] if depth < len(counts) else (0.0, 0.0)
        right, wrong = right + _PRIOR * rate, wrong + _PRIOR * (1.0 - rate)
        priors.append((right, wrong))
        rate = _clip(right / (right + wrong))
    return priors


def _log_likelihood(counts: Counts, new: Counts) -> float:
    """Return the log likelihood of `new` after `counts`, up to what does not depend on these."""
    return sum(
        _log_beta(a + right, b + wrong) - _log_beta(a, b)
        for (right, wrong), (a, b) in zip(new, _priors(counts, len(new)), strict=True)
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _clip(rate: float) -> float:
    return min(max(rate, 1.0 - _MAX_RATE), _MAX_RATE)


class AcceptanceTable:
    """Chance of each depth, given that the depth above was accepted, for every strategy.

    A depth is missed if the learned part and the retrieved chain both miss. A chain misses with chance m, a tree with m ** w:
    its width w is learned for each tree. An accepted token is attributed to the parts by Bayes' rule, so every strategy that
    shares a part learns from it.
    """

    def __init__(self) -> None:
        self._first = _Part()  # the drafter's first candidates
        self._retrieved = _Part()
        self._widths: dict[str, list[float]] = {}  # by tree: log w, and the requests it comes from
        self._num_passes = 0

    def tokens(self, strategy: SpeculationStrategy) -> float:
        """Return the expected tokens of a request in one pass, the bonus token included."""
        total = alive = 1.0
        for _, _, rate in self._chances(strategy):
            alive *= rate
            total += alive
        return total

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        first_by_depth: Sequence[int] | None,
    ) -> None:
        """Count a pass."""
        self._num_passes += 1
        if strategy.is_off:
            return
        chances = self._chances(strategy)
        tried = (batch_size, *accepted_by_depth[:-1])
        first, retrieved = (
            [n * c[part] / c[2] for n, c in zip(accepted_by_depth, chances, strict=True)]
            for part in (0, 1)
        )
        if strategy.is_learned:
            steps = strategy.num_steps
            self._first.observe(tried[:steps], (first_by_depth or first)[:steps], self._num_passes)
        if strategy.num_retrieved:
            depth = strategy.num_retrieved
            self._retrieved.observe(tried[:depth], retrieved[:depth], self._num_passes)
        if strategy.topk > 1:
            expected = sum(n * rate for n, (*_, rate) in zip(tried, chances, strict=True))
            log_width, weight = self._width(strategy)
            weight = min(weight + sum(tried), 8.0 * _HALF_LIFE)
            log_width += _WIDTH_GAIN * (sum(accepted_by_depth) - expected) / weight
            self._widths[str(strategy)] = [min(max(log_width, 0.0), 2.0), weight]

    def _chances(self, strategy: SpeculationStrategy) -> list[tuple[float, float, float]]:
        """Return by depth the chance of the first candidate, of the retrieved token, and of any part of the strategy."""
        first = self._first.rates(strategy.num_steps)
        retrieved = self._retrieved.rates(strategy.num_retrieved)
        width = math.exp(self._width(strategy)[0]) if strategy.topk > 1 else 1.0
        chances = []
        for by_first, by_retrieved in itertools.zip_longest(first, retrieved, fillvalue=0.0):
            rate = 1.0 - (1.0 - by_first) ** width * (1.0 - by_retrieved)
            chances.append((by_first, by_retrieved, _clip(rate)))
        return chances

    def _width(self, strategy: SpeculationStrategy) -> list[float]:
        """Return log w of a tree and its weight. Until it is measured, a tree with room for n candidates at each depth has
        w = 1 + 0.6 log2(n), a fit to trees of several policies."""
        room = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)
        return self._widths.get(str(strategy), [math.log(1.0 + 0.6 * math.log2(room)), 50.0])

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as values that JSON can hold."""
        parts = {"first": vars(self._first), "retrieved": vars(self._retrieved)}
        return copy.deepcopy(parts | {"widths": self._widths, "num_passes": self._num_passes})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        state = copy.deepcopy(dict(state))
        self._first, self._retrieved = _Part(**state["first"]), _Part(**state["retrieved"])
        self._widths, self._num_passes = state["widths"], state["num_passes"]


class CostModelSelector:
    """Adaptive in both directions. OFF is an arm whether it is listed or not."""

    def __init__(
        self, strategies: Sequence[SpeculationStrategy], *, hysteresis: float = 0.02
    ) -> None:
        """`hysteresis`: relative gain in tokens per second that a change of strategy needs."""
        drafting = sorted((s for s in strategies if not s.is_off), key=lambda s: s.num_rows)
        if len(set(drafting)) != len(drafting):
            raise ValueError(f"strategies={', '.join(map(str, strategies))}: one is given twice")
        self._strategies = (OFF, *drafting)
        self._hysteresis = hysteresis
        learned = [s for s in drafting if s.is_learned]
        kinds = [[OFF], learned, [s for s in drafting if not s.is_learned]]
        self._kinds = [_Kind(kind) for kind in kinds if kind]
        self._table = AcceptanceTable()
        self._cost = PassCost()
        self._current = OFF
        self._last = OFF, 0  # strategy and batch size of the last pass observed
        self._probe: SpeculationStrategy | None = None  # the choice is a probe
        self._num_observed = 0
        self._tokens = {s: self._table.tokens(s) for s in self._strategies}
        self._seconds: dict[int, dict[SpeculationStrategy, float]] = {}  # by batch size

    def choose(self, batch_size: int) -> Decision:
        """Return the best strategy, or a probe that its budget pays for."""
        if self._num_observed == 0:
            return Decision(strategy=OFF, reason="first")  # everything is compared with it
        rates = self._rates_at(batch_size)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1.0 + self._hysteresis) * rates[self._current]:
            self._current = best
        self._probe = None
        # Most requests are new. That the last ones were not worth drafting, mostly a straggler, says little about them.
        is_new = self._current.is_off and batch_size >= 2 * self._last[1]
        for kind in self._kinds:
            if self._current not in kind.strategies and kind.is_due(self._num_observed, is_new):
                self._probe = kind.strategies[0]
                return Decision(strategy=self._probe, reason="probe")
        return Decision(strategy=self._current, reason="best")

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        first_by_depth: Sequence[int] | None = None,
    ) -> None:
        """Learn from any pass of a listed strategy, also from one that was not chosen here."""
        if strategy not in self._strategies or not 0.0 < seconds < math.inf:
            return
        self._num_observed += 1
        probe, self._probe = self._probe, None
        is_probe = strategy == probe
        for kind in self._kinds:
            if probe in kind.strategies and strategy not in kind.strategies:
                kind.put_off(self._num_observed)
        self._account(strategy, batch_size, accepted_by_depth, seconds, is_probe=is_probe)
        # A pass of the learned drafter after others, or with new requests, includes its reading of their tokens: an upper
        # bound of its seconds.
        last, last_size = self._last
        is_clean = not strategy.is_learned or (last.is_learned and batch_size <= last_size)
        if is_clean or seconds < self._cost.seconds(strategy, batch_size):
            self._cost.observe(strategy, batch_size, seconds)
        self._last = strategy, batch_size
        self._table.observe(strategy, batch_size, accepted_by_depth, first_by_depth)
        if not strategy.is_off:
            self._tokens = {s: self._table.tokens(s) for s in self._strategies}
        if is_probe or self._num_observed <= _REFIT or self._num_observed % _REFIT == 0:
            self._refit()

    def drafter_changed(self) -> None:
        """Probe the learned drafter at once if it does not run."""
        for kind in self._kinds:
            if kind.strategies[0].is_learned and self._current not in kind.strategies:
                kind.reset()

    def _refit(self) -> None:
        """Update the estimates of seconds."""
        self._cost.refresh()
        self._seconds.clear()

    def _rates_at(self, batch_size: int) -> dict[SpeculationStrategy, float]:
        """Return the tokens per second of one request."""
        seconds = self._seconds.get(batch_size)
        if seconds is None:
            seconds = {s: self._cost.seconds(s, batch_size) for s in self._strategies}
            self._seconds[batch_size] = seconds
        return {s: tokens / seconds[s] for s, tokens in self._tokens.items()}

    def _account(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        *,
        is_probe: bool,
    ) -> None:
        """Add to the budgets of all kinds; subtract what a probe lost against the strategy that would have run."""
        lost_s, next_s, usual_s = 0.0, 0.0, seconds
        if is_probe:
            worth = 1.0 + sum(accepted_by_depth) / batch_size
            worth_s = worth / self._rates_at(batch_size)[self._current]
            usual_s = self._seconds[batch_size][self._current]
            # A disturbed probe must not put off the next one.
            next_s = min(seconds, self._cost.seconds(strategy, batch_size)) - worth_s
            lost_s = seconds - worth_s
        for kind in self._kinds:
            is_new = self._num_observed == 1 and kind.strategies[0] != OFF
            share = _FIRST_BUDGET if is_new else _PROBE_SHARE
            kind.budget_s = min(kind.budget_s + share * seconds, _MAX_BUDGET * seconds)
            if strategy in kind.strategies:
                kind.ran(self._num_observed, lost_s, next_s, usual_s, is_probe=is_probe)

    def _identity(self) -> dict[str, Any]:
        names = [str(s) for s in self._strategies]
        return {"kind": "cost_model", "version": 4, "strategies": names}

    def state_dict(self) -> dict[str, Any]:
        """Return both tables and the budgets of probes."""
        self._refit()  # a selector restored from this state does so too
        return {
            **self._identity(),
            "table": self._table.state_dict(),
            "cost": self._cost.state_dict(),
            "kinds": [
                {name: value for name, value in vars(kind).items() if name != "strategies"}
                for kind in self._kinds
            ],
            "current": str(self._current),
            "last": [str(self._last[0]), self._last[1]],
            "num_observed": self._num_observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StrategySelector`."""
        if not fits(state, self._identity()):
            return
        self._table.load_state_dict(state["table"])
        self._cost.load_state_dict(state["cost"])
        for kind, values in zip(self._kinds, state["kinds"], strict=True):
            vars(kind).update(values)
        self._current = SpeculationStrategy.parse(state["current"])
        name, size = state["last"]
        self._last = SpeculationStrategy.parse(name), size
        self._num_observed = state["num_observed"]
        self._probe = None
        self._tokens = {s: self._table.tokens(s) for s in self._strategies}
        self._refit()


@dataclass
class _Kind:
    """Strategies of which one pass tells about all; one is probed if none of them runs."""

    strategies: Sequence[SpeculationStrategy]  # the cheapest first, which is the one to probe
    ran_at: int = 0
    budget_s: float = 0.0  # that probes may lose
    lost_s: float = 0.0  # by the last probe
    rest: float = _REST[0]  # passes after the last one to the next probe
    num_left: int = 0  # passes left of the probe of a new drafter

    def is_due(self, now: int, is_new: bool) -> bool:
        """Whether a probe is due after pass `now`, and paid for. New requests need no rest, a new drafter no budget."""
        is_rested = is_new or now - self.ran_at >= self.rest
        return self.num_left > 0 or (is_rested and self.budget_s >= self.lost_s)

    def ran(
        self, now: int, lost_s: float, next_s: float, usual_s: float, *, is_probe: bool
    ) -> None:
        """Note a pass of this kind: what it lost, what the next probe may lose, and the seconds of a pass that is no probe.
        A probe that won is repeated at once. The others take half of the budget, the other half is for disturbed ones."""
        self.budget_s -= lost_s  # a lucky probe pays back
        self.lost_s = max(next_s, 0.0)
        if is_probe and next_s >= 0.0:
            self.put_off(now, 2.0 * next_s / (_PROBE_SHARE * usual_s))
        else:
            self.ran_at, self.rest = now, 1.0 if is_probe else _REST[0]
            self.num_left = max(self.num_left - 1, 0) if is_probe else 0

    def put_off(self, now: int, longest: float = math.inf) -> None:
        """Let the next probe wait twice as long as the last one, at most `longest` passes."""
        self.ran_at = now
        self.num_left = max(self.num_left - 1, 0)
        self.rest = max(min(2.0 * self.rest, longest, _REST[1]), _REST[0])

    def reset(self) -> None:
        """Probe at once, with several passes."""
        self.rest, self.lost_s, self.budget_s = 1.0, 0.0, max(self.budget_s, 0.0)
        self.num_left = _NEW_DRAFTER
