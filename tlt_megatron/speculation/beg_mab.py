"""BEG-MAB, the paper's selector: bucketed epsilon-greedy over medians of a sliding window.

Source: TLT (arXiv 2511.16665), section on the adaptive rollout engine. Strategies are grouped by
tokens to verify. The bucket of the smallest batches gets the group with the most tokens. Inside a
bucket the strategy with the highest median of committed tokens per second is chosen; a share
epsilon of choices is uniform. `OFF` is the group that verifies nothing. Listing it with the last
threshold gives the paper's elastic switch (its default: on below 32 requests).
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.saved_files import amount
from tlt_megatron.speculation.selector import Decision, fits


def automatic_thresholds(
    strategies: Sequence[SpeculationStrategy], max_batch_size: int
) -> tuple[int, ...]:
    """Return buckets that grow by a constant factor: with m drafting budgets, bucket i starts at
    B^(i / m), rounded.

    If OFF is listed, B = max_batch_size / 2 and OFF starts above B (the paper: 32 for batches of
    64). Else B = max_batch_size. Example: budgets 48, 32, 16, 8 and OFF with 64 requests: 1, 2, 6,
    13, 33. The official code has 1, 2, 5, 21.
    """
    num_drafting = len({s.num_nodes for s in strategies if not s.is_off})
    has_off = any(s.is_off for s in strategies)
    most = max(max_batch_size // 2, 1) if has_off and num_drafting > 0 else max_batch_size
    thresholds: list[int] = []
    for index in range(num_drafting):
        start = round(most ** (index / num_drafting))
        thresholds.append(max(start, thresholds[-1] + 1 if thresholds else 1))
    if has_off:
        thresholds.append(max(most, thresholds[-1]) + 1 if thresholds else 1)
    return tuple(thresholds)


class BegMabSelector:
    """Chooses inside the bucket of the batch size.

    Example: strategies 8_4_48, 8_4_16, 4_4_16 and off for batches up to 64. Batches of 1-5 use
    8_4_48, batches of 6-32 the better of 8_4_16 and 4_4_16, and larger ones decode plainly.

    There is a bucket for each number of tokens to verify: see `automatic_thresholds`. Strategies
    of the bucket without a reward are tried first, in the given order.
    """

    def __init__(
        self,
        strategies: Sequence[SpeculationStrategy],
        *,
        max_batch_size: int = 64,
        epsilon: float = 0.1,
        window: int = 300,
        seed: int = 0,
    ) -> None:
        self._strategies = tuple(strategies)
        self._thresholds = automatic_thresholds(strategies, max_batch_size)
        budgets = sorted({s.num_nodes for s in strategies}, reverse=True)
        self._buckets = [[s for s in strategies if s.num_nodes == b] for b in budgets]
        self._epsilon = epsilon
        self._rewards: dict[SpeculationStrategy, deque[float]] = {
            s: deque(maxlen=window) for s in strategies
        }
        self._rng = random.Random(seed)

    def choose(self, batch_size: int) -> Decision:
        """Choose epsilon-greedily inside the bucket of the batch size."""
        bucket = self._buckets[bisect_right(self._thresholds, batch_size) - 1]
        if len(bucket) == 1:
            chosen, reason = bucket[0], "only"
        elif self._rng.random() < self._epsilon:
            chosen, reason = self._rng.choice(bucket), "explore"
        else:
            chosen, reason = max(bucket, key=self._median_reward), "exploit"
        return Decision(strategy=chosen, reason=reason)

    def _median_reward(self, strategy: SpeculationStrategy) -> float:
        """Return infinity without rewards, so that the strategy is tried."""
        rewards = self._rewards[strategy]
        return statistics.median(rewards) if rewards else math.inf

    def observe(
        self,
        strategy: SpeculationStrategy,
        batch_size: int,
        accepted_by_depth: Sequence[int],
        seconds: float,
        first_by_depth: Sequence[int] | None = None,  # noqa: ARG002
    ) -> None:
        """Record the reward: committed tokens per second of the batch. Each request commits a bonus
        token too.
        """
        if strategy in self._rewards:
            reward = (batch_size + sum(accepted_by_depth)) / max(seconds, 1e-9)
            self._rewards[strategy].append(reward)

    def drafter_changed(self) -> None:
        """Do nothing: the sliding window forgets the old drafter, as in the paper."""

    def state_dict(self) -> dict[str, Any]:
        """Return the windows and the state of the random generator."""
        version, words, gauss = self._rng.getstate()
        return {
            **self._identity(),
            "rewards": {str(s): list(self._rewards[s]) for s in self._strategies},
            "rng": [version, list(words), gauss],
        }

    def _identity(self) -> dict[str, Any]:
        return {"kind": "beg_mab", "strategies": [str(s) for s in self._strategies]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StrategySelector`."""
        if not fits(state, self._identity()):
            return
        rewards = {s: [*map(amount, state["rewards"][str(s)])] for s in self._strategies}
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))  # refuses what is no state
        for strategy, latest in rewards.items():
            self._rewards[strategy].clear()
            self._rewards[strategy].extend(latest)
