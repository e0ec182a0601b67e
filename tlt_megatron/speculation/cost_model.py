"""The cost-model selector: expected tokens of a decode pass over its expected seconds; the best strategy runs.

Sampling is noise-keyed, so the tokens do not depend on the strategy. One pass therefore tells about the acceptance of every
strategy (`AcceptanceTable`), and its seconds about the cost of every strategy (`PassCost`). Only kinds of strategies that do
not run at all are probed now and then: plain decoding, the learned drafter, retrieval. Probes may lose a fixed share of the
time. The selector uses no clock and no random numbers, so it is deterministic in what it observes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tlt_megatron.speculation.pass_cost import PassCost
from tlt_megatron.speculation.selector import Decision, fits
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

# ---- acceptance; counts are in requests: a pass of 8 requests adds 8 at the first depth
_HALF_LIFE = 300.0  # requests after which a count weighs half: some passes of a large batch
_PRIOR = 2.0  # requests; weight of a rate that stands in for missing counts
_MAX_RATE = 0.995  # of acceptance; 1 - _MAX_RATE is the lowest
_UNKNOWN = 0.3  # acceptance of an unknown drafter: too low to rely on
_DISCOUNTED = 20.0  # requests; weight left of old counts when a probe measures the drafter again
_WIDTH_GAIN = 3.0  # about 1 / (change of a tree's acceptance per unit of log w)
_COLLAPSE = 1e4  # likelihood ratio at which the drafter counts as collapsed, against a quarter
# ---- choice
_PROBE_SHARE = 0.005  # of the time that probes of one kind may lose
_FIRST_BUDGET = 2.0  # passes that they may lose at the start
_MAX_BUDGET = 10.0  # passes; a long time without probes must not fund a long loss
_REST = (2, 128)  # passes between two probes of a kind: doubles from the first to the second
_NEW_DRAFTER = 4  # passes of its probe: the first one also reads the prompts and drafts beginnings, which is hard
_MAX_REFRESH = 8  # passes between two updates of the estimates (about 0.2 ms each)


class AcceptanceTable:
    """Chance of each depth, given that the depth above was accepted, for every strategy.

    A depth is missed if the learned part and the retrieved chain both miss. A chain misses with chance m, a tree with m ** w:
    its width w is learned for each tree. An accepted token is attributed to the parts by Bayes' rule, so every strategy that
    shares a part learns from it.
    """

    def __init__(self) -> None:
        # [tried, accepted] by depth, of the drafter's first candidate and of retrieved tokens.
        self._first: list[list[float]] = []
        self._retrieved: list[list[float]] = []
        # By tree: log w, and the requests that it was learned from.
        self._widths: dict[str, list[float]] = {}
        # That the drafter has collapsed: a log likelihood ratio, and the counts that it comes from.
        self._evidence = 0.0
        self._recent: list[list[float]] = []

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
    ) -> bool:
        """Count a drafting pass. Return whether the drafter is found to have collapsed."""
        fade = 0.5 ** (batch_size / _HALF_LIFE)
        chances = self._chances(strategy)
        reached_by_depth = (batch_size, *accepted_by_depth[:-1])
        first, retrieved = [], []
        evidence = surprise = 0.0
        for reached, accepted, (by_first, by_retrieved, rate) in zip(
            reached_by_depth, accepted_by_depth, chances, strict=True
        ):
            first.append([float(reached), accepted * by_first / rate])
            retrieved.append([float(reached), accepted * by_retrieved / rate])
            surprise += accepted - reached * rate
            evidence += accepted * math.log(0.25)
            evidence += (reached - accepted) * math.log((1.0 - rate / 4.0) / (1.0 - rate))
        if strategy.is_learned:
            first = first[: strategy.num_steps]
            if first_by_depth is not None:
                first = [
                    [c[0], float(right)] for c, right in zip(first, first_by_depth, strict=True)
                ]
            if self._has_collapsed(first, evidence):
                return True
            _add(self._first, first, fade)
        if strategy.num_retrieved:
            _add(self._retrieved, retrieved[: strategy.num_retrieved], fade)
        if strategy.topk > 1:
            log_width, weight = self._width(strategy)
            weight = min(weight + sum(reached_by_depth), 4 * _HALF_LIFE)
            log_width = min(max(log_width + _WIDTH_GAIN * surprise / weight, 0.0), 2.0)
            self._widths[str(strategy)] = [log_width, weight]
        return False

    def discount(self) -> None:
        """Let old counts weigh little, because a drafter that did not run is measured again."""
        for counts in (self._first, self._retrieved):
            if counts and counts[0][0] > _DISCOUNTED:
                _add(counts, [], _DISCOUNTED / counts[0][0])

    def _chances(self, strategy: SpeculationStrategy) -> list[tuple[float, float, float]]:
        """Return by depth the chance of the first candidate, of the retrieved token, and of any part of the strategy."""
        first = _rates(self._first, strategy.num_steps)
        retrieved = _rates(self._retrieved, strategy.num_retrieved)
        width = math.exp(self._width(strategy)[0]) if strategy.topk > 1 else 1.0
        chances = []
        for depth in range(strategy.depth):
            by_first = first[depth] if depth < len(first) else 0.0
            by_retrieved = retrieved[depth] if depth < len(retrieved) else 0.0
            rate = 1.0 - (1.0 - by_first) ** width * (1.0 - by_retrieved)
            chances.append((by_first, by_retrieved, min(max(rate, 1.0 - _MAX_RATE), _MAX_RATE)))
        return chances

    def _width(self, strategy: SpeculationStrategy) -> list[float]:
        """Return log w of a tree and its weight. Until it is measured, a tree with room for n candidates at each depth has
        w = 1 + 0.6 log2(n), a fit to trees of several policies."""
        room = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)
        return self._widths.get(str(strategy), [math.log(1.0 + 0.6 * math.log2(room)), 50.0])

    def _has_collapsed(self, counts: list[list[float]], evidence: float) -> bool:
        """Page's (1954) test: are the latest passes `_COLLAPSE` times likelier at a quarter of the acceptance?"""
        self._evidence = max(self._evidence + evidence, 0.0)
        if self._evidence == 0.0:
            self._recent = []
            return False
        _add(self._recent, counts, 1.0)
        if self._evidence < math.log(_COLLAPSE):
            return False
        self._first = [[max(n, _DISCOUNTED), accepted] for n, accepted in self._recent if n > 0.0]
        self._recent, self._evidence = [], 0.0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as values that JSON can hold."""
        return {name.strip("_"): copy.deepcopy(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name in vars(self):
            setattr(self, name, copy.deepcopy(state[name.strip("_")]))


def _add(counts: list[list[float]], new: Sequence[Sequence[float]], fade: float) -> None:
    """Scale `counts` ([tried, accepted] by depth) by `fade` and add `new`."""
    counts += [[0.0, 0.0] for _ in range(len(new) - len(counts))]
    for depth, count in enumerate(counts):
        added = new[depth] if depth < len(new) else (0.0, 0.0)
        count[:] = [count[0] * fade + added[0], count[1] * fade + added[1]]


def _rates(counts: Sequence[Sequence[float]], num_depths: int) -> list[float]:
    """Return the acceptance of each depth. A depth with few counts is like the one above it."""
    rates, rate = [], _UNKNOWN
    for depth in range(num_depths):
        if depth < len(counts):
            tried, accepted = counts[depth]
            rate = min((accepted + _PRIOR * rate) / (tried + _PRIOR), _MAX_RATE)
        rates.append(rate)
    return rates


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
        kinds = [
            [OFF],
            [s for s in drafting if s.is_learned],
            [s for s in drafting if not s.is_learned],
        ]
        self._kinds = [_Kind(kind) for kind in kinds if kind]
        self._table = AcceptanceTable()
        self._cost = PassCost()
        self._current = OFF
        self._last = OFF, 0  # strategy and batch size of the last pass observed
        self._probe: SpeculationStrategy | None = None  # the choice is a probe
        self._num_observed = 0
        self._changed_at = 0  # pass of the last surprise: a change of strategy, a collapse
        self._refresh_at = 0
        self._tokens: dict[SpeculationStrategy, float] = {}
        self._rates: dict[int, dict[SpeculationStrategy, float]] = {}  # by batch size

    def choose(self, batch_size: int) -> Decision:
        """Return the best strategy, or a probe that its budget pays for."""
        if self._num_observed == 0:
            return Decision(strategy=OFF, reason="first")  # everything is compared with it
        rates = self._rates_at(batch_size)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1.0 + self._hysteresis) * rates[self._current]:
            self._current = best
            self._changed_at = self._refresh_at = self._num_observed
        self._probe = None
        for kind in self._kinds:
            if self._current not in kind.strategies and kind.is_due(self._num_observed):
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
        is_probe, self._probe = strategy == self._probe, None
        num_tokens = batch_size + sum(accepted_by_depth)
        self._account(strategy, batch_size, num_tokens, seconds, is_probe=is_probe)
        # A pass of the learned drafter after others, or with new requests, includes its reading of their tokens: an upper
        # bound of its seconds.
        last, last_size = self._last
        is_clean = not strategy.is_learned or (last.is_learned and batch_size <= last_size)
        if is_clean or seconds < self._cost.seconds(strategy, batch_size):
            self._cost.observe(strategy, batch_size, seconds)
        self._last = strategy, batch_size
        if is_probe and num_tokens > batch_size * self._table.tokens(strategy):
            self._table.discount()  # better than what is known of the drafter
        if not strategy.is_off and self._table.observe(
            strategy, batch_size, accepted_by_depth, first_by_depth
        ):
            self._changed_at = self._refresh_at = self._num_observed
        if is_probe or self._num_observed >= self._refresh_at:
            self._refresh()

    def drafter_changed(self) -> None:
        """Probe the learned drafter at once if it does not run."""
        for kind in self._kinds:
            if kind.strategies[0].is_learned and self._current not in kind.strategies:
                kind.reset()

    def _refresh(self) -> None:
        """Update the estimates, the more seldom the longer ago the last surprise was."""
        settled = (self._num_observed - self._changed_at) // 2
        self._refresh_at = self._num_observed + min(settled + 1, _MAX_REFRESH)
        self._cost.refresh()
        self._tokens = {s: self._table.tokens(s) for s in self._strategies}
        self._rates.clear()

    def _rates_at(self, batch_size: int) -> dict[SpeculationStrategy, float]:
        """Return the tokens per second of one request."""
        rates = self._rates.get(batch_size)
        if rates is None:
            rates = self._rates[batch_size] = {
                s: tokens / self._cost.seconds(s, batch_size) for s, tokens in self._tokens.items()
            }
        return rates

    def _account(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        num_tokens: int,
        seconds: float,
        *,
        is_probe: bool,
    ) -> None:
        """Add to the budgets of all kinds; subtract what a probe lost against the strategy that would have run."""
        for kind in self._kinds:
            is_new = self._num_observed == 1 and kind.strategies[0] != OFF
            share = _FIRST_BUDGET if is_new else _PROBE_SHARE
            kind.earn(share * seconds, most_s=_MAX_BUDGET * seconds)
            if strategy in kind.strategies:
                lost_s = next_s = 0.0
                if is_probe:
                    worth_s = num_tokens / batch_size / self._rates_at(batch_size)[self._current]
                    lost_s = seconds - worth_s
                    # A disturbed probe must not put off the next one.
                    next_s = min(seconds, self._cost.seconds(strategy, batch_size)) - worth_s
                kind.ran(self._num_observed, lost_s, next_s, is_probe=is_probe)

    def _identity(self) -> dict[str, Any]:
        names = [str(s) for s in self._strategies]
        return {"kind": "cost_model", "version": 3, "strategies": names}

    def state_dict(self) -> dict[str, Any]:
        """Return both tables and the budgets of probes."""
        self._refresh()  # a selector restored from this state does so too
        return {
            **self._identity(),
            "table": self._table.state_dict(),
            "cost": self._cost.state_dict(),
            "kinds": [kind.state_dict() for kind in self._kinds],
            "current": str(self._current),
            "last": [str(self._last[0]), self._last[1]],
            "num_observed": self._num_observed,
            "changed_at": self._changed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StrategySelector`."""
        if not fits(state, self._identity()):
            return
        self._table.load_state_dict(state["table"])
        self._cost.load_state_dict(state["cost"])
        for kind, values in zip(self._kinds, state["kinds"], strict=True):
            kind.load_state_dict(values)
        self._current = SpeculationStrategy.parse(state["current"])
        name, size = state["last"]
        self._last = SpeculationStrategy.parse(name), size
        self._num_observed, self._changed_at = state["num_observed"], state["changed_at"]
        self._probe = None
        self._refresh()


class _Kind:
    """Strategies of which one pass tells about all; one is probed if none of them runs."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        self.strategies = strategies  # the cheapest first, which is the one to probe
        self._ran_at = 0
        self._budget_s = 0.0  # that probes may lose
        self._lost_s = 0.0  # by the last probe
        self._rest = _REST[0]  # passes after the last one to the next probe
        self._num_left = 0  # passes left of the probe of a new drafter

    def is_due(self, now: int) -> bool:
        """Whether a probe is due after pass `now`, and paid for. A new drafter is probed in any case."""
        is_rested = now - self._ran_at >= self._rest
        return self._num_left > 0 or (is_rested and self._budget_s >= self._lost_s)

    def earn(self, seconds: float, *, most_s: float) -> None:
        """Let probes lose so much more."""
        self._budget_s = min(self._budget_s + seconds, most_s)

    def ran(self, now: int, lost_s: float, next_s: float, *, is_probe: bool) -> None:
        """Note a pass of this kind: what it lost, and what the next probe may lose. A probe that won is repeated at once."""
        self._ran_at = now
        self._budget_s -= lost_s  # a lucky probe pays back
        self._num_left = max(self._num_left - 1, 0) if is_probe else 0
        if is_probe and next_s >= 0.0:
            self._lost_s = next_s
            self._rest = self._rest if self.strategies[0].is_off else min(2 * self._rest, _REST[1])
        else:
            self._rest, self._lost_s = (1 if is_probe else _REST[0]), 0.0

    def reset(self) -> None:
        """Probe at once, with several passes."""
        self._rest, self._lost_s, self._budget_s = 1, 0.0, max(self._budget_s, 0.0)
        self._num_left = _NEW_DRAFTER

    def state_dict(self) -> dict[str, float]:
        """Return the budget and the times as values that JSON can hold."""
        return {
            "ran_at": self._ran_at,
            "budget_s": self._budget_s,
            "lost_s": self._lost_s,
            "rest": self._rest,
            "num_left": self._num_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._ran_at, self._budget_s = state["ran_at"], state["budget_s"]
        self._lost_s, self._rest = state["lost_s"], state["rest"]
        self._num_left = state["num_left"]
