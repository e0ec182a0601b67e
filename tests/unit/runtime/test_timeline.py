"""Timelines of ranks and their merge: complete, nested as they ran, and whole after a kill."""

from __future__ import annotations

import json
import logging
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tlt_megatron.runtime.timeline import Timeline, merge_timelines


def open_timeline(run_dir: Path, rank: int = 0) -> Timeline:
    return Timeline(run_dir / "timeline" / f"rank_{rank:05d}.jsonl", rank)


def merged(run_dir: Path) -> list[dict[str, Any]]:
    path = merge_timelines(run_dir)
    assert path == run_dir / "trace.json"
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def spans(events: list[dict[str, Any]], rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Replay each lane with a stack, as viewers do: a span lies inside the one that is open, or
    after it.
    """
    stacks: dict[tuple[int, int], list[int]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        ends = stacks.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], f"{event} overruns the span that ends at {ends[-1]}"
        ends.append(end)


def write_events(run_dir: Path, rows: list[tuple[str, int, int]], rank: int = 0) -> None:
    """(name, start_ns, end_ns) in the order in which the spans end."""
    path = run_dir / "timeline" / f"rank_{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"ph": "X", "name": name, "lane": "main", "start_ns": start, "dur_ns": end - start}
        for name, start, end in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_nested_spans_nest_in_the_trace(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    for step in range(20):
        with timeline.span("ROLLOUT", step=step):
            for batch in (8, 4):
                with timeline.span("DECODE", batch=batch), timeline.span("VERIFY"):
                    pass
        with timeline.span("UPDATE"):
            pass
    timeline.close()
    events = merged(tmp_path)
    for event in spans(events):
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
    names = [event["name"] for event in spans(events)]
    assert names == ["ROLLOUT", "DECODE", "VERIFY", "DECODE", "VERIFY", "UPDATE"] * 20
    assert_nested(events)
    assert spans(events)[0]["args"] == {"step": 0}
    assert spans(events)[1]["args"] == {"batch": 8}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Rounded apart, starts and lengths would let the child end at 2 + 2 = 4 us, its parent at 1
        # + 2 = 3 us.
        (
            [("first", 0, 0), ("child", 1_900, 3_400), ("parent", 1_400, 3_400)],
            [("first", 0, 0), ("parent", 1, 2), ("child", 1, 2)],
        ),
        # Of two equal spans the one that ended last is the parent.
        ([("inner", 5_000, 9_000), ("outer", 5_000, 9_000)], [("outer", 0, 4), ("inner", 0, 4)]),
    ],
)
def test_whole_microseconds_keep_children_inside_their_parents(
    tmp_path: Path, rows: list[tuple[str, int, int]], expected: list[tuple[str, int, int]]
) -> None:
    write_events(tmp_path, rows)
    found = [(span["name"], span["ts"], span["dur"]) for span in spans(merged(tmp_path))]
    assert found == expected


def test_every_rank_is_a_named_process_and_every_lane_a_named_thread(tmp_path: Path) -> None:
    def preempt(timeline: Timeline) -> None:
        with timeline.span("PREEMPT", reason="stop"):
            pass

    for rank in (0, 1, 10):
        timeline = open_timeline(tmp_path, rank)
        with timeline.span("ROLLOUT"):
            thread = threading.Thread(target=preempt, args=(timeline,), name="spot")
            thread.start()
            thread.join()
        timeline.close()
    events = merged(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 10: "rank 10"}
    lanes = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    assert len(set(lanes)) == 6
    for rank in (0, 1, 10):
        outer, inner = spans(events, rank)
        assert outer["tid"] == lanes[rank, f"rank {rank}"] != lanes[rank, "spot"] == inner["tid"]
        assert inner["args"] == {"reason": "stop"}
        assert outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]


def test_times_start_at_the_first_event_of_any_rank_and_keep_their_distances(
    tmp_path: Path,
) -> None:
    base = 1_700_000_000_000_000_000
    write_events(tmp_path, [("WAIT", base + 2_000_000, base + 5_000_000)], rank=0)
    write_events(tmp_path, [("SYNC", base, base + 1_000_000)], rank=1)
    events = merged(tmp_path)
    assert [(e["ts"], e["dur"]) for e in spans(events, 0)] == [(2000, 3000)]
    assert [(e["ts"], e["dur"]) for e in spans(events, 1)] == [(0, 1000)]


def test_threads_lose_nothing_while_another_flushes(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)

    def work() -> None:
        for index in range(2000):
            with timeline.span("REWARD", index=index):
                pass

    threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.flush()
    timeline.close()
    events = merged(tmp_path)
    assert_nested(events)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {f"worker {n}" for n in range(4)}
    for tid in lanes:
        indices = [e["args"]["index"] for e in spans(events) if e["tid"] == tid]
        assert indices == list(range(2000))


def test_a_long_step_is_flushed_before_it_ends(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    for _ in range(10_000):
        with timeline.span("DECODE"):
            pass
    assert len(timeline.path.read_text(encoding="utf-8").splitlines()) > 5_000
    timeline.close()
    assert len(spans(merged(tmp_path))) == 10_000


def test_an_exception_is_noted_and_passes_on(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    with pytest.raises(KeyError), timeline.span("UPDATE"):
        raise KeyError("x")
    timeline.close()
    assert [event["args"] for event in spans(merged(tmp_path))] == [{"error": "KeyError"}]


def test_a_torn_line_costs_itself_alone_also_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = open_timeline(tmp_path)
    with timeline.span("EVAL"):
        pass
    timeline.close()
    with timeline.path.open("a", encoding="utf-8") as file:
        file.write('{"ph": "X", "name": "DEC')
    with caplog.at_level(logging.WARNING):
        assert [event["name"] for event in spans(merged(tmp_path))] == ["EVAL"]
    assert "rank_00000.jsonl: left out 1 lines that are no rows" in caplog.text
    resumed = open_timeline(tmp_path)
    with resumed.span("SYNC"):
        pass
    resumed.close()
    events = spans(merged(tmp_path))
    assert [event["name"] for event in events] == ["EVAL", "SYNC"]
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(events))


def test_spans_added_afterwards_nest_in_the_span_that_encloses_them(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    with timeline.span("ROLLOUT"):
        times = [time.perf_counter() for _ in range(1001)]
        for number, (start_s, end_s) in enumerate(pairwise(times)):
            timeline.add_span("DECODE", start_s, end_s, batch_size=number)
    timeline.close()
    timeline.add_span("EVAL", times[0], times[1])
    events = merged(tmp_path)
    assert_nested(events)
    rollout, *inner = spans(events)
    assert rollout["name"] == "ROLLOUT"
    assert [e["args"]["batch_size"] for e in inner] == list(range(1000))
    assert not any(event["name"] == "EVAL" for event in events)


def test_merging_a_run_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timeline: must hold rank_\*\.jsonl"):
        merge_timelines(tmp_path)
