"""Draws the main panels as one static image for a README: Matplotlib, with the numbers and colours of the page.

Called by tools/report.py with the same panels. Wide panels come first, one per row; the others share rows.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tools.run_report.data import RunData
from tools.run_report.headline import facts, headline
from tools.run_report.palette import SHARES, legend_order, phase_of, text_on
from tools.run_report.panels import (
    Absent,
    HeatMap,
    Lanes,
    Lines,
    Panel,
    Series,
    StackedBars,
    percent,
)

_WIDTH = 12.0  # inches
_ROW = 3.0
_DPI = 130
_LEGEND = {
    "fontsize": 8,
    "frameon": False,
    "borderaxespad": 0.2,
    "handlelength": 1.4,
    "columnspacing": 1.2,
}
_STYLES = {
    "lines": "solid",
    "dots": "solid",
    "steps": "solid",
    "dashed": "dashed",
    "marks": "none",
}


def write_picture(run: RunData, panels: list[Panel | Absent], out: Path) -> None:
    """Draw all panels that are present to `out`, in the format of its suffix."""
    drawn = [panel for panel in panels if isinstance(panel, Panel)]
    wide = [panel for panel in drawn if panel.is_wide]
    narrow = [panel for panel in drawn if not panel.is_wide]
    heights = [_wide_height(panel) for panel in wide] + [_ROW] * ((len(narrow) + 1) // 2)
    total = sum(heights) + 0.95
    figure = Figure(figsize=(_WIDTH, total), dpi=_DPI, facecolor="white")
    head = 0.95 / total
    figure.set_layout_engine(
        "constrained", rect=(0.015, 0, 0.98, 1 - head), hspace=0.06, h_pad=0.1, wspace=0.03
    )
    grid = GridSpec(len(heights), 2, figure=figure, height_ratios=heights)
    first: Axes | None = None
    for row, panel in enumerate(wide):
        axes = figure.add_subplot(grid[row, :], sharex=first)
        first = first or axes
        _draw(panel, axes)
    for number, panel in enumerate(narrow):
        _draw(panel, figure.add_subplot(grid[len(wide) + number // 2, number % 2]))
    _head(run, figure, total)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _wide_height(panel: Panel) -> float:
    return 1.6 + 0.42 * len(panel.content.names) if isinstance(panel.content, Lanes) else 2.1


def _head(run: RunData, figure: Figure, total: float) -> None:
    figure.text(0.02, 1 - 0.25 / total, run.name, fontsize=15, fontweight="bold", va="center")
    figure.text(0.02, 1 - 0.5 / total, facts(run), fontsize=10, color="#4A5159", va="center")
    items = [f"{item.name} {item.text}" for item in headline(run.summary)]
    half = -(-len(items) // 2)
    for top, line in zip((0.72, 0.92), (items[:half], items[half:]), strict=True):
        figure.text(0.02, 1 - top / total, "   |   ".join(line), fontsize=10, va="center")


def _draw(panel: Panel, axes: Axes) -> None:
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    content = panel.content
    if not panel.is_wide and not isinstance(content, HeatMap):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if isinstance(content, Lanes):
        _draw_lanes(content, axes)
    elif isinstance(content, HeatMap):
        _draw_heat_map(content, axes)
    elif isinstance(content, StackedBars):
        _draw_bars(content, axes)
    else:
        _draw_lines(content, axes)
    num_rows = 2 if isinstance(content, Lanes) else _legend(axes, is_wide=panel.is_wide)
    pad = 8 + 14 * num_rows
    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left", pad=pad)


def _draw_lines(content: Lines, axes: Axes) -> None:
    for series in content.series:
        _curve(series, axes)
    axes.grid(axis="y", color="#E6E8EB", linewidth=0.8)
    axes.set_axisbelow(True)
    if content.is_log:
        axes.set_yscale("log")
        axes.set_yticks(content.log_ticks, [f"{tick:,}" for tick in content.log_ticks])
        axes.minorticks_off()
    elif content.y_range is not None:
        axes.set_ylim(*content.y_range)
    else:
        axes.set_ylim(bottom=0)


def _curve(series: Series, axes: Axes) -> None:
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x is not None]
    marker = {"dots": "o", "marks": "D"}.get(series.mode)
    axes.plot(
        [x for x, _ in points],
        [float("nan") if y is None else y for _, y in points],
        color=series.color,
        label=series.name,
        linewidth=1.6,
        linestyle=_STYLES[series.mode],
        marker=marker,
        markersize=4,
        drawstyle="steps-post" if series.mode == "steps" else "default",
        zorder=3,
    )


def _draw_bars(content: StackedBars, axes: Axes) -> None:
    tops: dict[float, float] = {}
    for series in content.series:
        points = [
            (x, y or 0.0) for x, y in zip(series.x, series.y, strict=True) if x is not None
        ]  # fmt: skip
        axes.bar(
            [x for x, _ in points],
            [y for _, y in points],
            bottom=[tops.get(x, 0.0) for x, _ in points],
            width=0.85,
            color=series.color,
            label=series.name,
        )
        for x, y in points:
            tops[x] = tops.get(x, 0.0) + y
    if content.marks is not None:
        _curve(content.marks, axes)
    axes.grid(axis="y", color="#E6E8EB", linewidth=0.8)
    axes.set_axisbelow(True)


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


def _draw_lanes(content: Lanes, axes: Axes) -> None:
    names = content.names
    by_label: dict[str, list] = {}
    for segment in content.segments:
        by_label.setdefault(phase_of(segment.phase)[0], []).append(segment)
    patches: list[Artist] = []
    for label in legend_order(by_label):
        color = phase_of(by_label[label][0].phase)[1]
        patches.append(Patch(facecolor=color, label=label))
        for lane, name in enumerate(names):
            bars = [
                (s.start_s, s.end_s - s.start_s) for s in by_label[label] if s.lane == name
            ]  # fmt: skip
            axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=color, linewidth=0)
        for segment in by_label[label]:
            middle = (segment.start_s + segment.end_s) / 2
            axes.text(middle, names.index(segment.lane), content.label_of(segment), ha="center",
                      va="center", fontsize=7.5, color=text_on(color), clip_on=True)  # fmt: skip
    for phase in {moment.phase for moment in content.moments}:
        patches.append(
            Line2D([], [], marker="v", linestyle="none", color=phase_of(phase)[1],
                   markeredgecolor="black", label=f"{phase} (moment)")
        )  # fmt: skip
    for moment in content.moments:
        axes.plot(moment.start_s, names.index(moment.lane) - 0.38, marker="v", markersize=6,
                  color=phase_of(moment.phase)[1], markeredgecolor="black", zorder=4)  # fmt: skip
    for step, start in content.window.step_starts.items():
        axes.axvline(start, color="black", linewidth=0.8, linestyle="dotted")
        axes.annotate(f" step {step}", (start, 1), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, content.width_s)
    axes.legend(
        handles=patches, ncols=len(patches), loc="lower left", bbox_to_anchor=(0.0, 1.1), **_LEGEND
    )


def _legend(axes: Axes, *, is_wide: bool) -> int:
    """Draw the legend above the axes, in as many rows as it needs. Returns the number of rows."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return 1
    width = _WIDTH if is_wide else 0.43 * _WIDTH
    columns = [0.5 + 0.06 * len(name) for name in names]  # inches, of 8 point text
    num_columns = len(names) if sum(columns) < width else max(int(width / max(columns)), 1)
    by_row = [i for column in range(num_columns) for i in range(column, len(names), num_columns)]
    axes.legend(
        [handles[i] for i in by_row],
        [names[i] for i in by_row],
        ncols=num_columns,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        **_LEGEND,
    )
    return -(-len(names) // num_columns)
