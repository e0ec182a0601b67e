"""What a panel of the report holds, as values that page.py and picture.py draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.run_report.lanes import Segment, Window

Value = float | int | None
_MIN_LABEL = 0.04  # of the window: narrower bars have no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named series of numbers."""

    name: str
    color: str
    x: Sequence[Value]
    y: Sequence[Value]
    mode: str = "lines"  # lines | dots (with lines) | marks (alone) | steps | dashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves over one axis."""

    series: tuple[Series, ...]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    is_log: bool = False

    @property
    def log_ticks(self) -> list[int]:
        """Return 1, 2, 5, 10, ... within the range of the values."""
        values = [y for series in self.series for y in series.y if y]
        steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
        return [step for step in steps if min(values) <= step <= max(values)] if values else []


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBars:
    """A bar for each x. `marks` are drawn over the stacks."""

    series: tuple[Series, ...]
    marks: Series | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Shares in [0, 1]; None for a cell without a measurement."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]  # bottom to top
    shares: tuple[tuple[float | None, ...], ...]  # [row][column]
    details: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A timeline."""

    segments: tuple[Segment, ...]
    window: Window

    @property
    def names(self) -> list[str]:
        """Return the lanes, top to bottom."""
        return list(dict.fromkeys(segment.lane for segment in self.segments))

    @property
    def width_s(self) -> float:
        """Return the width of the window."""
        return self.window.end_s - self.window.start_s

    def label_of(self, segment: Segment) -> str:
        """Return the text inside the bar: its label if there is room for it."""
        is_wide = segment.end_s - segment.start_s > _MIN_LABEL * self.width_s
        return segment.label if is_wide else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure with its text."""

    key: str
    title: str
    note: str  # how to read it
    x_label: str
    y_label: str
    content: Lines | StackedBars | HeatMap | Lanes
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The reason why a figure is missing."""

    title: str
    sentence: str


def percent(share: float | None) -> str:
    """Return the text of a heat map cell; empty for None or 0."""
    if not share:
        return ""
    return f"{share:.0%}" if share >= 0.005 else "<1%"
