"""Writes the report of runs as one HTML page that loads nothing else: for a file, or of runs in
progress for `tlt watch`.

Jinja2 makes the page and Plotly, which is inlined, the figures.

Figures are plain JSON in the page (`figure-<key>`), so every number can be read there. Three
numbers of summary.json stand at the top, all of it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_megatron.runtime.typed_command import pip_command
from tlt_megatron.saved_files import errors_named
from tools.run_report.data import RunData
from tools.run_report.figure import Panel
from tools.run_report.palette import ON_DARK
from tools.run_report.panels import build_comparison, build_panels
from tools.run_report.responses import read_responses
from tools.run_report.running import State, describe_end

try:
    import jinja2
    import plotly.offline
except ModuleNotFoundError as error:
    needed = f"needs the package {error.name}: {pip_command('tlt_megatron[report]')}"
    raise ValueError(needed) from None


class Live(NamedTuple):
    """What a page that follows runs, and reloads itself, has in addition."""

    version: str  # changes with the files that the page shows
    states: Sequence[State]  # one for each run
    links: Sequence[tuple[str, str]] = ()  # address and name of every page of the server


def render(
    runs: Sequence[RunData], steps: tuple[int, int] | None = None, live: Live | None = None
) -> str:
    """Return the page of a run, or of several runs side by side. ValueError for a broken file.

    `steps` are those of one run's timeline, by default the last two.
    """
    run, panels, responses = None, [], []
    if len(runs) > 1:
        name = " · ".join(each.name for each in runs)
        alarms = [f"{each.name}: {alarm}" for each in runs for alarm in each.alarms]
        panels = build_comparison(runs)
    else:
        (run,) = runs
        with errors_named(run.folder):
            name, alarms = run.name, run.alarms
            if live is None and (ending := describe_end(run.folder)):
                alarms = [ending, *alarms]
            if run.rows or live is None:
                panels, responses = build_panels(run, steps), read_responses(run.folder)
    return render_panels(name, panels, run=run, alarms=alarms, responses=responses, live=live)


def render_panels(name: str, panels: Sequence[Panel], **parts: object) -> str:
    """Return a page of figures; `parts` are the other parts of the report."""
    plotly_js = plotly.offline.get_plotlyjs()
    page = _environment().get_template("page.html.j2")
    return page.render(name=name, panels=panels, plotly_js=plotly_js, on_dark=ON_DARK, **parts)


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
