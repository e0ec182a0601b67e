"""The cost-model selector: expected tokens of a decode pass over its expected seconds; the best
strategy runs.

Sampling is noise-keyed, so the tokens do not depend on the strategy. One pass therefore tells about
the acceptance of every strategy of its kind (`_Acceptance`), and its seconds about the cost of
similar passes (`PassCost`). Only kinds of strategies that do not run at all are probed now and
then: plain decoding, the learned drafter, retrieval. The selector uses no clock and no random
numbers, so it is deterministic in what it observes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.saved_files import amount
from tlt_megatron.speculation.pass_cost import PassCost
from tlt_megatron.speculation.selector import Decision, fits

_HALF_LIFE = 15.0  # passes of one request after which a count weighs half; n requests are alike and count as sqrt(n)
# Tokens accepted beyond the expected ones that change the width of a tree by a factor e.
_WIDTH_TOKENS = 100.0
_PRIOR = 1.0  # requests; weight of the rate of the depth above
_UNKNOWN = 0.3  # acceptance of an unknown drafter: too low to rely on
_HYSTERESIS = 0.02  # relative gain in tokens per second that a change of strategy needs
_PROBE_SHARE = 0.005  # share of the time that probes of one kind may lose
_REST = (2.0, 500.0)  # fewest and most passes between two probes of a kind
_REST_GROWTH = 3.0  # largest growth of the rest with a probe; a new drafter takes it back


@dataclass
class _Acceptance:
    """How often the first candidate of a drafter is right at each depth, given that the depth above
    was right.
    """

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def observe(self, tried: Sequence[int], right: Sequence[int]) -> None:
        """Count a pass: what it tried at each depth, and what was right. Older counts fade."""
        fade = 0.5 ** (math.sqrt(tried[0]) / _HALF_LIFE)
        self.tried = _faded_sum(self.tried, tried, fade)
        self.right = _faded_sum(self.right, right, fade)

    def rates(self, num_depths: int) -> list[float]:
        """Return the acceptance of each depth. A depth with few counts is like the one above it."""
        rates, rate = [], _UNKNOWN
        for tried, right in zip(self.tried, self.right, strict=True):
            rate = (right + _PRIOR * rate) / (tried + _PRIOR)
            rates.append(rate)
        return (rates + [rate] * num_depths)[:num_depths]


def _faded_sum(counts: Sequence[float], new: Sequence[int], fade: float) -> list[float]:
    return [a * fade + b for a, b in itertools.zip_longest(counts, new, fillvalue=0.0)]


def _usual_width(strategy: SpeculationStrategy) -> float:
    """Return the width of a tree that was not measured: a fit to trees of several policies."""
    room = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)  # by depth
    return 1.0 + 0.45 * math.log2(room)


@dataclass
class _Kind:
    """Strategies with one drafter, so that one pass tells about all. One is probed if none of them
    runs.
    """

    strategies: Sequence[SpeculationStrategy]  # the cheapest first, which is the one to probe
    acceptance: _Acceptance = field(default_factory=_Acceptance)
    widths: dict[str, float] = field(default_factory=dict)  # widths of trees that ran: see `rates`
    expected: dict[SpeculationStrategy, float] = field(default_factory=dict)  # `tokens` as of now
    ran_at: int = 0
    rest: float = _REST[0]  # passes from `ran_at` to the next probe

    def rates(self, strategy: SpeculationStrategy) -> list[float]:
        """Return the acceptance of each depth. Where a chain misses with chance m, a tree of width
        w misses with m ** w.
        """
        rates = self.acceptance.rates(strategy.depth)
        if strategy.is_chain:
            return rates
        width = self.widths.get(str(strategy)) or _usual_width(strategy)
        return [1.0 - (1.0 - rate) ** width for rate in rates]

    def tokens(self, strategy: SpeculationStrategy) -> float:
        """Return the expected tokens of a request in one pass, the bonus token included."""
        if strategy not in self.expected:
            accepted = itertools.accumulate(self.rates(strategy), operator.mul)
            self.expected[strategy] = 1.0 + sum(accepted)
        return self.expected[strategy]

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        first_by_depth: Sequence[int] | None,
    ) -> None:
        """Count a pass."""
        tried = (batch_size, *accepted_by_depth[:-1])
        if not strategy.is_chain:
            expected = sum(map(operator.mul, tried, self.rates(strategy)))
            width = self.widths.get(str(strategy)) or _usual_width(strategy)
            surprise = (sum(accepted_by_depth) - expected) / _WIDTH_TOKENS
            self.widths[str(strategy)] = min(max(width * math.exp(surprise), 1.0), 8.0)
        self.acceptance.observe(tried, first_by_depth or accepted_by_depth)
        self.expected.clear()

    def probed(self, now: int, lost: float) -> None:
        """Note a probe that lost `lost` passes. The next one waits until that is a small share of
        the time.

        One unlucky probe does not put the next one off for long.
        """
        longest = min(_REST_GROWTH * self.rest, _REST[1])
        self.ran_at, self.rest = now, max(min(lost / _PROBE_SHARE, longest), _REST[0])


class CostModelSelector:
    """Adaptive in both directions. OFF is a choice whether it is listed or not."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        drafting = sorted((s for s in strategies if not s.is_off), key=lambda s: s.num_rows)
        learned = [s for s in drafting if s.is_learned]
        kinds = [[OFF], learned, [s for s in drafting if not s.is_learned]]
        self._kinds = [_Kind(kind) for kind in kinds if kind]
        self._kind_of = {s: kind for kind in self._kinds for s in kind.strategies}
        self._cost = PassCost()
        self._current = OFF
        self._last = OFF, 0  # strategy and batch size of the last pass observed
        self._probe: SpeculationStrategy | None = None  # the choice is a probe
        self._num_observed = 0

    def choose(self, batch_size: int) -> Decision:
        """Return the best strategy, or a probe that is due."""
        if self._num_observed == 0:
            return Decision(strategy=OFF, reason="first")  # everything is compared with it
        rates = {s: self._tokens(s) / self._cost.seconds(s, batch_size) for s in self._kind_of}
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1.0 + _HYSTERESIS) * rates[self._current]:
            self._current = best
        self._probe = None
        # Most requests are new. That the last ones were not worth drafting, mostly a straggler,
        # says little about them.
        is_new = self._current.is_off and batch_size >= 2 * self._last[1]
        for kind in self._kinds:
            is_due = is_new or self._num_observed - kind.ran_at >= kind.rest
            if is_due and self._current not in kind.strategies:
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
        if strategy not in self._kind_of or not 0.0 < seconds < math.inf:
            return
        self._num_observed += 1
        kind = self._kind_of[strategy]
        probe, self._probe = self._probe, None
        if probe is not None and probe not in kind.strategies:
            self._kind_of[probe].probed(self._num_observed, math.inf)  # the engine overruled it
        if strategy == probe:
            tokens = 1.0 + sum(accepted_by_depth) / batch_size
            usual_s = self._cost.seconds(self._current, batch_size)
            lost = seconds / usual_s - tokens / self._tokens(self._current)
            kind.probed(self._num_observed, lost)
        else:
            kind.ran_at = self._num_observed
        # A pass of the learned drafter after others, or with new requests, includes its reading of
        # their tokens: an upper bound of its seconds.
        last, last_size = self._last
        is_clean = not strategy.is_learned or (last.is_learned and batch_size <= last_size)
        if is_clean or seconds < self._cost.seconds(strategy, batch_size):
            self._cost.observe(strategy, batch_size, seconds)
        self._last = strategy, batch_size
        if not strategy.is_off:
            kind.observe(strategy, batch_size, accepted_by_depth, first_by_depth)

    def _tokens(self, strategy: SpeculationStrategy) -> float:
        return self._kind_of[strategy].tokens(strategy)

    def drafter_changed(self) -> None:
        """Probe the learned drafter sooner if it does not run."""
        for kind in self._kinds:
            if kind.strategies[0].is_learned and self._current not in kind.strategies:
                kind.rest /= _REST_GROWTH

    def _identity(self) -> dict[str, Any]:
        return {"kind": "cost_model", "version": 5, "strategies": [*map(str, self._kind_of)]}

    def state_dict(self) -> dict[str, Any]:
        """Return acceptance, costs and the rests of probes."""
        kinds = [
            [list(k.acceptance.tried), list(k.acceptance.right), dict(k.widths), k.ran_at, k.rest]
            for k in self._kinds
        ]
        return {
            **self._identity(),
            "kinds": kinds,
            "cost": self._cost.state_dict(),
            "current": str(self._current),
            "last": [str(self._last[0]), self._last[1]],
            "num_observed": self._num_observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StrategySelector`."""
        if not fits(state, self._identity()):
            return
        kinds = []
        for tried, right, widths, ran_at, rest in state["kinds"]:  # all is read before any is kept
            learned = _Acceptance([*map(amount, tried)], [*map(amount, right)])
            learned.rates(0)  # compares the two
            known = {str(name): amount(width) for name, width in widths.items()}
            kinds.append((learned, known, int(amount(ran_at)), amount(rest)))
        if len(kinds) != len(self._kinds):
            raise ValueError(f"kinds: must be {len(self._kinds)}, not {len(kinds)}")
        name, size = state["last"]
        current, before = (SpeculationStrategy.parse(text) for text in (state["current"], name))
        if strangers := {current, before} - {OFF, *self._kind_of}:
            raise ValueError(f"strategies that this run does not have: {strangers}")
        last = before, int(amount(size))
        num_observed = int(amount(state["num_observed"]))
        self._cost.load_state_dict(state["cost"])
        for kind, saved in zip(self._kinds, kinds, strict=True):
            kind.acceptance, kind.widths, kind.ran_at, kind.rest = saved
            kind.expected.clear()
        self._current, self._last, self._num_observed = current, last, num_observed
        self._probe = None
