"""A machine and a drafter on paper, for selectors: known seconds and acceptance for every strategy and batch size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy

ARMS = tuple(
    SpeculationStrategy.parse(text)
    for text in ("2_1_2", "4_1_4", "6_1_6", "3_4_8", "4_4_16", "6_4_16")
)


class SyntheticDecoding:
    """Steps of a plain batch cost 10 ms + 0.1 ms a row, with jumps where tiles fill; neither law is the selector's own."""

    def __init__(self, *, seed: int, quality: float = 0.8) -> None:
        self.quality = quality  # chance that a chain's next token is accepted
        self._rng = random.Random(seed)

    def seconds(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Expected, without noise."""
        rows = batch_size * strategy.num_rows
        verify = 0.010 + 1.0e-4 * 32 * math.ceil(rows / 32) ** 0.95
        draft = strategy.num_steps * (6e-4 + 1.5e-5 * batch_size * strategy.topk)
        return verify + draft

    def rates(self, strategy: SpeculationStrategy) -> list[float]:
        """Chance of each depth once the one above was accepted."""
        spare = 0.0 if strategy.is_chain else 0.55 * (1 - self.quality) * min(1.0, self.quality * 2)
        wiggle = 0.03 * math.sin(7 * strategy.num_draft_tokens + 3 * strategy.topk)
        return [
            max(self.quality + spare + min(wiggle, self.quality / 2) - 0.015 * depth, 0.0)
            for depth in range(strategy.num_steps)
        ]

    def tokens_per_s(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Expected throughput."""
        survival, tokens = 1.0, 1.0
        for rate in self.rates(strategy):
            survival *= rate
            tokens += survival
        return batch_size * tokens / self.seconds(strategy, batch_size)

    def best(self, batch_size: int) -> SpeculationStrategy:
        """What an oracle would choose."""
        return max((OFF, *ARMS), key=lambda s: self.tokens_per_s(s, batch_size))

    def step(self, strategy: SpeculationStrategy, batch_size: int) -> tuple[list[int], float]:
        """Accepted counts by depth and noisy seconds: 5 %, and 1 step in 100 takes three times as long."""
        counts, reached = [], batch_size
        for rate in self.rates(strategy):
            reached = sum(self._rng.random() < rate for _ in range(reached))
            counts.append(reached)
        hiccup = 3.0 if self._rng.random() < 0.01 else 1.0
        noise = math.exp(self._rng.gauss(0.0, 0.05))
        return counts, self.seconds(strategy, batch_size) * noise * hiccup


class Score:
    """Sums over a run, of expected values: no luck in them."""

    def __init__(self) -> None:
        self.chosen: list[SpeculationStrategy] = []
        self._seconds = self._oracle_s = self._plain_s = 0.0

    def add(self, world: SyntheticDecoding, chosen: SpeculationStrategy, batch_size: int) -> None:
        self.chosen.append(chosen)
        seconds = world.seconds(chosen, batch_size)
        tokens = seconds * world.tokens_per_s(chosen, batch_size)
        self._seconds += seconds
        self._oracle_s += tokens / world.tokens_per_s(world.best(batch_size), batch_size)
        self._plain_s += tokens / world.tokens_per_s(OFF, batch_size)

    @property
    def of_oracle(self) -> float:
        """Throughput over that of the oracle."""
        return self._oracle_s / self._seconds

    @property
    def of_plain(self) -> float:
        """Throughput over that of plain decoding."""
        return self._plain_s / self._seconds


def run_selector(
    selector: StrategySelector,
    world: SyntheticDecoding,
    batch_sizes: Sequence[int],
    on_step: Callable[[int], None] | None = None,
) -> Score:
    """One step for each batch size."""
    score = Score()
    for step, batch_size in enumerate(batch_sizes):
        if on_step is not None:
            on_step(step)
        strategy = selector.choose(batch_size)
        counts, seconds = world.step(strategy, batch_size)
        selector.observe(strategy, batch_size, counts, seconds)
        score.add(world, strategy, batch_size)
    return score


def long_tail(num_requests: int, scale: int) -> list[int]:
    """Batch sizes of a rollout whose batch halves every `scale` steps."""
    sizes, left = [], float(num_requests)
    while left >= 1.0:
        sizes.append(int(left))
        left *= 0.5 ** (1.0 / scale)
    return sizes
