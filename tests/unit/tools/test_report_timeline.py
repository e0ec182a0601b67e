"""The timeline of the report: steps, and the innermost span at any time."""

from __future__ import annotations

from itertools import pairwise

from tools.run_report.data import Span
from tools.run_report.timeline import bars_of, choose_window, spans_in, step_times, visible_parts


def span(name: str, start_s: float, end_s: float, **args: int) -> Span:
    return Span(rank=0, thread="rank 0", name=name, start_s=start_s, end_s=end_s, args=args)


def sync(version: int, start_s: float) -> Span:
    return span("SYNC", start_s, start_s + 1, version=version)


def test_of_a_step_that_was_done_again_the_last_time_counts() -> None:
    killed = [sync(0, 0.0), sync(1, 10.0), sync(2, 20.0), sync(3, 30.0)]
    resumed = [sync(1, 50.0), sync(2, 60.0), sync(3, 75.0)]
    assert step_times(killed + resumed) == {1: (1.0, 11.0), 2: (51.0, 61.0), 3: (61.0, 76.0)}
    window = choose_window(killed + resumed, None)
    assert window.step_starts == {2: 0.0, 3: 10.0}
    assert window.title == "steps 2-3"


def test_innermost_spans_tile_the_time_of_the_outermost() -> None:
    spans = [span("A", 1, 9), span("B", 2, 6), span("C", 3, 4), span("C", 4, 5), span("D", 6, 7)]
    parts = [
        (part.name, part.start_s, part.end_s) for part in visible_parts([*spans, span("E", 11, 12)])
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


def test_a_bar_too_narrow_to_see_joins_its_neighbour_of_the_same_name() -> None:
    """A window of 4,000 s: bars narrower than 1 s join, here the three passes that touch."""
    narrow = [span("DECODE", at, at + 0.5, batch_size=4) for at in (100.0, 100.5, 101.0, 200.0)]
    window = choose_window([sync(0, -1.0), sync(1, 3999.0)], None)
    bars = bars_of(spans_in(narrow, window), window)
    assert [(bar.start_s, bar.end_s) for bar in bars] == [(100.0, 101.5), (200.0, 200.5)]
    assert bars[0].args == {"joined spans": 3}
