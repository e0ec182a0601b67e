"""The colours of the report: each thing has the same colour on the page and in the picture.

They come from the palette of Okabe and Ito (2008, "Color Universal Design"), which works for all kinds of colour vision. Phases
that take little time have some darker and greyer colours.
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.run_report.lanes import Segment

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#C8CCD0"
OTHER = "#8A8F98"

# In the order of the legend: (names of the spans, name in the legend, colour).
_PHASES = (
    (("DECODE",), "DECODE", SKY),
    (("VERIFY",), "VERIFY", BLUE),
    (("ROLLOUT",), "ROLLOUT", "#CFE8F8"),
    (("IDLE", "WAIT"), "IDLE / WAIT", GREY),
    (("DRAFT-TRAIN",), "DRAFT-TRAIN", ORANGE),
    (("PREEMPT",), "PREEMPT", VERMILLION),
    (("REWARD",), "REWARD", PURPLE),
    (("LOGPROB",), "LOGPROB", YELLOW),
    (("UPDATE",), "UPDATE", GREEN),
    (("SYNC",), "SYNC", BLACK),
    (("EVAL",), "EVAL", "#6A51A3"),
    (("CHECKPOINT",), "CHECKPOINT", "#7B4B2A"),
)
_DARK = {BLACK, BLUE, GREEN, VERMILLION, OTHER, "#6A51A3", "#7B4B2A"}
_TIMINGS = {
    "gen": SKY,
    "reward": PURPLE,
    "old_log_prob": YELLOW,
    "ref": "#B8AE2F",
    "update_actor": GREEN,
    "update_weights": BLACK,
    "testing": "#6A51A3",
    "save_checkpoint": "#7B4B2A",
}
RANK_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, OTHER)
AXIS, GRID, INK = "#8A8F98", "#E6E8EB", "#1B1F24"
# Of shares, from none to all; and of depths, dark to light like viridis, but readable on a dark page too.
SHARES = ("#FFFFFF", "#C6DBEF", "#6BAED6", "#2171B5", "#08306B")
_DEPTHS = ("#8A4FA8", "#4B73B5", "#21918C", "#5EC962", "#B5A80B")
# What replaces a colour of the light page on a dark one.
ON_DARK = {
    **{BLACK: "#E6E9ED", INK: "#E6E9ED", GRID: "#2B323A", "#CFE8F8": "#3F5566", GREY: "#5B636D"},
    BLUE: "#2E8FD0",
    **dict(zip(SHARES, ("#14181D", "#16324D", "#1F5688", "#4292C6", "#9ECAE1"), strict=True)),
}


def phase_of(phase: str) -> tuple[str, str]:
    """Return the legend name and the colour of a phase. An unknown phase keeps its name."""
    for names, label, color in _PHASES:
        if phase in names:
            return label, color
    return phase, OTHER


def by_legend_entry(segments: Iterable[Segment]) -> dict[str, list[Segment]]:
    """Return the segments by name in the legend, in its order; unknown phases come last."""
    found: dict[str, list[Segment]] = {label: [] for _, label, _ in _PHASES}
    for segment in sorted(segments, key=lambda segment: segment.phase):
        found.setdefault(phase_of(segment.phase)[0], []).append(segment)
    return {label: of_label for label, of_label in found.items() if of_label}


def timing_color(phase: str) -> str:
    """Return the colour of timing_s/<phase>."""
    return _TIMINGS.get(phase, OTHER)


def text_on(color: str) -> str:
    """Return black or white, whichever is easier to read on `color`; both stay on a dark page."""
    return "#FEFEFE" if color in _DARK else "#010101"


def depth_color(depth: int, deepest: int) -> str:
    """Return a colour from dark to light as depth goes from 1 to `deepest`."""
    return blend(_DEPTHS, (depth - 1) / max(deepest - 1, 1))


def blend(colors: tuple[str, ...], at: float) -> str:
    """Return the colour at `at` in [0, 1] of a scale of evenly spaced colours."""
    place = at * (len(colors) - 1)
    low = min(int(place), len(colors) - 2)
    first, second = (
        [int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (colors[low], colors[low + 1])
    )
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True)]
    return "#" + "".join(f"{value:02X}" for value in mixed)
