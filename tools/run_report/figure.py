"""What all figures of the report share, as Plotly's JSON: text, axes, curves and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.run_report.palette import AXIS, GRID, INK

Json = dict[str, Any]

_NUM_MARKED = 30
_FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
AXIS_STYLE = {
    "showline": True,
    "linecolor": AXIS,
    "gridcolor": GRID,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": AXIS,
    "automargin": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure with its text.

    Of a panel without data, the page has only the sentence `absent`.
    """

    title: str
    key: str = ""
    note: str = ""  # how to read it
    data: list[Json] = field(default_factory=list)
    layout: Json = field(default_factory=dict)
    is_wide: bool = False
    absent: str = ""  # why there is no data


def make_layout(
    x_label: str, y_label: str, *, x: Json | None = None, y: Json | None = None, **settings: object
) -> Json:
    """Return Plotly's layout with these `settings`; `x` and `y` are settings of an axis."""
    return {
        "font": {"family": _FAMILY, "size": 13, "color": INK},
        "margin": {"l": 10, "r": 10, "t": 8, "b": 10},
        "height": 330,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"font": {"family": _FAMILY}},
        "hovermode": "x unified",
        "barmode": "stack",
        "bargap": 0.15,
        "showlegend": False,  # the page has a legend that wraps, below the plot
        "xaxis": AXIS_STYLE | {"title": {"text": x_label, "standoff": 8}} | (x or {}),
        "yaxis": AXIS_STYLE
        | {"title": {"text": y_label, "standoff": 10}, "rangemode": "tozero"}
        | (y or {}),
        **settings,
    }


def make_curve(
    name: str, color: str, points: tuple[Sequence[float], Sequence[float | None]], **line: str
) -> Json:
    """Return a curve; `line` are settings of its line. A short one also has marks."""
    x, y = points
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= _NUM_MARKED and not line else "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": color, "width": 2, **line},
    }


def make_bars(
    name: str, color: str, points: tuple[Sequence[float | str], Sequence[float | None]]
) -> Json:
    """Return a layer of stacked bars."""
    x, y = points
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color}}
