"""How long a step of each strategy takes at each batch size, learned from the steps that ran.

Used by the cost-model selector. Two layers: a linear law over all strategies and batch sizes (a constant, rows to verify,
draft steps, drafted rows), and for each strategy and neighbourhood of batch sizes a correction of it, because real machines
have steps where the law has a line. One thing to know: all is relative (log seconds), so that a step of 2 ms counts as
much as one of 200 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.speculation.strategy import SpeculationStrategy

# The law before anything is seen, in units of a plain step's constant part: rows are cheap until the machine is full, a
# draft step is a small fraction of the target.
_PRIOR_LAW = (1.0, 0.02, 0.10, 0.002)
_LAW_WEIGHT = 0.3  # steps that the prior counts for, for each of the four coefficients
_LAW_SWEEPS = 3  # of coordinate descent; it starts from the last solution
_SMALLEST = 0.02  # multiple of a prior coefficient

# How far away a bin still informs, and with what share of its weight.
_NEIGHBOURS = ((0, 1.0), (-1, 0.5), (1, 0.5), (-2, 0.25), (2, 0.25), (-3, 0.125), (3, 0.125))
_CORRECTION_WEIGHT = 0.3  # steps that the uncorrected law counts for
_UNKNOWN = 0.3  # standard deviation of the log of the law where it was never checked
_NOISE = 0.1  # of the log of one measured step
_NUM_FIRST = 5  # measurements of which the median counts
_CLIP = 0.25  # of one step's surprise in the log: a hiccup of the machine counts no more
_MAX_WEIGHT = 1e100


@dataclass(slots=True)
class CostEstimate:
    """Seconds of one step."""

    seconds: float
    log_error: float  # standard error of log seconds


class _Bin:
    """Fading mean of one strategy at neighbouring batch sizes. The first few measurements give their (lower) median."""

    __slots__ = ("batch_size", "first", "log_seconds", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.log_seconds = 0.0
        self.batch_size = 0.0  # mean
        self.first: list[float] = []

    def add(self, log_seconds: float, batch_size: int, weight: float) -> float:
        """Returns what was believed of `log_seconds`: a hiccup is cut."""
        self.weight += weight
        share = weight / self.weight
        self.batch_size += share * (batch_size - self.batch_size)
        if len(self.first) < _NUM_FIRST:
            self.first.append(log_seconds)
            self.log_seconds = sorted(self.first)[(len(self.first) - 1) // 2]
            return min(max(log_seconds, self.log_seconds - _CLIP), self.log_seconds + _CLIP)
        surprise = min(max(log_seconds - self.log_seconds, -_CLIP), _CLIP)
        believed = self.log_seconds + surprise
        self.log_seconds += share * surprise
        return believed


class StepCostModel:
    """Seconds by (strategy, batch size). OFF is one of the strategies.

    `observe` only notes; `fit` learns what was noted since the last one, so that a step costs next to nothing.
    """

    def __init__(self, strategies: Sequence[SpeculationStrategy], *, half_life: float) -> None:
        """`half_life` in observed steps."""
        self._bins: dict[SpeculationStrategy, dict[int, _Bin]] = {s: {} for s in strategies}
        self._growth = 0.5 ** (-1.0 / half_life)
        self._weight = 1.0
        self._unit_s = 0.0  # the constant part of a plain step at first sight; 0 before it
        self._law = [1.0] * 4  # multiples of the prior's coefficients
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._target = [0.0] * 4
        self._lines: dict[SpeculationStrategy, tuple[float, float]] = {}
        self._noted: dict[tuple[SpeculationStrategy, int], list[float]] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing was learned."""
        return self._unit_s == 0.0

    def observe(self, strategy: SpeculationStrategy, batch_size: int, seconds: float) -> None:
        """One step took `seconds`."""
        seconds = max(seconds, 1e-9)
        noted = self._noted.get((strategy, batch_size))
        if noted is None:
            self._noted[strategy, batch_size] = [seconds]
        else:
            noted.append(seconds)

    def fit(self) -> None:
        """Bring bins and law up to date with what was observed."""
        num_steps = 0
        for (strategy, batch_size), noted in self._noted.items():
            if self._unit_s == 0.0:
                self._unit_s = noted[0] / sum(_features(strategy, batch_size))
            num_steps += len(noted)
            self._learn(strategy, batch_size, noted)
        self._noted.clear()
        self._weight *= self._growth**num_steps
        if self._weight > _MAX_WEIGHT:
            self._rescale()
        self._solve()

    def estimate(self, strategy: SpeculationStrategy, batch_size: int) -> CostEstimate:
        """The law, corrected by what was measured nearby."""
        center, bins = _bin_of(batch_size), self._bins[strategy]
        constant_s, slope_s = self._lines[strategy]
        weight, correction = 0.0, 0.0
        for offset, share in _NEIGHBOURS if bins else ():
            near = bins.get(center + offset)
            if near is not None:
                share *= near.weight
                weight += share
                law_s = constant_s + slope_s * near.batch_size
                correction += share * (near.log_seconds - math.log(law_s))
        weight /= self._weight
        correction /= self._weight * (weight + _CORRECTION_WEIGHT)
        sure = weight * weight / (weight + 2.0)  # one or two measurements may both be hiccups
        return CostEstimate(
            seconds=(constant_s + slope_s * batch_size) * math.exp(correction),
            log_error=1.0 / math.sqrt(1.0 / _UNKNOWN**2 + sure / _NOISE**2),
        )

    def _learn(self, strategy: SpeculationStrategy, batch_size: int, noted: list[float]) -> None:
        index = _bin_of(batch_size)
        known = self._bins[strategy].get(index)
        if known is None:
            known = self._bins[strategy][index] = _Bin()
        inverse = inverse_square = 0.0
        for seconds in noted:
            believed = known.add(math.log(seconds), batch_size, self._weight)
            relative = self._unit_s * math.exp(-believed)
            inverse += relative
            inverse_square += relative * relative
        features = _features(strategy, batch_size)
        for row, value in enumerate(features):
            self._target[row] += self._weight * inverse * value
            weighted, line = self._weight * inverse_square * value, self._gram[row]
            for column in range(4):
                line[column] += weighted * features[column]

    def _solve(self) -> None:
        """Ridge regression on relative errors towards the prior, no coefficient below 0."""
        ridge = _LAW_WEIGHT * self._weight
        target, law = self._target, self._law
        for _ in range(_LAW_SWEEPS):
            for i, (a, b, c, d) in enumerate(self._gram):
                own = self._gram[i][i]
                others = a * law[0] + b * law[1] + c * law[2] + d * law[3] - own * law[i]
                law[i] = max((target[i] + ridge - others) / (own + ridge), _SMALLEST)
        self._set_lines()

    def _set_lines(self) -> None:
        """For each strategy the law is a line over batch sizes."""
        for strategy in self._bins:
            at_0 = sum(f * m for f, m in zip(_features(strategy, 0), self._law, strict=True))
            at_1 = sum(f * m for f, m in zip(_features(strategy, 1), self._law, strict=True))
            self._lines[strategy] = (self._unit_s * at_0, self._unit_s * (at_1 - at_0))

    def _rescale(self) -> None:
        """Let a new observation weigh 1 again."""
        factor = 1.0 / self._weight
        for bins in self._bins.values():
            for each in bins.values():
                each.weight *= factor
        self._gram = [[value * factor for value in line] for line in self._gram]
        self._target = [value * factor for value in self._target]
        self._weight = 1.0

    def state_dict(self) -> dict[str, object]:
        """JSON-able, at weight 1. What was noted since the last `fit` is not in it."""
        self._rescale()
        return {
            "unit_s": self._unit_s,
            "law": list(self._law),
            "gram": [list(line) for line in self._gram],
            "target": list(self._target),
            "bins": {
                str(strategy): [
                    [i, b.weight, b.log_seconds, b.batch_size, b.first] for i, b in bins.items()
                ]
                for strategy, bins in self._bins.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of the same strategies."""
        self._weight = 1.0
        self._noted.clear()
        self._unit_s, self._law = state["unit_s"], list(state["law"])
        self._gram, self._target = [list(line) for line in state["gram"]], list(state["target"])
        for strategy, bins in self._bins.items():
            bins.clear()
            for index, weight, log_seconds, batch_size, first in state["bins"][str(strategy)]:
                restored = bins[index] = _Bin()
                restored.weight, restored.log_seconds = weight, log_seconds
                restored.batch_size, restored.first = batch_size, list(first)
        self._set_lines()


def _features(strategy: SpeculationStrategy, batch_size: int) -> tuple[float, ...]:
    constant, row, step, drafted = _PRIOR_LAW
    steps = strategy.num_steps
    return (
        constant,
        row * batch_size * strategy.num_rows,
        step * steps,
        drafted * steps * batch_size * strategy.topk,
    )


def _bin_of(batch_size: int) -> int:
    """Every batch size up to 16 by itself, then 16 bins for each doubling."""
    return batch_size if batch_size <= 16 else round(16 * math.log2(batch_size)) - 48
