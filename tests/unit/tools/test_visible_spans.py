"""The timeline of the report: steps, the innermost span at any time, and a few of 1,000 ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.tools.test_report import figures as figures_of
from tools.run_report.live import LiveRun
from tools.run_report.rank_panel import bars_of, spans_in
from tools.run_report.trace import RankTrace, Span, Trace, Window


def span(name: str, start_s: float, end_s: float, **args: int) -> Span:
    return Span(rank=0, row="rank 0", name=name, start_s=start_s, end_s=end_s, args=args)


def append(folder: Path, rank: int, spans: list[Span]) -> None:
    """Append spans to the file of a rank, as `Timeline` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank_{rank:05d}.jsonl").open("a") as file:
        for each in spans:
            times = round(each.start_s * 1e9), round((each.end_s - each.start_s) * 1e9)
            event = {"ph": "X", "name": each.name, "lane": "MainThread", "dur_ns": times[1]}
            event |= {"args": each.args, "start_ns": times[0]}
            file.write(json.dumps(event) + "\n")


def sync(version: int, start_s: float) -> Span:
    return span("SYNC", start_s, start_s + 1, version=version)


def test_of_a_step_that_was_done_again_the_last_time_counts(tmp_path: Path) -> None:
    killed = [sync(0, 0.0), sync(1, 10.0), sync(2, 20.0), sync(3, 30.0)]
    resumed = [sync(1, 50.0), sync(2, 60.0), sync(3, 75.0)]
    append(tmp_path, 0, killed + resumed)
    trace = Trace(tmp_path)
    trace.scan()
    times = trace.ranks[0].steps
    seconds = {step: (time.start_ns / 1e9, time.end_ns / 1e9) for step, time in times.items()}
    assert seconds == {1: (1.0, 11.0), 2: (51.0, 61.0), 3: (61.0, 76.0)}
    window = trace.window(None)
    assert window.step_starts == {2: 0.0, 3: 10.0}
    assert window.title == "steps 2-3"


def test_a_bar_too_narrow_to_see_joins_its_neighbour_of_the_same_name() -> None:
    """A window of 4,000 s: bars narrower than 1 s join, here the three passes that touch."""
    narrow = [span("DECODE", at, at + 0.5, batch_size=4) for at in (100.0, 100.5, 101.0, 200.0)]
    window = Window(start_ns=0, width_s=4000.0, step_starts={1: 0.0})
    bars = bars_of(spans_in(narrow, window), window)
    assert [(bar.start_s, bar.end_s) for bar in bars] == [(100.0, 101.5), (200.0, 200.5)]
    assert bars[0].args == {"joined spans": 3}


def write_ranks(folder: Path, step: int) -> None:
    """A step of 10 s on 1000 ranks: rank r decodes for 1 + r / 250 s in 5 passes, and then
    waits.
    """
    for rank in range(1000):
        start = 10.0 * step
        end = start + 1 + rank / 250
        times = [start + i * (end - start) / 5 for i in range(6)]
        passes = [span("DECODE", *pair, batch_size=5, committed=9) for pair in pairwise(times)]
        rest = [span("ROLLOUT", start, end), span("WAIT", end, start + 9), sync(step, start + 9)]
        append(folder, rank, passes + rest)


def test_a_run_of_1000_ranks_is_shown_by_a_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is scanned once; the page does not grow with the number of ranks."""
    folder = tmp_path / "timeline"
    for rank in range(1000):
        append(folder, rank, [sync(0, 9.0)])
    write_ranks(folder, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 10.0}\n')
    append(folder, 1000, [sync(-9, 0.0)])  # an earlier run had more ranks
    live = LiveRun(tmp_path)
    assert "What 8 of 1,000 ranks did in step 1" in live.page([])
    scanned: list[int] = []
    scan = RankTrace.scan

    def count(rank: RankTrace) -> None:
        before = rank.size
        scan(rank)
        scanned.append(rank.size - before)

    monkeypatch.setattr(RankTrace, "scan", count)
    size = sum(path.stat().st_size for path in folder.iterdir())
    write_ranks(folder, 2)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "timing_s/step": 10.0}\n')
    page = live.page([])
    assert sum(scanned) == sum(path.stat().st_size for path in folder.iterdir()) - size
    figures = figures_of(page)
    data = figures["timeline"]["data"]
    rows = {name for trace in data if trace["type"] == "bar" for name in trace["y"]}
    assert rows == {f"rank {rank}" for rank in (0, 1, 2, 499, 500, 997, 998, 999)}
    names = {trace["name"] for trace in data if trace["type"] == "scatter"}
    assert names == {f"running on {row}" for row in rows}
    assert sum(map(len, (json.dumps(figure) for figure in figures.values()))) < 400_000
