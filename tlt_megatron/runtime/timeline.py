"""Records spans of one rank's phases as it runs, and merges all ranks into one trace for
ui.perfetto.dev.

A time is the wall time, read once, plus the monotonic clock since then. So time never runs
backwards, and ranks agree on it as far as the clocks of their machines do. The project's phases:
ROLLOUT DECODE VERIFY REFRESH-DRAFTER IDLE DRAFT-TRAIN PREEMPT SYNC PLAN VALUES LOGPROB CRITIC
UPDATE REWARD CHECKPOINT EVAL WAIT GAIN SETUP.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlt_megatron.runtime.durable import read_json_lines, replace_text
from tlt_megatron.runtime.status import RankStatus

_MAX_BUFFERED = 8192  # events; at this count a span flushes, so a long step cannot fill the memory


class Timeline:
    """Records spans of this rank, from any thread. With `path` None it records nothing.

    Example: `with timeline.span("ROLLOUT", batch=64): ...`. A span belongs to the lane of its
    thread, which is a row of the trace. Spans of one lane must nest, which `with` guarantees.
    """

    def __init__(self, path: Path | None, rank: int, status: RankStatus | None = None) -> None:
        """`status` is told of each span that the main thread begins with `span`."""
        self.path = path
        self.status = status or RankStatus(rank=rank, num_ranks=1)
        self._events: deque[dict[str, object]] = deque()
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._flush_lock = threading.Lock()
        self._is_closed = path is None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():  # a killed run may have torn its last line
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")

    @contextmanager
    def span(self, name: str, /, **args: object) -> Iterator[None]:
        """Record the time that the body takes.

        An exception from the body is recorded and re-raised. The status keeps the phase that
        failed.
        """
        outer = self.status.enter(name)
        start_ns = time.perf_counter_ns()
        try:
            yield
            self.status.leave(outer)
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self._add(name, start_ns, time.perf_counter_ns() - start_ns, args)

    def add_span(self, name: str, start_s: float, end_s: float, /, **args: object) -> None:
        """Record a finished span of this thread, with both times from `time.perf_counter`.

        It must nest in its lane like other spans.
        """
        start_ns = round(start_s * 1e9)
        self._add(name, start_ns, round(end_s * 1e9) - start_ns, args)

    def now_s(self) -> float:
        """Return the time in seconds, on the clock that the ranks share."""
        return (time.perf_counter_ns() + self._offset_ns) * 1e-9

    def flush(self) -> None:
        """Append the recorded events to the file. The trainer calls it once per RL step."""
        if self.path is None:
            return
        with self._flush_lock:
            lines = []
            while self._events:  # other threads may append: taken now or by the next flush
                lines.append(json.dumps(self._events.popleft(), default=str) + "\n")
            if lines:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))

    def close(self) -> None:
        """Flush. Later spans are not recorded."""
        self._is_closed = True
        self.flush()

    def _add(self, name: str, start_ns: int, dur_ns: int, args: dict[str, object]) -> None:
        if self._is_closed:
            return
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "lane": threading.current_thread().name,
                "start_ns": start_ns + self._offset_ns,
                "dur_ns": dur_ns,
                "args": args,
            }
        )
        if len(self._events) >= _MAX_BUFFERED:
            self.flush()


def merge_timelines(run_dir: Path) -> Path:
    """Merge <run_dir>/timeline/rank_*.jsonl into <run_dir>/trace.json: a process per rank, a thread
    per lane.

    Lines cut short by a killed rank are counted and logged. ValueError if there is no timeline.
    """
    files = sorted((run_dir / "timeline").glob("rank_*.jsonl"))
    if not files:
        raise ValueError(f"{run_dir / 'timeline'}: must hold rank_*.jsonl of a run with a trace")
    ranks = {
        int(file.stem.removeprefix("rank_")): read_json_lines(file, _is_span) for file in files
    }
    origin_ns = min((event["start_ns"] for events in ranks.values() for event in events), default=0)
    trace = [row for rank, events in ranks.items() for row in _rank_trace(rank, events, origin_ns)]
    path = run_dir / "trace.json"
    replace_text(path, json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
    return path


def _is_span(row: Mapping[str, object]) -> bool:
    """Return whether an object is a row that `Timeline` wrote."""
    kinds = {"start_ns": int, "dur_ns": int, "name": str, "lane": str}
    args = row.get("args", {})
    return all(type(row.get(n)) is kind for n, kind in kinds.items()) and isinstance(args, dict)


def _rank_trace(rank: int, events: list[dict[str, Any]], origin_ns: int) -> list[dict[str, Any]]:
    """Return the Chrome trace events of one rank, parents before their children.

    Start and end, not the length, are rounded down to whole microseconds: this keeps a child inside
    its parent.
    """
    lanes: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    # If two spans have the same start and length, the outer one ended last, so it was written last.
    events.reverse()
    for event in sorted(events, key=lambda e: (e["start_ns"], -e["dur_ns"])):
        start_ns = event["start_ns"] - origin_ns
        row = {
            "ph": "X",
            "name": event["name"],
            "pid": rank,
            "tid": lanes.setdefault(event["lane"], len(lanes)),
            "ts": start_ns // 1000,
            "dur": (start_ns + event["dur_ns"]) // 1000 - start_ns // 1000,
            "args": event.get("args", {}),
        }
        rows.append(row)
    names = [_metadata("process_name", rank, 0, name=f"rank {rank}")]
    for lane, tid in lanes.items():
        name = f"rank {rank}" if lane == threading.main_thread().name else lane
        names.append(_metadata("thread_name", rank, tid, name=name))
    return names + rows


def _metadata(name: str, rank: int, tid: int, /, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}
