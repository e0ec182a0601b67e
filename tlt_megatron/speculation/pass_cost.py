"""Seconds of a decode pass of any strategy at any batch size, learned from the passes that ran.
Used by the cost model.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.saved_files import amount

_WINDOW = 9  # passes of a median: it survives 4 disturbed ones
# Passes after which a median is forgotten: machine and context lengths change. Each time it waits
# three times as long, so that what is slow costs less and less.
_STALE, _STALE_GROWTH = 300, 3
_Place = tuple[SpeculationStrategy, int]  # strategy and octave of the batch size


class PassCost:
    """A table of medians by strategy and octave of the batch size.

    A strategy that was not measured at a batch size takes the median of the most similar pass,
    scaled by `_units`.
    """

    def __init__(self) -> None:
        self._latest: dict[_Place, deque[float]] = {}  # seconds over `_units`
        self._medians: dict[_Place, float] = {}  # of `_latest`
        self._seen_at: dict[_Place, int] = {}  # number of the latest pass
        self._lifetimes: dict[_Place, int] = {}  # passes, of medians that were forgotten before
        self._num_passes = 0

    def observe(self, strategy: SpeculationStrategy, batch_size: int, seconds: float) -> None:
        """Add a pass."""
        self._num_passes += 1
        place = strategy, _octave(batch_size)
        latest = self._latest.setdefault(place, deque(maxlen=_WINDOW))
        latest.append(seconds / _units(strategy, batch_size))
        self._medians[place] = statistics.median_low(latest)
        self._seen_at[place] = self._num_passes
        for other, seen_at in list(self._seen_at.items()):
            lifetime = self._lifetimes.get(other, _STALE)
            if self._num_passes - seen_at > lifetime:
                self._lifetimes[other] = lifetime * _STALE_GROWTH
                del self._latest[other], self._medians[other], self._seen_at[other]

    def seconds(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Return the estimate. Before the first pass it is in units of a plain pass."""
        place = strategy, _octave(batch_size)
        if self._medians and place not in self._medians:
            place = min(self._medians, key=lambda other: _distance(place, other))
        return self._medians.get(place, 1.0) * _units(strategy, batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the table as values that JSON can hold."""
        table = [
            [str(place[0]), place[1], list(latest), self._seen_at[place]]
            for place, latest in self._latest.items()
        ]
        lifetimes = [[str(place[0]), place[1], n] for place, n in self._lifetimes.items()]
        return {"num_passes": self._num_passes, "table": table, "lifetimes": lifetimes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        num_passes, all_latest, all_seen_at = int(amount(state["num_passes"])), {}, {}
        for text, octave, latest, seen_at in state["table"]:
            place = SpeculationStrategy.parse(text), int(amount(octave))
            all_latest[place] = deque(map(amount, latest), maxlen=_WINDOW)
            all_seen_at[place] = int(amount(seen_at))
            if not all_latest[place]:
                raise ValueError(f"table: {text} has no pass")
        lifetimes = {
            (SpeculationStrategy.parse(text), int(amount(octave))): int(amount(passes))
            for text, octave, passes in state.get("lifetimes", ())  # older checkpoints have none
        }
        self._num_passes, self._latest, self._seen_at = num_passes, all_latest, all_seen_at
        self._medians = {place: statistics.median_low(x) for place, x in all_latest.items()}
        self._lifetimes = lifetimes


def _octave(batch_size: int) -> int:
    return round(math.log2(batch_size))


def _units(strategy: SpeculationStrategy, batch_size: int) -> float:
    """Return the rough cost of a pass, where a plain pass of one request is about 1.

    It only says how the costs of similar passes differ, so it need not fit the machine.
    """
    verify = 1.0 + batch_size * (0.01 + 0.015 * strategy.num_rows)
    draft = strategy.num_steps * (0.08 + 0.003 * batch_size * strategy.topk)
    return verify + draft + 0.003 * batch_size * strategy.num_retrieved


def _distance(one: _Place, other: _Place) -> float:
    """Return how different two passes are: octaves of the batch size, twice those of rows and draft
    steps.
    """
    (a, a_octave), (b, b_octave) = one, other
    rows = abs(math.log2(a.num_rows / b.num_rows))
    steps = abs(math.log2((1 + a.num_steps) / (1 + b.num_steps)))
    return abs(a_octave - b_octave) + 2.0 * (rows + steps)
