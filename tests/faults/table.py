"""The table fault x (schedules, hangs, lost, orphans)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.case import Verdict

COLUMNS = ("schedules", "hangs", "lost", "orphans", "unclear", "broken", "missed")


def summarize(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """One row for each fault, and the total. A schedule whose fault came too late is counted as missed alone."""
    rows: list[dict[str, object]] = []
    for name in sorted({verdict.fault for verdict in verdicts}):
        mine = [verdict for verdict in verdicts if verdict.fault == name]
        rows.append(
            {"fault": name, "door": "/".join(sorted({v.door for v in mine})), **_count(mine)}
        )
    return [*rows, {"fault": "total", "door": "", **_count(verdicts)}]


def _count(verdicts: Sequence[Verdict]) -> dict[str, int]:
    shown = [verdict for verdict in verdicts if not verdict.missed]
    return {
        "schedules": len(shown),
        "hangs": sum(bool(v.hang) for v in shown),
        "lost": sum(bool(v.lost) for v in shown),
        "orphans": sum(bool(v.orphans) for v in shown),
        "unclear": sum(bool(v.unclear) for v in shown),
        "broken": sum(bool(v.broken) for v in shown),
        "missed": len(verdicts) - len(shown),
    }


def as_text(rows: Sequence[dict[str, object]]) -> str:
    """As a Markdown table."""
    names = ("fault", "door", *COLUMNS)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)
