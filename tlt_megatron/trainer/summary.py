"""The content of summary.json: what the metrics of a run say of the whole run. Rank 0 calls it at
the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlt_megatron.rollout.gain import SpeculationGain
from tlt_megatron.runtime.durable import is_metrics_row, read_json_lines


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the metrics in `metrics.jsonl` by step. The rows of an evaluation are merged into the
    row of its step.
    """
    rows: dict[int, dict[str, float]] = {}
    for row in read_json_lines(path, is_metrics_row):
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def summarize(
    rows: Sequence[Mapping[str, float | None]], *, seconds: float, gain: SpeculationGain | None
) -> dict[str, float | int | None]:
    """Return the summary of a run with these metrics, a row per step. It took `seconds` in all."""

    def column(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    def largest(prefix: str) -> float | None:
        names = {name for row in rows for name in row if name.startswith(prefix)}
        return max((value for name in names for value in column(name)), default=None)

    step_s, gen_s = column("timing_s/step"), column("timing_s/gen")
    rates, accuracies = column("perf/rollout_tokens_per_s"), column("eval/accuracy")
    summary = {
        "eval_accuracy_first": accuracies[0] if accuracies else None,
        "eval_accuracy_last": accuracies[-1] if accuracies else None,
        "num_steps": len(step_s),
        "step_time_s_median": statistics.median(step_s) if step_s else None,
        "rollout_tokens_per_s": statistics.fmean(rates, gen_s) if rates and gen_s else None,
        "seconds_total": seconds,
        "memory_peak_gb": largest("memory/peak_gb/"),
        "memory_planned_gb": largest("memory/planned_gb/"),
    }
    if lengths := column("rollout/spec_accept_length"):
        summary["accept_length_first"] = lengths[0]
        summary["accept_length_last"] = statistics.fmean(lengths[-5:])
    if used_s := column("bubble/used_s"):
        summary["idle_s"], summary["idle_used_s"] = sum(column("bubble/idle_s")), sum(used_s)
        summary["stall_s"] = sum(column("bubble/stall_s"))
    if gain is not None:
        step, rollout = statistics.median(step_s), statistics.median(gen_s)
        summary["rollout_speedup"] = gain.rollout_speedup
        summary["step_speedup"] = (step - rollout + rollout * gain.rollout_speedup) / step
        summary["responses_differing"] = float(gain.num_differing)
    return summary
