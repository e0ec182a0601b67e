"""Writes the report as one HTML file that loads nothing else.

Jinja2 makes the page and Plotly, which is inlined, the figures.

Figures are plain JSON in the page (`figure-<key>`), so every number can be read there. Three
numbers of summary.json stand at the top, all of it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.run_report.data import RunData
from tools.run_report.figure import Panel
from tools.run_report.palette import ON_DARK
from tools.run_report.responses import Response
from tools.run_report.running import State

try:
    import jinja2
    import plotly.offline
except ModuleNotFoundError as error:
    needed = f'needs the package {error.name}: pip install "tlt_megatron[report]"'
    raise ValueError(needed) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a page that follows a run has in addition."""

    version: str  # changes with the files that the page shows
    states: Sequence[State]  # one for each run
    links: Sequence[tuple[str, str]] = ()  # address and name of every page of the server


def render_page(
    run: RunData, panels: Sequence[Panel], responses: Sequence[Response], live: Live | None = None
) -> str:
    """Return the page of `run`; it reloads itself if it is `live`."""
    return _render(
        panels, run=run, name=run.name, alarms=run.alarms, responses=responses, live=live
    )


def render_comparison(
    runs: Sequence[RunData], panels: Sequence[Panel], live: Live | None = None
) -> str:
    """Return the page of several runs side by side."""
    alarms = [f"{run.name}: {text}" for run in runs for text in run.alarms]
    return _render(panels, name=" · ".join(run.name for run in runs), alarms=alarms, live=live)


def render_states(states: Sequence[State]) -> str:
    """Return the part of a live page that is shown anew every few seconds."""
    return _environment().get_template("running.html.j2").render(states=states)


def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def _render(panels: Sequence[Panel], **values: object) -> str:
    template = _environment().get_template("page.html.j2")
    plotly_js = plotly.offline.get_plotlyjs()
    return template.render(panels=panels, plotly_js=plotly_js, on_dark=ON_DARK, **values)
