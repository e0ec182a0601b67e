"""What each rank does in the step that is under way, and why a run has ended early."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_megatron.runtime.status import RankStatus
from tlt_megatron.saved_files import errors_named, parse_object
from tlt_megatron.trainer.saving.run_folder import LOCK_FILE, owner_has_ended
from tools.run_report.data import RunData
from tools.run_report.files import read_text

NUM_ROWS = 8  # ranks that get a row: those that are furthest behind
_LOG_BYTES = 1 << 18  # only the end of a rank's log is read
_ENDS = re.compile(  # what a rank writes when the run ends early
    r"^(?P<time>[\d: -]{19}) rank \d+ (?:ERROR launch\.pretrain_rl: (?P<error>.*)"
    r"|WARNING tlt_megatron\.runtime\.stop: (?P<end>.*the run ends.*))$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the page of a run says between two changes of its metrics."""

    name: str
    sentence: str
    alarm: str = ""
    title: str = ""  # names the step under way; "": the run has ended, or no rank has a status
    note: str = ""
    ranks: Sequence[RankStatus] = ()  # those that get a row
    now_s: float = 0.0


def read_state(run_dir: Path, run: RunData) -> State:
    """Return the state of the run, whose newest data is `run`. ValueError for a broken status."""
    ranks = read_ranks(run_dir)
    steps, _ = run.series("timing_s/step")
    last_done = steps[-1] if steps else 0
    num_steps = run.config.get("run", {}).get("num_steps", "?")
    done = f"{last_done} of {num_steps} RL steps are done."
    if is_over(run_dir):
        return State(name=run.name, sentence=f"The run has ended. {done}")
    if alarm := describe_end(run_dir):
        return State(name=run.name, sentence=done, alarm=alarm)
    sentence = done if steps else f"The run is starting. {done}"
    return state_of_ranks(ranks, time.time(), last_done, name=run.name, sentence=sentence)


def state_of_ranks(
    ranks: Sequence[RankStatus], now_s: float, last_done: int = 0, *, name: str, sentence: str
) -> State:
    """Return what ranks, in order, do at `now_s`: seconds, responses and tokens so far, and how
    many are in each phase.

    Their files may be older than the metrics: RL step `last_done` is not under way any more.
    """
    if not ranks:
        return State(name=name, sentence=sentence)
    step, parts = max(last_done, *(rank.step for rank in ranks)), []
    starts = [r.step_began_s for r in ranks if r.step_began_s and r.step > last_done]
    if starts:
        parts.append(f"{now_s - min(starts):,.0f} s so far")
    if num_responses := sum(rank.num_responses for rank in ranks):
        num_done = sum(rank.num_done for rank in ranks)
        parts.append(f"{num_done:,} of {num_responses:,} responses are done")
        parts.append(f"{sum(rank.num_tokens for rank in ranks):,} tokens in them")
    counts = Counter(rank.phase for rank in ranks)
    parts += [f"{phase}: {count:,}" for phase, count in counts.most_common()]
    between = f"After step {step}" if step else "Before step 1"
    if len(ranks) > NUM_ROWS:
        ranks = sorted(ranks, key=lambda r: (r.num_phases, r.num_done - r.num_responses))
    return State(
        name=name,
        sentence=sentence,
        title=f"Step {step} is under way" if starts else between,
        note=" · ".join(parts),
        ranks=ranks[:NUM_ROWS],
        now_s=now_s,
    )


def read_ranks(run_dir: Path) -> list[RankStatus]:
    """Return the status of each rank, in order; [] of a run that has written none.

    ValueError names a file that is no status.

    Files older than the lock are of an earlier run in the folder: ranks of this one have not
    written yet.
    """
    found, lock = [], run_dir / LOCK_FILE
    began_ns = lock.stat().st_mtime_ns if lock.exists() else 0
    for path in sorted((run_dir / "status").glob("rank_*.json")):
        if path.stat().st_mtime_ns >= began_ns:
            with errors_named(path):
                found.append(RankStatus(**parse_object(path, read_text(path))))
    # a folder without a lock may hold those of an earlier run, which had more ranks
    return [status for status in found if status.num_ranks == found[0].num_ranks]


def is_over(run_dir: Path) -> bool:
    """Return whether the newest run in the folder has written its summary, its last file."""
    summary, lock = run_dir / "summary.json", run_dir / LOCK_FILE
    return summary.exists() and (
        not lock.exists() or summary.stat().st_mtime_ns >= lock.stat().st_mtime_ns
    )


def describe_end(run_dir: Path) -> str:
    """Return why the newest run in the folder ended without a summary; "" if it has one, or may
    still run.
    """
    if is_over(run_dir):
        return ""
    if failure := _failure_of(run_dir):
        return f"The run has failed: {failure}"
    if not owner_has_ended(run_dir):
        return ""
    return (
        "The run has ended without a summary: its process is gone. logs/node_*/rank_*.log has the"
        " reason."
    )


def _failure_of(run_dir: Path) -> str:
    """Return what the terminal said when the run failed; "" if no rank has written that."""
    lock, started = run_dir / LOCK_FILE, ""
    with contextlib.suppress(ValueError):  # a launcher was killed while it wrote
        started = str(parse_object(lock, read_text(lock)).get("started", ""))
    ends = [
        (end["error"] is None, end["time"], end["error"] or end["end"])
        for path in sorted((run_dir / "logs").rglob("rank_*.log"))[:NUM_ROWS]
        for end in _ENDS.finditer(read_text(path, _LOG_BYTES))
        if end["time"] >= started
    ]
    return min(ends)[2] if ends else ""
