"""What all figures of the report share, as Plotly's JSON: text, axes, curves and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

_NUM_MARKED = 30


@cache
def declared() -> Json:
    """Return the tables of figures.yaml."""
    return yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure with its text.

    The page has only the sentence `absent` of a panel without data.
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
    xaxis = {"title": {"text": x_label}} | (x or {})
    yaxis = {"title": {"text": y_label}} | (y or {})
    return declared()["layout"] | {"xaxis": xaxis, "yaxis": yaxis} | settings


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
