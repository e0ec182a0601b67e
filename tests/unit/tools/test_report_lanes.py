"""The timeline of the report: steps, the innermost span at any time, colours."""

from __future__ import annotations

from itertools import pairwise

from tools.run_report.data import Span
from tools.run_report.lanes import choose_window, step_spans, visible_parts
from tools.run_report.palette import blend


def test_of_a_step_that_was_done_again_the_last_time_counts() -> None:
    def sync(version: int, start_s: float) -> Span:
        return Span(rank=0, lane="MainThread", name="SYNC", start_s=start_s, end_s=start_s + 1,
                    args={"version": version})  # fmt: skip

    killed = [sync(0, 0.0), sync(1, 10.0), sync(2, 20.0), sync(3, 30.0)]
    resumed = [sync(1, 50.0), sync(2, 60.0), sync(3, 75.0)]
    assert step_spans(killed + resumed) == {1: (1.0, 11.0), 2: (51.0, 61.0), 3: (61.0, 76.0)}
    window = choose_window(killed + resumed, None)
    assert window.step_starts == {2: 0.0, 3: 10.0}
    assert window.title == "steps 2-3"


def test_innermost_spans_tile_the_time_of_the_outermost() -> None:
    def span(name: str, start_s: float, end_s: float) -> Span:
        return Span(rank=0, lane="MainThread", name=name, start_s=start_s, end_s=end_s)

    spans = [span("A", 1, 9), span("B", 2, 6), span("C", 3, 4), span("C", 4, 5), span("D", 6, 7)]
    parts = [
        (part.name, start, end) for part, start, end in visible_parts([*spans, span("E", 11, 12)])
    ]
    assert parts == [
        ("A", 1, 2),
        ("B", 2, 3),
        ("C", 3, 4),
        ("C", 4, 5),
        ("B", 5, 6),
        ("D", 6, 7),
        ("A", 7, 9),
        ("E", 11, 12),
    ]
    assert all(first[2] == second[1] for first, second in pairwise(parts[:-1]))


def test_colours_blend_from_end_to_end() -> None:
    scale = ("#000000", "#102030", "#FFFFFF")
    assert [blend(scale, at) for at in (0.0, 0.25, 0.5, 1.0)] == ["#000000", "#081018", "#102030", "#FFFFFF"]  # fmt: skip
