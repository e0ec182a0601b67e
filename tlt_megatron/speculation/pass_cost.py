"""Seconds of a decode pass of any strategy at any batch size, learned from the passes that ran. Used by the cost model."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tlt_megatron.config.strategy import SpeculationStrategy

_WINDOW = 9  # passes of a median: it survives 4 disturbed ones
_STALE = 300.0  # passes after which a median weighs half: machine and context lengths change
_NOISE = 0.15  # relative error of a median around the plane
_MAX_ERROR = 0.2  # of log seconds; a median further from the plane was disturbed
# Distances at which a neighbouring median weighs half: octaves of batch size, of rows per request, of draft steps + 1.
_REACH = np.array([0.5, 0.25, 0.25])
_OPTIMISM = 0.08  # relative discount on the seconds of what was not measured near by
# Seconds before anything is measured, in units of a plain pass of few rows. See `_terms`.
_COST_PRIOR = np.array([1.0, 0.01, 0.015, 0.08, 0.003, 0.003])


class PassCost:
    """Seconds of a pass: medians by strategy and batch size, and a plane through all of them for what was not measured."""

    def __init__(self) -> None:
        # By strategy and quarter octave of the batch size: the latest seconds, in units of what `_COST_PRIOR` says for their
        # exact batch size, and the pass at which they were seen.
        self._cells: dict[tuple[SpeculationStrategy, int], tuple[deque[float], int]] = {}
        self._now = 0
        self._plane = _COST_PRIOR
        # Of every median: its place (see `_place`), its weight, its relative distance from the plane.
        self._places_N3 = np.zeros((0, 3))
        self._weights_N = self._errors_N = np.zeros(0)

    def observe(self, strategy: SpeculationStrategy, batch_size: int, seconds: float) -> None:
        """Add a pass."""
        self._now += 1
        key = strategy, round(4.0 * math.log2(batch_size))
        latest, _ = self._cells.get(key, (deque(maxlen=_WINDOW), 0))
        latest.append(seconds / float(_terms(strategy, batch_size) @ _COST_PRIOR))
        self._cells[key] = latest, self._now

    def refresh(self) -> None:
        """Fit the plane to everything observed so far: least squares of the relative error, with a prior, no term < 0."""
        cells = [
            (strategy, quarter / 4.0, statistics.median_low(latest), len(latest), seen_at)
            for (strategy, quarter), (latest, seen_at) in self._cells.items()
        ]
        if not cells:
            return
        weights_N = np.array([n * 0.5 ** ((self._now - at) / _STALE) for *_, n, at in cells])
        terms_NF = np.array([_terms(strategy, 2.0**octave) for strategy, octave, *_ in cells])
        terms_NF *= _COST_PRIOR
        ratios = [ratio for _, _, ratio, *_ in cells]
        unit_s = statistics.median_low(ratios)
        seconds_N = np.array(ratios) * terms_NF.sum(axis=1)
        scaled_NF = terms_NF * (np.sqrt(weights_N) / seconds_N * unit_s / _NOISE)[:, None]
        matrix_FF = scaled_NF.T @ scaled_NF + np.eye(len(_COST_PRIOR))
        target_F = scaled_NF.T @ (np.sqrt(weights_N) / _NOISE) + 1.0
        slopes_F = np.zeros(len(_COST_PRIOR))
        active = list(range(len(_COST_PRIOR)))
        while active:
            part = np.linalg.solve(matrix_FF[np.ix_(active, active)], target_F[active])
            slopes_F[active] = part
            if part.min() >= 0.0:
                break
            slopes_F[active.pop(int(part.argmin()))] = 0.0
        self._plane = slopes_F * _COST_PRIOR * unit_s
        errors_N = np.log(seconds_N / (terms_NF @ slopes_F * unit_s))
        self._errors_N = errors_N.clip(-_MAX_ERROR, _MAX_ERROR)
        self._weights_N = weights_N
        self._places_N3 = np.array([_place(strategy, octave) for strategy, octave, *_ in cells])

    def seconds(self, strategy: SpeculationStrategy, batch_size: int) -> float:
        """Return the plane, corrected by the medians near by. Slightly optimistic where there are none."""
        plane_s = float(_terms(strategy, batch_size) @ self._plane)
        distances_N3 = np.abs(self._places_N3 - _place(strategy, math.log2(batch_size))) / _REACH
        weights_N = self._weights_N * 0.5 ** distances_N3.sum(axis=1)
        own_weight = float(weights_N[distances_N3[:, 1:].sum(axis=1) == 0.0].sum())
        # Plain decoding gets the whole discount, so that optimism alone never turns drafting on.
        discount = _OPTIMISM if strategy.is_off else _OPTIMISM / (1.0 + own_weight)
        error = float(weights_N @ self._errors_N) / (1.0 + float(weights_N.sum()))
        return plane_s * math.exp(error) * (1.0 - discount)

    def state_dict(self) -> dict[str, Any]:
        """Return the medians' passes as values that JSON can hold."""
        cells = [
            [str(strategy), quarter, list(latest), seen_at]
            for (strategy, quarter), (latest, seen_at) in self._cells.items()
        ]
        return {"now": self._now, "cells": cells}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._now = state["now"]
        self._cells = {
            (SpeculationStrategy.parse(text), quarter): (deque(latest, maxlen=_WINDOW), seen_at)
            for text, quarter, latest, seen_at in state["cells"]
        }
        self.refresh()


def _terms(strategy: SpeculationStrategy, batch_size: float) -> np.ndarray:
    """Return the terms of a pass: constant, requests, rows to verify, draft steps, drafted rows, retrieved rows."""
    steps, size = strategy.num_steps, batch_size
    drafted, retrieved = steps * size * strategy.topk, size * strategy.num_retrieved
    return np.array([1.0, size, size * strategy.num_rows, steps, drafted, retrieved])


def _place(strategy: SpeculationStrategy, octave: float) -> np.ndarray:
    """Return where a median stands among the others: costs of similar passes err alike."""
    return np.array([octave, math.log2(strategy.num_rows), math.log2(1 + strategy.num_steps)])
