"""`tools/gpu_check.py`: what hangs, crashes, fails or is missing is a row, and the other items run.
tests/e2e runs its own items.
"""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from tests.tiny_task import REPO, python
from tlt_megatron.engines.embedded.graph_plan import GraphKey
from tools import gpu_check
from tools.gpu.decoding import kernel_figures, replayed_graph
from tools.gpu.suites import read_junit

PLANTED = """
import ctypes, os, subprocess, sys, time


def hang(machine):
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
    yield {"rank": rank.pid, "sizes": {"a": 1}}
    time.sleep(99)


def crash(machine):
    yield {"before": 2}
    ctypes.string_at(0)


def fail(machine):
    yield {"sizes": {"a": 1}}
    yield {"sizes": {"b": 2}}
    raise ValueError("a | b\\nc")


def missing(machine):
    import no_such_package

    yield {}


def brought(machine):
    import a_wheel

    yield {"value": a_wheel.VALUE}
"""


def rows_of(out: Path) -> dict[str, dict]:
    _, *rows = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {row["item"]: row for row in rows}


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    (folder / "planted_items.py").write_text(PLANTED)
    given = ["--device", "cpu", "--out", f"{folder}/out", "--scratch", f"{folder}/scratch"]
    words = (REPO / "tools/gpu_check.py", *given, *arguments)
    return python(*words, cwd=folder, PYTHONPATH=str(folder))


def test_hangs_crashes_and_failures_are_rows(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a_wheel-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_wheel.py", "VALUE = 7")
    (tmp_path / "bad.whl").write_text("no zip")
    names = ["hang:3", "crash:100", "fail:100", "missing:100", "brought:100"]
    also = [f"planted_items:{name}" for name in names]
    done = check(tmp_path, "--wheels", str(tmp_path), "--stage", "also", "--also", *also)
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path / "out")
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {
        "a_wheel-1-py3-none-any.whl": "ok",
        "bad.whl": "failed",
        "hang": "hung",
        "crash": "crashed",
        "fail": "failed",
        "missing": "missing",
        "brought": "ok",
    }
    rank = Path(f"/proc/{rows['hang']['figures']['rank']}/cmdline")
    assert not rank.exists() or not rank.read_bytes()  # gone, or not yet waited for
    assert rows["crash"] | {"seconds": 0} == {
        "stage": "also", "item": "crash", "seconds": 0, "status": "crashed",
        "error": "exit code -11", "figures": {"before": 2},
    }  # fmt: skip
    assert rows["fail"]["figures"] == {"sizes": {"a": 1, "b": 2}}
    assert rows["missing"]["error"] == "No module named 'no_such_package'"
    assert rows["brought"]["figures"] == {"value": 7}
    table = (tmp_path / "out" / "table.md").read_text()
    assert table == done.stdout[-len(table) :]
    assert "| also | fail | failed | 0 | ValueError: a / b c sizes.a=1 sizes.b=2 |" in table
    said = (tmp_path / "out" / "log.txt").read_text()
    assert 'planted_items.py", line 8 in hang' in said  # the stack of what hung


def test_a_spent_budget_starts_nothing(tmp_path: Path) -> None:
    done = check(tmp_path, "--budget", "0.001", "--also", "planted_items:fail:20")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out")
    assert {row["status"] for row in rows.values()} == {"not started"}
    assert len(rows) > 20
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) <= 60


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--stage", "2d")
    assert done.returncode == 2
    assert "--stage 2d: must be of 0 0.launches" in done.stderr


def test_the_first_day_fits_its_lease_and_stages_run_in_the_order_given() -> None:
    rows = (REPO / "tools/gpu/first_day.txt").read_text().splitlines()
    plan = [line.split() for line in rows if line and not line.startswith("#")]
    assert sum(int(expected) for *_, expected in plan) <= 560
    assert all(int(limit) >= int(expected) + 15 for _, limit, expected in plan)
    named = gpu_check.choose(gpu_check._parse(["--stage", "2b.plain_2048", "0"]))
    assert [i.key for i in named] == ["2b.plain_2048", "0.machine", "0.rates", "0.launches"]


def test_the_replayed_graph_is_of_the_batch() -> None:
    key = GraphKey(num_rows=1, depth=0, batch_size=8, length=64)
    assert replayed_graph(Counter({key: 9}), 8) == key
    with pytest.raises(AssertionError, match="batch 64 replayed"):
        replayed_graph(Counter({key: 9}), 64)


def test_kernels_of_a_profile_are_added_up() -> None:
    def event(key: str, count: int, us: int, kind: DeviceType) -> FunctionEventAvg:
        average = FunctionEventAvg()
        average.key, average.count, average.device_type = key, count, kind
        average.self_device_time_total = us
        return average

    gpu = [event(*each, DeviceType.CUDA) for each in (("norm", 2, 100), ("matmul", 4, 1200), ("copy", 2, 40))]  # fmt: skip
    found = kernel_figures([*gpu, event("launch", 8, 9, DeviceType.CPU)], 2, 1e-3, top=2)
    assert found == {
        "nodes": 4.0,
        "kernels_ms": pytest.approx(0.67),
        "idle_share": pytest.approx(0.33),
        "top_us": {"matmul x2": 600.0, "norm x1": 50.0},
    }
    assert kernel_figures([], 2, 1e-3) == {"profiler": "saw no kernel"}


def test_a_report_of_tests_is_read(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        """<testsuites><testsuite><testcase name="a" time="1.5"/><testcase name="b" time="3"><failure message="wrong"/></testcase>
        <testcase name="c" time="0"><skipped message="no GPU"/></testcase></testsuite></testsuites>"""
    )
    assert read_junit(report) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "skipped_because": "no GPU",
        "failures": {"b": "wrong"},
        "slowest_s": {"b": 3.0, "a": 1.5, "c": 0.0},
    }
