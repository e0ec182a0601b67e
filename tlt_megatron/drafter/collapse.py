"""Whether an accept length has collapsed: it lies below a share of its own running level. Used by the publisher."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MIN_GAIN = 0.1  # of the level; below it there is nothing to lose
# After a collapse the level comes down slowly, so that a target that has become harder for good ends the alarm some day:
# from a third of the level after about 17 observations.
_COLLAPSED_DECAY = 0.95


class RunningLevel:
    """An exponential mean of accept lengths. All shares are of what is accepted beyond the bonus token, as 1.0 is where
    even a drafter of noise stands."""

    def __init__(self, *, share: float, decay: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"collapse_share={share}: must be in (0, 1)")
        if not 0 <= decay < 1:
            raise ValueError(f"level_decay={decay}: must be in [0, 1)")
        self._share = share
        self._decay = decay
        self.value = math.nan  # accept length; nan before the first

    def observe(self, accept_length: float) -> bool:
        """Take one in; True where it lies below the share of the level before it. What is not a number has collapsed."""
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
        """As JSON holds it."""
        return {"value": to_json(self.value)}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Take over what `state_dict` gave."""
        self.value = from_json(state["value"])


def to_json(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value


def from_json(value: float | None) -> float:
    """The inverse of `to_json`."""
    return math.nan if value is None else value
