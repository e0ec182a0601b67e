"""Stages 2a, 3 and 4: files of tests, each in a pytest of its own. Its figures are counts, failures and the slowest tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.machine import Figures, Machine, NothingRan

_TEST_S = 90  # of one test, where pytest-timeout is installed
_REPO = Path(__file__).resolve().parents[2]


def suite(machine: Machine, file: str) -> Iterator[Figures]:
    """Run the tests of a file. RuntimeError has the failures, NothingRan a reason why all were skipped."""
    report = machine.scratch / "junit.xml"
    report.unlink(missing_ok=True)
    has_timeout = importlib.util.find_spec("pytest_timeout") is not None
    command = [
        *(sys.executable, "-m", "pytest", file, "-m", "", "-vv", "-p", "no:cacheprovider"),
        *(f"--junitxml={report}", f"--rootdir={_REPO}"),
        *[f"--timeout={_TEST_S}"] * has_timeout,
    ]
    code = subprocess.run(command, cwd=_REPO, check=False).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {code} and no report: see log.txt")
    figures = read_junit(report)
    yield figures
    if figures["failed"] or code not in (0, 5):  # 5: no tests, where the whole file is skipped
        failures = figures["failures"] or {"pytest": f"exit code {code}"}
        raise RuntimeError("; ".join(f"{name}: {text}" for name, text in failures.items()))
    if not figures["passed"]:
        raise NothingRan(figures["skipped_because"])


def read_junit(report: Path) -> Figures:
    """Return counts, the message of each failed test, one reason for skipping, and the seconds of the slowest tests."""
    cases = ET.parse(report).getroot().findall(".//testcase")
    failures, reasons = {}, set()
    num_skipped = 0
    for case in cases:
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                failures[str(case.get("name"))] = (found.get("message") or "")[:300]
        skipped = case.find("skipped")
        if skipped is not None:
            num_skipped += 1
            reasons.add(skipped.get("message") or "")
    seconds = {str(case.get("name")): float(case.get("time") or 0.0) for case in cases}
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:3]
    return {
        "passed": len(cases) - len(failures) - num_skipped,
        "failed": len(failures),
        "skipped": num_skipped,
        "skipped_because": min(reasons, default="")[:100],
        "failures": failures,
        "slowest_s": {name: seconds[name] for name in slowest},
    }
