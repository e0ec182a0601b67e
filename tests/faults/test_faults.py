"""40 schedules of faults against real runs, as `make faults` runs 500: each fault is one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.faults.catalogue import FAULTS
from tests.tiny_task import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

NUM_SCHEDULES = 40
SEED = 1


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the harness has written. A program of its own: it forks ranks from a process without threads."""
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-m", "tests.faults", "--json", str(folder / "faults.json")]
    command += ["--schedules", str(NUM_SCHEDULES), "--seed", str(SEED), "--folder", str(folder)]
    with open(folder / "output.txt", "w") as output:
        environment = os.environ | {"PYTHONPATH": str(REPO)}
        subprocess.run(command, cwd=REPO, env=environment, stdout=output, stderr=output)
    path = folder / "faults.json"
    assert path.is_file(), (folder / "output.txt").read_text()[-6000:]
    report = json.loads(path.read_text())
    assert len(report["schedules"]) == NUM_SCHEDULES
    return report


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_promises_hold_under(fault: str, report: dict) -> None:
    mine = [schedule for schedule in report["schedules"] if schedule["fault"] == fault]
    assert mine
    for schedule in mine:
        for name in ("hang", "lost", "orphans", "unclear", "broken", "missed"):
            assert not schedule[name], f"{name} at {schedule['where']}:\n{schedule[name]}"
