"""Writes the report as one HTML file that loads nothing else.

Jinja2 makes the page and Plotly, which is inlined, the figures.

Figures are plain JSON in the page (`figure-<key>`), so every number can be read there. Three
numbers of summary.json stand at the top, all of it at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_HEADLINE = (  # name, and how it is shown from the numbers of summary.json
    ("held-out accuracy, before and after", "{eval_accuracy_first:.2f} → {eval_accuracy_last:.2f}"),
    ("median RL step", "{step_time_s_median:.3g} s"),
    ("faster RL steps by speculation", "{step_speedup:.2f}x"),
)

_MARGIN = 1.15  # the plan is right within 15 %

_FACTS = (  # of the settings
    "{model[path]} · {rollout[engine]} engine, {rollout[dtype]} · {rollout[num_prompts]} prompts ×"
    " {rollout[num_samples]} responses a step, at most {rollout[max_new_tokens]} tokens ·"
    " speculation.enabled={speculation[enabled]} · spot.enabled={spot[enabled]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a page that follows a run has in addition."""

    version: str  # of the files that the page shows
    states: Sequence[State]  # one for each run
    links: Sequence[tuple[str, str]] = ()  # address and name of every page of the server


def render_page(
    run: RunData, panels: Sequence[Panel], responses: Sequence[Response], live: Live | None = None
) -> str:
    """Return the page of `run`; it reloads itself if it is `live`."""
    return _render(
        panels,
        name=run.name,
        headline=[(label, _filled(text, run.summary)) for label, text in _HEADLINE],
        facts=_filled(_FACTS, run.config) + _memory(run.summary),
        alarms=run.alarms,
        responses=responses,
        live=live,
        texts=run.texts,
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


def _memory(summary: Mapping[str, object]) -> str:
    """Return what a rank took of the memory that was planned; "" if no rank could tell."""
    peak, planned = summary.get("memory_peak_gb"), summary.get("memory_planned_gb")
    if not isinstance(peak, float) or not isinstance(planned, float):
        return ""
    verdict = "above plan" if peak > _MARGIN * planned else "planned"
    return f" · memory of a rank {peak:.3g} GB, {verdict} ({planned:.3g} GB)"


def _filled(text: str, values: Mapping[str, object]) -> str:
    """Return `text` with the values; "" if one is absent or of another kind."""
    try:
        return text.format(**values)
    except (KeyError, TypeError, ValueError):
        return ""
