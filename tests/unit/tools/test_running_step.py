"""The step that is under way: what ranks do now, and the alarm of a run that has died."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path

from tests.unit.tools.test_report import make_run
from tlt_megatron.runtime.status import RankStatus
from tlt_megatron.trainer.saving.run_folder import LOCK_FILE
from tools.run_report.live import LiveRun
from tools.run_report.page import render_states
from tools.run_report.running import read_ranks, state_of_ranks

NOW = 1000.0


def rank_at(rank: int, phase: str, num_phases: int = 7, *, num_done: int = 4) -> RankStatus:
    """A rank of 3 in RL step 5, which began 60 s ago, in a phase that began 10 s ago."""
    return RankStatus(
        rank=rank,
        num_ranks=3,
        host=f"node{rank // 2}",
        changed_s=NOW - 10,
        step=5,
        step_began_s=NOW - 60,
        phases=tuple(phase.split()),
        phase_began_s=NOW - 10,
        num_phases=num_phases,
        num_responses=4,
        num_done=num_done,
        num_tokens=100 * num_done,
    )


RANKS = [rank_at(0, "WAIT DRAFT-TRAIN"), rank_at(1, "WAIT"), rank_at(2, "ROLLOUT", 5, num_done=1)]


def write(run_dir: Path, *ranks: RankStatus) -> None:
    (run_dir / "status").mkdir(exist_ok=True)
    for status in ranks:
        text = json.dumps(dataclasses.asdict(status))
        (run_dir / "status" / f"rank_{status.rank:05d}.json").write_text(text)


def test_the_page_shows_what_each_rank_does_now(tmp_path: Path) -> None:
    """The file of rank 3 is of an earlier run, which had more ranks."""
    write(tmp_path, *RANKS, dataclasses.replace(RANKS[0], rank=3, num_ranks=4))
    state = state_of_ranks(read_ranks(tmp_path), NOW, name="run", sentence="4 of 9 are done.")
    html = render_states([state])
    assert "<h2>Step 5 is under way</h2>" in html
    assert "60 s so far · 9 of 12 responses are done · 900 tokens in them" in html
    assert "<td>0 on node0</td><td>WAIT DRAFT-TRAIN</td><td>10 s</td>" in html
    assert "<td>2 on node1</td><td>ROLLOUT</td><td>10 s</td>" in html
    assert "<td>1 of 4</td><td>100</td>" in html
    assert html.count("<td>4 of 4</td>") == 2


def test_a_step_that_the_metrics_have_is_not_under_way(tmp_path: Path) -> None:
    """Files of ranks are up to a second older than the metrics, which `make_run` writes for 3
    steps.
    """
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    live = LiveRun(run_dir)
    titles = []
    for step in (3, 4):
        write(run_dir, *(dataclasses.replace(rank, step=step) for rank in RANKS))
        (state,) = live.states()
        assert state.sentence.startswith("3 of ")
        titles.append(state.title)
        assert ("s so far" in state.note) == (step == 4)
    assert titles == ["After step 3", "Step 4 is under way"]


def test_what_ranks_did_before_a_resume_is_not_shown(tmp_path: Path) -> None:
    """Otherwise a run that was killed and starts again seems to hang until its ranks write."""
    write(tmp_path, *RANKS)
    os.utime(tmp_path / "status" / "rank_00000.json", (NOW, NOW))
    os.utime(tmp_path / "status" / "rank_00002.json", (NOW, NOW))
    (tmp_path / LOCK_FILE).touch()
    os.utime(tmp_path / LOCK_FILE, (NOW + 1, NOW + 1))
    assert [status.rank for status in read_ranks(tmp_path)] == [1]


def test_of_1000_ranks_those_behind_get_a_row() -> None:
    ranks = [dataclasses.replace(RANKS[1], rank=rank, num_ranks=1000) for rank in range(1000)]
    ranks[700] = dataclasses.replace(RANKS[2], rank=700, num_ranks=1000)
    ranks[800] = dataclasses.replace(RANKS[2], rank=800, num_ranks=1000, num_done=3)
    state = state_of_ranks(ranks, NOW, name="run", sentence="")
    assert [rank.rank for rank in state.ranks] == [700, 800, 0, 1, 2, 3, 4, 5]
    assert state.note.endswith("· WAIT: 998 · ROLLOUT: 2")


def test_a_run_that_died_is_told_from_one_that_ended_and_one_that_cannot_be_seen(
    tmp_path: Path,
) -> None:
    """No process holds the lock. On another host that cannot be known."""
    run_dir = make_run(tmp_path / "run")
    lock, summary = run_dir / "lock", run_dir / "summary.json"
    lock.write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "started": ""}))
    write(run_dir, *RANKS)
    live = LiveRun(run_dir)
    os.utime(summary, (time.time() - 100, time.time() - 100))  # a run before the newest wrote it
    (died,) = live.states()
    assert died.alarm.startswith("The run has ended without a summary: its process is gone.")
    assert not died.title
    assert 'role="alert"><li>The run has ended without' in live.page([])
    os.utime(summary)
    (ended,) = live.states()
    assert (ended.alarm, ended.title) == ("", "")
    assert ended.sentence.startswith("The run has ended. 3 of ")
    summary.unlink()
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": ""}))
    write(run_dir, *RANKS)
    (unseen,) = live.states()
    assert unseen.alarm == ""
    assert unseen.title
