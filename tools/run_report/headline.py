"""The text and numbers at the top of the report: summary.json as cards, and the kind of run.

Used by page.py and picture.py. Every number in summary.json is shown; known keys get a better name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.run_report.data import RunData

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
class Figure:
    """One headline figure."""

    key: str  # of summary.json
    name: str
    value: float | int
    text: str  # with its unit


def headline(summary: dict[str, object]) -> list[Figure]:
    """Return the numbers of summary.json, in its order."""
    return [
        Figure(key=key, name=_NAMES.get(key, _words(key)), value=value, text=_text(key, value))
        for key, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def facts(run: RunData) -> str:
    """Return model, ranks and settings in one line."""

    def get(section: str, name: str) -> object:
        return run.config.get(section, {}).get(name)

    parts = [Path(str(get("model", "path"))).name]
    if run.spans:
        num_ranks = len({span.rank for span in run.spans})
        parts.append(f"{num_ranks} rank{'s' if num_ranks > 1 else ''}")
    parts.append(f"{get('rollout', 'engine')} engine, {get('rollout', 'dtype')}")
    parts.append(
        f"{get('rollout', 'num_prompts')} prompts × {get('rollout', 'num_samples')} responses a step,"
        f" at most {get('rollout', 'max_new_tokens')} tokens"
    )
    selector = get("speculation", "selector") if run.is_on("speculation") else "off"
    parts.append(f"speculation: {selector}")
    parts.append(f"spot training: {'on' if run.is_on('spot') else 'off'}")
    return " · ".join(parts)


def _words(key: str) -> str:
    words = key.replace("_", " ")
    return words.removesuffix(" s").removesuffix(" ms")


def _text(key: str, value: float) -> str:
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
