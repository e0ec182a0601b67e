"""Writes the report as one HTML file that loads nothing else.

Jinja2 makes the page and Plotly, which is inlined, the figures.

Figures are plain JSON in the page (`figure-<key>`), so every number can be read there. Every number
of summary.json is a card at the top; known keys get a better name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import plotly.offline

from tools.run_report.data import RunData
from tools.run_report.figure import Panel
from tools.run_report.palette import ON_DARK
from tools.run_report.responses import Response
from tools.run_report.running import State

_NAMES = {
    "eval_accuracy_first": "held-out accuracy, first",
    "eval_accuracy_last": "held-out accuracy, last",
    "num_steps": "RL steps",
    "step_time_s_median": "step time, median",
    "rollout_tokens_per_s": "rollout speed",
    "seconds_total": "whole run",
    "memory_peak_gb": "memory, peak",
    "memory_planned_gb": "memory, planned",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a page that follows a run has in addition."""

    version: str  # of the files that the page shows
    states: Sequence[State]  # one for each run
    links: Sequence[tuple[str, str]] = ()  # address and name of every page of the server


def render_page(
    run: RunData,
    panels: Sequence[Panel],
    responses: Sequence[Response],
    live: Live | None = None,
) -> str:
    """Return the page of `run`; it reloads itself if it is `live`."""
    return _render(
        panels,
        name=run.name,
        headline=_headline(run.summary),
        facts=_facts(run),
        alarms=run.alarms,
        responses=responses,
        live=live,
        config=run.config_text,
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


def _headline(summary: dict[str, object]) -> list[dict[str, object]]:
    """Return the numbers of summary.json, in its order."""
    return [
        {"key": key, "name": _NAMES.get(key, _words(key)), "value": value, "text": _text(key, value) + _above_plan(key, value, summary)}
        for key, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]  # fmt: skip


def _above_plan(key: str, value: float, summary: dict[str, object]) -> str:
    planned = summary.get("memory_planned_gb")
    is_above = key == "memory_peak_gb" and isinstance(planned, float) and value > planned
    return ", above plan" if is_above else ""


def _words(key: str) -> str:
    return key.replace("_", " ").removesuffix(" s").removesuffix(" ms")


def _text(key: str, value: float) -> str:
    """Return the number with its unit."""
    number = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
    if key.endswith("_gb"):
        return f"{number} GB"
    if "tokens_per_s" in key:
        return f"{number} tokens/s"
    if key.endswith("_ms") or "_ms_" in key:
        return f"{number} ms"
    if key.endswith("_s") or "_s_" in key or key.startswith("seconds"):
        return f"{number} s"
    return number


def _facts(run: RunData) -> str:
    """Return model, ranks and settings in one line; "" for a run that has written no settings."""
    if not run.config:
        return ""
    rollout = run.config.get("rollout", {})
    parts = [Path(str(run.config.get("model", {}).get("path"))).name]
    if run.trace and (num_ranks := len(run.trace.ranks)):
        parts.append(f"{num_ranks:,} rank{'s' if num_ranks > 1 else ''}")
    parts.append(f"{rollout.get('engine')} engine, {rollout.get('dtype')}")
    parts.append(
        f"{rollout.get('num_prompts')} prompts × {rollout.get('num_samples')} responses a step,"
        f" at most {rollout.get('max_new_tokens')} tokens"
    )
    is_on = run.is_on("speculation")
    parts.append(f"speculation: {run.config['speculation'].get('selector') if is_on else 'off'}")
    parts.append(f"spot training: {'on' if run.is_on('spot') else 'off'}")
    return " · ".join(parts)
