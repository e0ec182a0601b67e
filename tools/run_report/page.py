"""Writes the report as one HTML file that loads nothing else: Jinja2 for the page, Plotly (inlined) for the figures.

Called by tools/report.py with the panels. Figures are plain JSON in the page (`figure-<key>`), so every number can be read
there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

from tools.run_report.data import RunData
from tools.run_report.figures import (
    Absent,
    HeatMap,
    Lanes,
    Lines,
    Panel,
    Series,
    StackedBars,
    percent,
)
from tools.run_report.headline import facts, headline
from tools.run_report.palette import (
    AXIS,
    BLACK,
    GRID,
    INK,
    ON_DARK,
    SHARES,
    by_legend_entry,
    phase_of,
    text_on,
)

Json = dict[str, Any]

_FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_FONT = {"family": _FAMILY, "size": 13, "color": INK}
_AXIS = {
    "showline": True,
    "linecolor": AXIS,
    "gridcolor": GRID,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": AXIS,
    "automargin": True,
}
_LANE_HEIGHT = 46
_OWN_HEIGHT: Json = {"automargin": "height"}  # labels must not narrow a wide panel
_WIDE_MARGIN = {"l": 110, "r": 24, "t": 8, "b": 10}  # equal margins, so that time axes line up
_MODES: dict[str, tuple[str, Json]] = {  # of Plotly, and the style of the line
    "lines": ("lines", {}),
    "dots": ("lines+markers", {}),
    "marks": ("markers", {}),
    "dashed": ("lines", {"dash": "dash"}),
    "steps": ("lines", {"shape": "hv"}),
}


def write_page(run: RunData, panels: list[Panel | Absent], out: Path) -> None:
    """Write the page of `run` to `out`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        name=run.name,
        headline=headline(run.summary),
        facts=facts(run),
        panels=[
            {"panel": panel, "figure": _script_json(figure(panel))}
            for panel in panels
            if isinstance(panel, Panel)
        ],
        absent=[panel for panel in panels if isinstance(panel, Absent)],
        config=run.config_text,
        plotly_js=plotly.offline.get_plotlyjs(),
        on_dark=ON_DARK,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def figure(panel: Panel) -> Json:
    """Return the panel as Plotly's data and layout."""
    layout: Json = {
        "font": _FONT,
        "margin": {"l": 10, "r": 10, "t": 8, "b": 10},
        "height": 330,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"font": {"family": _FAMILY}},
        "xaxis": _AXIS | {"title": {"text": panel.x_label, "standoff": 8}},
        "yaxis": _AXIS | {"title": {"text": panel.y_label, "standoff": 10}, "rangemode": "tozero"},
        "showlegend": False,  # the page has a legend that wraps, below the plot
    }
    content = panel.content
    if isinstance(content, Lanes):
        data = _lanes(content, layout)
    elif isinstance(content, HeatMap):
        data = _heat_map(content, layout)
    elif isinstance(content, StackedBars):
        data = [
            {"type": "bar", "name": s.name, "x": list(s.x), "y": list(s.y), "marker": {"color": s.color}}
            for s in content.series
        ]  # fmt: skip
        if content.marks is not None:
            data.append(_curve(content.marks))
        layout |= {"barmode": "stack", "bargap": 0.15, "hovermode": "x unified"}
    else:
        data = _curves(content, layout)
    return {"data": data, "layout": layout}


def _curves(content: Lines, layout: Json) -> list[Json]:
    layout["hovermode"] = "x unified"
    if content.x_range is not None:  # a wide panel shares the axis of the timeline
        layout |= {"margin": _WIDE_MARGIN, "height": 240}
        layout["xaxis"] |= {"range": [*content.x_range]} | _OWN_HEIGHT
    if content.y_range is not None:
        layout["yaxis"]["range"] = list(content.y_range)
    if content.is_log:
        layout["yaxis"] |= {"type": "log", "tickvals": content.log_ticks, "tickformat": ","}
    return [_curve(series) for series in content.series]


def _curve(series: Series) -> Json:
    mode, style = _MODES[series.mode]
    symbol = {"symbol": "diamond"} if mode == "markers" else {}
    return {
        "type": "scatter",
        "mode": mode,
        "name": series.name,
        "x": list(series.x),
        "y": list(series.y),
        "line": {"color": series.color, "width": 2, **style},
        "marker": {"color": series.color, "size": 7, **symbol},
    }


def _heat_map(content: HeatMap, layout: Json) -> list[Json]:
    scale = [[i / (len(SHARES) - 1), color] for i, color in enumerate(SHARES)]
    layout["hovermode"] = "closest"
    for axis in ("xaxis", "yaxis"):
        layout[axis]["type"] = "category"
    return [
        {
            "type": "heatmap",
            "x": list(content.columns),
            "y": list(content.rows),
            "z": [list(row) for row in content.shares],
            "customdata": [list(row) for row in content.details],
            "text": [[percent(share) for share in row] for row in content.shares],
            "texttemplate": "%{text}",
            "hovertemplate": "%{y} at %{x} requests: %{z:.1%}<br>%{customdata}<extra></extra>",
            "colorscale": scale,
            "zmin": 0,
            "zmax": 1,
            "xgap": 2,
            "ygap": 2,
            "colorbar": {"title": {"text": "share"}, "tickformat": ".0%", "thickness": 12},
        }
    ]


def _lanes(content: Lanes, layout: Json) -> list[Json]:
    names = content.names
    data: list[Json] = []
    for label, segments in by_legend_entry(content.segments).items():
        color = phase_of(segments[0].phase)[1]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "y": [s.lane for s in segments],
                "base": [s.start_s for s in segments],
                "x": [s.end_s - s.start_s for s in segments],
                "text": [content.label_of(s) for s in segments],
                "customdata": [s.detail for s in segments],
                "hovertemplate": "%{customdata}<br>%{base:.4f} s, for %{x:.4f} s<extra>%{y}</extra>",
                "marker": {"color": color, "line": {"width": 0}},
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"color": text_on(color)},
                "constraintext": "none",
            }
        )
    line: Json = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    line["line"] = {"color": BLACK, "width": 1, "dash": "dot"}
    starts = [start for start in content.window.step_starts.values() if start > 0]
    layout |= {
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "height": 120 + _LANE_HEIGHT * len(names),
        "margin": _WIDE_MARGIN,
        "shapes": [line | {"x0": start, "x1": start} for start in starts],
    }
    layout["xaxis"] |= {"range": [0, content.width_s]} | _OWN_HEIGHT
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": names[::-1], "showgrid": False}
    return data


def _script_json(value: Json) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
