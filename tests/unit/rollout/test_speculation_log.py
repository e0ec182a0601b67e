"""Passes as spans and as rows: nothing lost, nothing counted twice, and whole after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.rollout.speculation_log import (
    SpeculationLog,
    add_pass_spans,
    sum_passes,
)
from tlt_megatron.runtime.timeline import Timeline, merge_timelines


def make_pass(
    start_s: float,
    batch_size: int,
    strategy: str,
    *,
    accepted: tuple[int, ...] = (),
    reason: str = "exploit",
    seconds: float = 0.25,
) -> PassRecord:
    return PassRecord(
        start_s=start_s,
        seconds=seconds,
        batch_size=batch_size,
        strategy=strategy,
        reason=reason,
        num_committed=batch_size + sum(accepted),
        accepted_by_depth=accepted,
    )


PASSES = (
    make_pass(10.0, 4, "off", reason="first"),
    make_pass(10.25, 4, "off"),
    make_pass(10.5, 4, "2_1_2", accepted=(3, 1)),
    make_pass(10.75, 2, "2_1_2", accepted=(2, 2)),
    make_pass(11.0, 2, "2_1_2", accepted=(1, 0), reason="explore"),
    make_pass(11.5, 4, "off"),
)


def spans_of(passes: tuple[PassRecord, ...], folder: Path) -> list[dict[str, Any]]:
    timeline = Timeline(folder / "timeline" / "rank_00000.jsonl", 0)
    add_pass_spans(timeline, passes)
    timeline.close()
    events = json.loads(merge_timelines(folder).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_a_run_of_equal_decisions_is_one_span(tmp_path: Path) -> None:
    spans = spans_of(PASSES, tmp_path)
    shape = [(span["name"], span["args"]["batch_size"], span["args"]["passes"]) for span in spans]
    assert shape == [("DECODE", 4, 2), ("VERIFY(2_1_2)", 4, 1), ("VERIFY(2_1_2)", 2, 2), ("DECODE", 4, 1)]  # fmt: skip
    assert [span["args"]["committed"] for span in spans] == [8, 8, 9, 4]
    reasons = ["first, exploit", "exploit", "exploit, explore", "exploit"]
    assert [span["args"]["reason"] for span in spans] == reasons
    starts = [span["ts"] - spans[0]["ts"] for span in spans]
    assert starts == [0, 500_000, 750_000, 1_500_000]
    assert [span["dur"] for span in spans] == [500_000, 250_000, 500_000, 250_000]


def test_a_pass_whose_seconds_round_past_the_next_start_does_not_overlap(tmp_path: Path) -> None:
    late = make_pass(10.0, 4, "off", seconds=0.2500021)
    first, second = spans_of((late, make_pass(10.25, 1, "off")), tmp_path)
    assert first["ts"] + first["dur"] == second["ts"]


def test_rows_hold_every_pass_once() -> None:
    totals = sum_passes(PASSES, step=7, rank=3)
    assert {(total.step, total.rank) for total in totals} == {(7, 3)}
    assert [
        (t.strategy, t.batch_size, t.passes, t.seconds, t.committed, t.accepted_by_depth, t.reasons)
        for t in totals
    ] == [
        ("2_1_2", 4, 1, 0.25, 8, (3, 1), {"exploit": 1}),
        ("off", 4, 3, 0.75, 12, (), {"first": 1, "exploit": 2}),
        ("2_1_2", 2, 2, 0.5, 9, (3, 2), {"exploit": 1, "explore": 1}),
    ]
    assert sum(row.committed for row in totals) == sum(p.num_committed for p in PASSES)


@pytest.mark.parametrize("resume_step, kept", [(2, [1]), (3, [1, 2]), (None, [])])
def test_no_step_is_there_twice_after_a_resume(
    tmp_path: Path, resume_step: int | None, kept: list[int]
) -> None:
    killed = SpeculationLog(tmp_path / "speculation", rank=1)
    for step in (1, 2):
        killed.write(sum_passes(PASSES[:1], step=step, rank=0))
    with killed.path.open("a") as file:
        file.write('{"step": 3, "ra')
    resumed = SpeculationLog(tmp_path / "speculation", rank=1)
    SpeculationLog(tmp_path / "speculation", rank=0).begin(resume_step)  # it cuts all ranks' files
    resumed.write(sum_passes(PASSES[:1], step=9, rank=0))
    rows = [json.loads(line) for line in resumed.path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*kept, 9]
    assert (tmp_path / "speculation.1").exists() == (resume_step is None)
