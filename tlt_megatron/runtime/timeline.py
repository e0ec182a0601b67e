"""Records spans of one rank's phases as it runs, and merges all ranks into one trace for
ui.perfetto.dev.

A time is the wall time, read once, plus the monotonic clock since then. So ranks of one machine
share a clock, and time never runs backwards. `align_clocks` shifts the ranks of other machines to
the clock of the first machine. The project's phases: ROLLOUT DECODE VERIFY REFRESH-DRAFTER IDLE
DRAFT-TRAIN PREEMPT SYNC VALUES LOGPROB CRITIC UPDATE REWARD CHECKPOINT EVAL WAIT.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from tlt_megatron.runtime.collectives import barrier, gather_objects
from tlt_megatron.runtime.durable import read_json_lines
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.status import RankStatus

_MAX_BUFFERED = 8192  # events; at this count a span flushes, so a long step cannot fill the memory
_NUM_CLOCK_MARKS = 5  # barriers; one late rank does not change their median


class Timeline:
    """Records spans of this rank, from any thread. With `path` None it records nothing.

    Example: `with timeline.span("ROLLOUT", batch=64): ...`. A span belongs to a lane, which is a
    row of the trace, by default its thread's own. Spans of one lane must nest, which `with` on one
    thread guarantees.
    """

    def __init__(self, path: Path | None, rank: int, status: RankStatus | None = None) -> None:
        """`status` is told of each span that the main thread begins with `span`."""
        self.path = path
        self.rank = rank
        self.status = status or RankStatus(rank=rank, num_ranks=1)
        self._events: deque[tuple[str, str, int, int, dict[str, object]]] = deque()
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._flush_lock = threading.Lock()
        self._is_closed = path is None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_torn_line(path)

    def span(self, name: str, /, *, lane: str = "", **args: object) -> AbstractContextManager[None]:
        """Record the time that the body takes.

        An exception from the body is recorded and re-raised.
        """
        return _Span(self, name, lane, args)

    def add_span(
        self, name: str, start_s: float, end_s: float, /, *, lane: str = "", **args: object
    ) -> None:
        """Record a finished span, with both times from `time.perf_counter`.

        It must nest in its lane like other spans.
        """
        start_ns = round(start_s * 1e9)
        self._add(name, lane, start_ns, round(end_s * 1e9) - start_ns, args)

    def now_s(self) -> float:
        """Return the time in seconds, on the clock that all ranks share after `align_clocks`."""
        return (time.perf_counter_ns() + self._offset_ns) * 1e-9

    def align_clocks(self, world: Group) -> None:
        """Shift this rank's times to the clock of rank 0's machine. A collective of `world`, before
        the first event.

        Ranks leave a barrier within a fraction of a millisecond, so their times then show the
        difference of the clocks.
        """
        marks: list[list[int]] = []
        for _ in range(_NUM_CLOCK_MARKS if world.size > 1 else 0):
            barrier(world)
            mark_ns = time.perf_counter_ns() + self._offset_ns
            marks.append(gather_objects(mark_ns, world))
        if marks:
            hosts = gather_objects(socket.gethostname(), world)
            self._offset_ns += clock_shift_ns(hosts, marks, world.rank)

    def flush(self) -> None:
        """Append the recorded events to the file. The trainer calls it once per RL step."""
        if self.path is None:
            return
        with self._flush_lock:
            lines = []
            while self._events:  # other threads may append: taken now or by the next flush
                name, lane, start_ns, dur_ns, args = self._events.popleft()
                event = {"ph": "X", "name": name, "lane": lane, "dur_ns": dur_ns, "args": args}
                event["start_ns"] = start_ns + self._offset_ns
                lines.append(json.dumps(event, default=str) + "\n")
            if lines:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))

    def close(self) -> None:
        """Flush. Later spans are not recorded."""
        self._is_closed = True
        self.flush()

    def _add(
        self, name: str, lane: str, start_ns: int, dur_ns: int, args: dict[str, object]
    ) -> None:
        if self._is_closed:
            return
        lane = lane or threading.current_thread().name
        self._events.append((name, lane, start_ns, dur_ns, args))
        if len(self._events) >= _MAX_BUFFERED:
            self.flush()


class _Span:
    """The context manager of one span.

    It is a class, because a generator costs several times as much.
    """

    __slots__ = ("args", "lane", "name", "outer", "start_ns", "timeline")

    def __init__(self, timeline: Timeline, name: str, lane: str, args: dict[str, object]) -> None:
        self.timeline = timeline
        self.name = name
        self.lane = lane
        self.args = args

    def __enter__(self) -> None:
        self.outer = self.timeline.status.enter(self.name)
        self.start_ns = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        dur_ns = time.perf_counter_ns() - self.start_ns
        if kind is None:
            self.timeline.status.leave(self.outer)
        else:  # it stays open: it failed
            self.args["error"] = kind.__name__
        self.timeline._add(self.name, self.lane, self.start_ns, dur_ns, self.args)


def clock_shift_ns(hosts: Sequence[str], marks: Sequence[Sequence[int]], rank: int) -> int:
    """Return what to add to the times of `rank`: the median over marks and rank pairs of (rank 0's
    host - its own host).

    `marks[m][r]` is the clock of rank r, on `hosts[r]`, at moment m, in nanoseconds.
    """
    if hosts[rank] == hosts[0]:
        return 0
    first = [r for r, host in enumerate(hosts) if host == hosts[0]]
    own = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return round(statistics.median(mark[a] - mark[b] for mark in marks for a in first for b in own))


def merge_timelines(run_dir: Path) -> Path:
    """Merge <run_dir>/timeline/rank_*.jsonl into <run_dir>/trace.json: a process per rank, a thread
    per lane.

    Lines cut short by a killed rank are counted and logged. ValueError if there is no timeline.
    """
    files = sorted((run_dir / "timeline").glob("rank_*.jsonl"))
    if not files:
        raise ValueError(f"{run_dir / 'timeline'}: must hold rank_*.jsonl of a run with a trace")
    ranks = {
        int(file.stem.removeprefix("rank_")): read_json_lines(file, "start_ns") for file in files
    }
    starts = [event["start_ns"] for events in ranks.values() for event in events]
    origin_ns = min(starts, default=0)
    trace: list[dict[str, Any]] = []
    for rank, events in ranks.items():
        trace += _rank_trace(rank, events, origin_ns)
    path = run_dir / "trace.json"
    temporary = path.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace, "displayTimeUnit": "ms"}, file)
    temporary.replace(path)
    return path


def _rank_trace(rank: int, events: list[dict[str, Any]], origin_ns: int) -> list[dict[str, Any]]:
    """Return the Chrome trace events of one rank, parents before their children.

    Start and end, not the length, are rounded down to whole microseconds: this keeps a child inside
    its parent.
    """
    lanes: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    # If two spans have the same start and length, the outer one ended last, so it was written last.
    order = sorted(
        range(len(events)), key=lambda i: (events[i]["start_ns"], -events[i]["dur_ns"], -i)
    )
    for index in order:
        event = events[index]
        start_ns = event["start_ns"] - origin_ns
        row = {
            "ph": "X",
            "name": event["name"],
            "cat": event["name"].partition("(")[0],
            "pid": rank,
            "tid": lanes.setdefault(event["lane"], len(lanes)),
            "ts": start_ns // 1000,
            "dur": (start_ns + event["dur_ns"]) // 1000 - start_ns // 1000,
            "args": event.get("args", {}),
        }
        rows.append(row)
    names = [_metadata("process_name", rank, 0, name=f"rank {rank}")]
    names.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for lane, tid in lanes.items():
        name = f"rank {rank}" if lane == threading.main_thread().name else lane
        names.append(_metadata("thread_name", rank, tid, name=name))
    return names + rows + _counters(rank, rows) + (_step_markers(rows) if rank == 0 else [])


def _counters(rank: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return counter events of the decode passes. A rollout ends with zeros."""
    names = ["running requests", "tokens/s"]
    if any("kv_tokens" in row["args"] for row in rows):
        names.append("KV tokens")
    counters = []
    for row in rows:
        ts, args = row["ts"], row["args"]
        if row["dur"] and "batch_size" in args and "committed" in args:
            speed = round(1e6 * args["committed"] / row["dur"])
            values = (args["batch_size"], speed, args.get("kv_tokens", 0))
        elif row["name"] == "ROLLOUT":
            ts, values = ts + row["dur"], (0, 0, 0)
        else:
            continue
        for name, value in zip(names, values, strict=False):
            counters.append({"ph": "C", "name": name, "pid": rank, "ts": ts, "args": {name: value}})
    return counters


def _step_markers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a marker where each RL step starts: the SYNC of the policy before it ends there, and
    its own SYNC follows.
    """
    syncs = [row for row in rows if row["name"] == "SYNC" and "version" in row["args"]]
    return [
        {"ph": "i", "s": "g", "cat": "step", "pid": 0, "tid": before["tid"], "args": {}}
        | {"name": f"step {own['args']['version']}", "ts": before["ts"] + before["dur"]}
        for before, own in pairwise(syncs)
    ]


def _metadata(name: str, rank: int, tid: int, /, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}


def _end_torn_line(path: Path) -> None:
    """End the last line of a killed rank with a newline, so that a resumed rank does not append its
    first event to it.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
