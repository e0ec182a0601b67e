"""Detects a collapse of the accept length: a value below a share of its running mean. Used by the publisher."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MIN_GAIN = 0.1  # tokens beyond the bonus token; a lower level cannot collapse
# After a collapse the level decays slowly, so the alarm ends even if the target stays harder to predict.
# Example: with a share of 0.5, observations at 0.3 of the level stop counting as a collapse after about 17.
_COLLAPSED_DECAY = 0.95


class RunningLevel:
    """Exponential mean of accept lengths. Shares apply to accept length - 1: even random drafts reach 1.0."""

    def __init__(self, *, share: float, decay: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"collapse_share={share}: must be in (0, 1)")
        if not 0 <= decay < 1:
            raise ValueError(f"level_decay={decay}: must be in [0, 1)")
        self._share = share
        self._decay = decay
        self.value = math.nan  # accept length; nan before the first observation

    def observe(self, accept_length: float) -> bool:
        """Add one accept length. Returns True if it is NaN, or below the share of the level so far."""
        if math.isnan(accept_length):
            return True
        if math.isnan(self.value):
            self.value = accept_length
            return False
        gain, level = accept_length - 1.0, self.value - 1.0
        has_collapsed = level >= _MIN_GAIN and gain < self._share * level
        decay = _COLLAPSED_DECAY if has_collapsed else self._decay
        self.value = 1.0 + decay * level + (1.0 - decay) * gain
        return has_collapsed

    def state_dict(self) -> dict[str, float | None]:
        """Return the state as JSON types."""
        return {"value": to_json(self.value)}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Load the result of `state_dict`."""
        self.value = from_json(state["value"])


def to_json(value: float) -> float | None:
    """Return None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value


def from_json(value: float | None) -> float:
    """Invert `to_json`."""
    return math.nan if value is None else value
