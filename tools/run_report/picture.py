"""Draws the main panels as one static image for a README: Matplotlib, with the numbers and colours of the page.

Called by tools/report.py with the same panels. Wide panels come first, one per row; the others share rows.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

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
from tools.run_report.palette import BLACK, GRID, SHARES, by_legend_entry, phase_of, text_on

_WIDTH, _ROW, _WIDE_ROW, _LINE = 12.0, 3.0, 2.1, 0.21  # inches
_DPI = 130
_LINE_CHARACTERS = 165
_LEGEND_COLUMNS = {True: 12, False: 4}  # of a wide panel, of another


def write_picture(run: RunData, panels: list[Panel | Absent], out: Path) -> None:
    """Draw all panels that are present to `out`, in the format of its suffix."""
    drawn = [panel for panel in panels if isinstance(panel, Panel)]
    wide = [panel for panel in drawn if panel.is_wide]
    narrow = [panel for panel in drawn if not panel.is_wide]
    pairs = [narrow[i : i + 2] for i in range(0, len(narrow), 2)]
    heights = [_wide_height(panel) for panel in wide] + [_ROW] * len(pairs)
    figures = [
        f"{item.name} {item.text}".replace(" ", "\N{NO-BREAK SPACE}")
        for item in headline(run.summary)
    ]
    lines = [
        *textwrap.wrap(facts(run), _LINE_CHARACTERS),
        *textwrap.wrap("   |   ".join(figures), _LINE_CHARACTERS),
    ]
    head = 0.45 + _LINE * len(lines)
    total = sum(heights) + head
    figure = Figure(figsize=(_WIDTH, total), dpi=_DPI, facecolor="white")
    figure.text(0.02, 1 - 0.25 / total, run.name, fontsize=15, fontweight="bold", va="center")
    for number, line in enumerate(lines):
        top = 0.52 + _LINE * number
        figure.text(0.02, 1 - top / total, line, fontsize=9.5, va="center")
    figure.set_layout_engine(
        "constrained", rect=(0.015, 0, 0.97, 1 - head / total), hspace=0.06, h_pad=0.1
    )
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    first: Axes | None = None
    for row, panel in enumerate(wide):
        axes = figure.add_subplot(grid[row, :], sharex=first)
        first = first or axes
        _draw(panel, axes)
    for row, pair in enumerate(pairs, start=len(wide)):
        for column, panel in enumerate(pair):
            _draw(panel, figure.add_subplot(grid[row, column]))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _wide_height(panel: Panel) -> float:
    content = panel.content
    return 1.6 + 0.42 * len(content.names) if isinstance(content, Lanes) else _WIDE_ROW


def _draw(panel: Panel, axes: Axes) -> None:
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    content = panel.content
    if not panel.is_wide and not isinstance(content, HeatMap):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if isinstance(content, Lines | StackedBars):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        (_draw_lines if isinstance(content, Lines) else _draw_bars)(content, axes)
        handles, names = axes.get_legend_handles_labels()
    elif isinstance(content, HeatMap):
        _draw_heat_map(content, axes)
        handles, names = [], []
    else:
        handles, names = _draw_lanes(content, axes)
    columns = _LEGEND_COLUMNS[panel.is_wide]
    num_rows = -(-len(names) // columns)
    above = 0.1 * isinstance(content, Lanes)  # the names of the steps stand there
    axes.legend(handles, names, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0 + above),
                fontsize=8, frameon=False, borderaxespad=0.2, handlelength=1.4,
                columnspacing=1.2)  # fmt: skip
    pad = 8 + 14 * (num_rows + isinstance(content, Lanes))
    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left", pad=pad)


def _draw_lines(content: Lines, axes: Axes) -> None:
    for series in content.series:
        _curve(series, axes)
    if content.is_log:
        axes.set_yscale("log")
        axes.set_yticks(content.log_ticks, [f"{tick:,}" for tick in content.log_ticks])
        axes.minorticks_off()
    elif content.y_range is not None:
        axes.set_ylim(*content.y_range)
    else:
        axes.set_ylim(bottom=0)


def _curve(series: Series, axes: Axes) -> None:
    axes.plot(
        series.x,
        [float("nan") if y is None else y for y in series.y],
        color=series.color,
        label=series.name,
        linewidth=1.6,
        linestyle={"dashed": "dashed", "marks": "none"}.get(series.mode, "solid"),
        marker={"dots": "o", "marks": "D"}.get(series.mode),
        markersize=4,
        drawstyle="steps-post" if series.mode == "steps" else "default",
        zorder=3,
    )


def _draw_bars(content: StackedBars, axes: Axes) -> None:
    tops: dict[float, float] = {}
    for series in content.series:
        heights = [y or 0.0 for y in series.y]
        bottoms = [tops.get(x, 0.0) for x in series.x]
        axes.bar(series.x, heights, 0.85, bottoms, color=series.color, label=series.name)
        tops |= {x: a + b for x, a, b in zip(series.x, heights, bottoms, strict=True)}
    if content.marks is not None:
        _curve(content.marks, axes)


def _draw_heat_map(content: HeatMap, axes: Axes) -> None:
    values = [[float("nan") if v is None else v for v in row] for row in content.shares]
    colors = LinearSegmentedColormap.from_list("shares", SHARES)
    axes.pcolormesh(values, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=2)
    axes.set_xticks([i + 0.5 for i in range(len(content.columns))], content.columns)
    axes.set_yticks([i + 0.5 for i in range(len(content.rows))], content.rows)
    axes.tick_params(length=0)
    for y, row in enumerate(content.shares):
        for x, share in enumerate(row):
            axes.text(x + 0.5, y + 0.5, percent(share), ha="center", va="center", fontsize=8,
                      color="white" if (share or 0) > 0.55 else "black")  # fmt: skip


def _draw_lanes(content: Lanes, axes: Axes) -> tuple[list[Patch], list[str]]:
    """Return the handles and the names of the legend."""
    names = content.names
    handles: list[Patch] = []
    for label, segments in by_legend_entry(content.segments).items():
        color = phase_of(segments[0].phase)[1]
        handles.append(Patch(facecolor=color, label=label))
        for lane, name in enumerate(names):
            bars = [(s.start_s, s.end_s - s.start_s) for s in segments if s.lane == name]
            axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=color, linewidth=0)
        for segment in segments:
            middle = (segment.start_s + segment.end_s) / 2
            axes.text(middle, names.index(segment.lane), content.label_of(segment), ha="center",
                      va="center", fontsize=7.5, color=text_on(color), clip_on=True)  # fmt: skip
    for step, start in content.window.step_starts.items():
        axes.axvline(start, color=BLACK, linewidth=0.8, linestyle="dotted")
        axes.annotate(f" step {step}", (start, 1), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, content.width_s)
    return handles, [str(handle.get_label()) for handle in handles]
