"""What the acceptance of different strategies has in common: which summands make up x = log(-log(1 - p)) at each depth.

Used by `acceptance_model`, which learns the summands. Learned and retrieved tokens have a quality each; where a strategy
drafts both, a miss is a miss of both, so their hazards exp(x) add. One thing to know: chains differ by nothing but their
depth, so what one chain shows holds for all of them; trees have a width, an offset and a slope of their own besides.

Shapes: S strategies, D depths (padded; no one accepts at a padded depth), N summands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tlt_megatron.speculation.belief import Belief
from tlt_megatron.speculation.strategy import SpeculationStrategy

# Summands that all learned, or all retrieved, tokens have in common; those of the shapes follow.
LEARNED, LEARNED_TEXT, RETRIEVED, RETRIEVED_TEXT, _NUM_COMMON = range(5)
QUALITY_VARIANCE = 1.4
TEXT_VARIANCE = (
    0.12  # of one request; the mean of a batch varies less, and more when requests leave
)

# An unknown drafter accepts 1 - exp(-exp(-0.7)) = 0.39 of the tokens of a chain, 0.8 with one standard deviation of luck:
# too few to rely upon, enough to be tried; retrieval accepts 0.26. A tree with room for w children at each node tries as
# hard as 1 + _WIDTH_GAIN * log2(w) chains.
_LEARNED_QUALITY = -0.7
_RETRIEVED_QUALITY = -1.2
_WIDTH_GAIN = 0.6
# Prior variances of the shapes, by the first word of their names.
_VARIANCES = {
    "depth": 0.05,
    "width": 0.25,
    "tree": 0.04,
    "tree_slope": 0.004,  # by depth
    "retrieved_depth": 0.15,
    "retrieved_length": 0.04,
    "both": 0.10,  # retrieved and learned nodes may be the same tokens
}
_DEPTH_REACH = 3.0  # depths over which the summands of depths are alike
_LIMITS = (-6.0, 2.5)  # of x: p between 0.002 and 0.999995
LEAST_RATE = -math.expm1(-math.exp(_LIMITS[0])) * (1.0 + 1e-9)  # p at the lower limit
_NEVER = -50.0  # x of a depth that a strategy does not have

_Terms = dict[tuple[object, ...], float]  # summand -> factor


class AcceptanceShape:
    """x of every strategy and depth as a function of the summands."""

    def __init__(self, strategies: Sequence[SpeculationStrategy]) -> None:
        depths = range(max((s.depth for s in strategies), default=1))
        learned = [[_learned_terms(s, d) for d in depths] for s in strategies]
        retrieved = [[_retrieved_terms(s, d) for d in depths] for s in strategies]
        both = [[_both_terms(s) for _ in depths] for s in strategies]
        names = dict.fromkeys(
            name
            for table in (learned, retrieved, both)
            for cells in table
            for terms in cells
            for name in terms
        )
        self._columns = {name: _NUM_COMMON + i for i, name in enumerate(names)}
        self._learned_SDN = self._rows(learned, (LEARNED, LEARNED_TEXT))
        self._retrieved_SDN = self._rows(retrieved, (RETRIEVED, RETRIEVED_TEXT))
        self._both_SDN = self._rows(both, ())
        self._has_retrieved = any(s.num_retrieved > 0 for s in strategies)
        self._learned_offset_SD = np.array(
            [
                [_learned_offset(s) if d < s.num_steps else _NEVER for d in depths]
                for s in strategies
            ]
        )
        self._retrieved_offset_SD = np.array(
            [
                [_RETRIEVED_QUALITY if d < s.num_retrieved else _NEVER for d in depths]
                for s in strategies
            ]
        )

    def prior(self) -> Belief:
        """Of the summands."""
        size = _NUM_COMMON + len(self._columns)
        covariance_NN = np.zeros((size, size))
        for index in (LEARNED, RETRIEVED):
            covariance_NN[index, index] = QUALITY_VARIANCE
        for index in (LEARNED_TEXT, RETRIEVED_TEXT):
            covariance_NN[index, index] = TEXT_VARIANCE
        for name, column in self._columns.items():
            for other, other_column in self._columns.items():
                if name == other:
                    covariance_NN[column, column] = _VARIANCES[name[0]]
                elif name[0] == other[0] and name[0] in ("depth", "retrieved_depth"):
                    alike = math.exp(-abs(name[1] - other[1]) / _DEPTH_REACH)
                    covariance_NN[column, other_column] = _VARIANCES[name[0]] * alike
        return Belief(np.zeros(size), covariance_NN)

    def linearize(
        self, mean_N: np.ndarray, strategy: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """p [S, D], its slope by x [S, D], and how x moves with the summands [S, D, N]; of one strategy (S = 1) or all."""
        which = slice(None) if strategy is None else slice(strategy, strategy + 1)
        rows_SDN = self._learned_SDN[which]
        x_SD = self._learned_offset_SD[which] + rows_SDN @ mean_N
        if self._has_retrieved:
            x_SD, rows_SDN = self._join(x_SD, rows_SDN, mean_N, which)
        hazard_SD = np.exp(np.clip(x_SD, *_LIMITS)) * (x_SD > 0.5 * _NEVER)
        miss_SD = np.exp(-hazard_SD)
        return 1.0 - miss_SD, hazard_SD * miss_SD, rows_SDN

    def _join(
        self, x_SD: np.ndarray, rows_SDN: np.ndarray, mean_N: np.ndarray, which: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add the hazards of the retrieved tokens."""
        retrieved_SDN, both_SDN = self._retrieved_SDN[which], self._both_SDN[which]
        retrieved_x_SD = self._retrieved_offset_SD[which] + retrieved_SDN @ mean_N
        joined_SD = np.logaddexp(x_SD, retrieved_x_SD)
        share_SD1 = np.exp(x_SD - joined_SD)[..., None]
        rows_SDN = share_SD1 * rows_SDN + (1.0 - share_SD1) * retrieved_SDN + both_SDN
        return joined_SD + both_SDN @ mean_N, rows_SDN

    def _rows(self, table: Sequence[Sequence[_Terms]], common: tuple[int, ...]) -> np.ndarray:
        num_depths = len(table[0]) if table else 1
        rows_SDN = np.zeros((len(table), num_depths, _NUM_COMMON + len(self._columns)))
        for row_DN, cells in zip(rows_SDN, table, strict=True):
            for row_N, terms in zip(row_DN, cells, strict=True):
                for name, factor in terms.items():
                    row_N[self._columns[name]] = factor
                if terms:
                    row_N[list(common)] = 1.0
        return rows_SDN


def _learned_terms(strategy: SpeculationStrategy, depth: int) -> _Terms:
    if depth >= strategy.num_steps:
        return {}
    terms: _Terms = {("depth", depth): 1.0}
    if strategy.topk > 1:
        tree = (strategy.num_steps, strategy.topk, strategy.num_draft_tokens)
        terms |= {("width", strategy.topk): 1.0, ("tree", *tree): 1.0}
        terms["tree_slope", *tree] = float(depth)
    return terms


def _retrieved_terms(strategy: SpeculationStrategy, depth: int) -> _Terms:
    if depth >= strategy.num_retrieved:
        return {}
    return {("retrieved_depth", depth): 1.0, ("retrieved_length", strategy.num_retrieved): 1.0}


def _both_terms(strategy: SpeculationStrategy) -> _Terms:
    is_both = strategy.is_learned and strategy.num_retrieved > 0
    return {("both", str(strategy)): 1.0} if is_both else {}


def _learned_offset(strategy: SpeculationStrategy) -> float:
    children = min(strategy.topk, strategy.num_draft_tokens / strategy.num_steps)
    return _LEARNED_QUALITY + math.log(1.0 + _WIDTH_GAIN * math.log2(max(children, 1.0)))
