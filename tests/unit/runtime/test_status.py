"""What a rank does now, as another process reads it."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.rollout.phases import Phases
from tlt_megatron.runtime.device import select_device
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.status import RankStatus, StatusWriter
from tlt_megatron.runtime.timeline import Timeline


def make_phases(run_dir: Path) -> tuple[Phases, StatusWriter]:
    """Rank 3, with a writer of its status."""
    timeline = Timeline(None, 3, RankStatus(rank=3, num_ranks=8))
    writer = StatusWriter(run_dir, timeline.status)
    progress = Progress("none", 1)
    return Phases(timeline, progress, select_device("cpu"), lambda: None), writer


def read(run_dir: Path) -> RankStatus:
    return RankStatus(**json.loads((run_dir / "status" / "rank_00003.json").read_text()))


def test_the_last_status_names_the_phase_that_failed_and_the_responses_so_far(
    tmp_path: Path,
) -> None:
    phases, writer = make_phases(tmp_path)
    status = phases.timeline.status
    status.begin_step(5)

    def fail() -> None:
        with phases("EVAL", "testing"), phases("ROLLOUT", "gen"):
            status.expect_responses(4)
            status.add_response(7)
            status.add_response(5)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    writer.close()
    found = read(tmp_path)
    assert (found.rank, found.num_ranks, found.step, found.num_phases) == (3, 8, 5, 2)
    assert list(found.phases) == ["EVAL", "ROLLOUT"]
    assert (found.num_responses, found.num_done, found.num_tokens) == (4, 2, 12)
    assert found.step_began_s is not None
    assert found.step_began_s <= found.phase_began_s <= found.changed_s
    assert [path.name for path in (tmp_path / "status").iterdir()] == ["rank_00003.json"]


def test_phases_that_a_stop_ended_are_forgotten_and_other_threads_have_none(
    tmp_path: Path,
) -> None:
    phases, writer = make_phases(tmp_path)
    with pytest.raises(GenerationStopped), phases("ROLLOUT", "gen"):
        raise GenerationStopped
    with phases("WAIT", "wait"):
        with phases.timeline.span("DRAFT-TRAIN"):
            assert phases.timeline.status.phases == ("WAIT", "DRAFT-TRAIN")
            other = threading.Thread(target=phases.timeline.status.enter, args=("OTHER",))
            other.start()
            other.join()
        assert phases.timeline.status.phases == ("WAIT",)
    phases.timeline.status.end_step()
    writer.close()
    found = read(tmp_path)
    assert list(found.phases) == []
    assert found.step_began_s is None
    assert found.num_phases == 2


def test_a_run_goes_on_if_its_status_cannot_be_written_and_writes_it_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_megatron.runtime.status._INTERVAL_S", 0.01)
    monkeypatch.setattr("tlt_megatron.runtime.status._WRITES_PER_S", 1000)
    (tmp_path / "status").touch()  # no folder can be made
    with caplog.at_level(logging.WARNING):
        phases, writer = make_phases(tmp_path)
        while not caplog.records:
            time.sleep(0.01)
        (tmp_path / "status").unlink()
        phases.timeline.status.begin_step(5)
        writer.close()
    assert "rank_00003.json: cannot write the status of this rank" in caplog.text
    assert len(caplog.records) == 1
    assert read(tmp_path).step == 5
