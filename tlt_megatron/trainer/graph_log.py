"""Formats the rollout engine's plan of CUDA graph captures as log lines. build.py logs them before any capture."""

from __future__ import annotations

from tlt_megatron.engines.embedded.graph_plan import GraphPlan, PlanRow

_COLUMNS = "{:8}{:>5}  {:<42}{:>9}{:>12}  {}"


def graph_lines(plan: GraphPlan, *, is_used: bool) -> list[str]:
    """Return a table of the captures, or one line if graphs are not used. Bytes are the plan's estimates."""
    sizes = [plan.bytes_pool(), plan.bytes_single(), plan.bytes_naive()]
    pool, single, naive = map(mebibytes, sizes)
    if not is_used:
        return [
            f"graphs of the rollout engine: not used here; with them the pool would take {pool}"
        ]
    lines = [
        f"graphs of the rollout engine: {len(plan.keys)} captures, {pool}, of which {mebibytes(plan.shared_bytes())} are"
        f" tensors that all share (every strategy captured for itself: {naive}; the widest alone: {single})",
        _COLUMNS.format("pass", "rows", "batch sizes", "captures", "graphs", "used by"),
    ]
    return lines + [_line(row) for row in plan.describe()]


def _line(row: PlanRow) -> str:
    sizes = ", ".join(map(str, row.batch_sizes))
    users = ", ".join(row.used_by)
    return _COLUMNS.format(
        row.role, row.num_rows, sizes, row.num_captures, mebibytes(row.graph_bytes), users
    )


def mebibytes(num_bytes: int) -> str:
    """Format bytes as MiB, e.g. "1,234 MiB"."""
    return f"{num_bytes / 2**20:,.0f} MiB"
