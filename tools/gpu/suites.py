"""Stages 2a, 3 and 4: files of tests, each in a pytest of its own. Its figures are counts, failures
and the slowest tests.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.machine import Figures, Machine, NothingRan

_TEST_S = 90  # limit of a test, where pytest-timeout is installed
_REPO = Path(__file__).resolve().parents[2]


def suite(machine: Machine, file: str) -> Iterator[Figures]:
    """Run the tests of a file. RuntimeError has the failures, NothingRan a reason why all were
    skipped.
    """
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
    """Return counts, the message of each failed test, one reason for skipping, and the seconds of
    the slowest tests.
    """
    cases = {str(case.get("name")): case for case in ET.parse(report).getroot().iter("testcase")}

    def messages(*kinds: str) -> dict[str, str]:
        found = {name: [part for part in case if part.tag in kinds] for name, case in cases.items()}
        return {name: parts[0].get("message") or "" for name, parts in found.items() if parts}

    failures, skipped = messages("failure", "error"), messages("skipped")
    seconds = {name: float(case.get("time") or 0.0) for name, case in cases.items()}
    return {
        "passed": len(cases) - len(failures) - len(skipped),
        "failed": len(failures),
        "skipped": len(skipped),
        "skipped_because": min(skipped.values(), default="")[:100],
        "failures": {name: message[:300] for name, message in failures.items()},
        "slowest_s": dict(sorted(seconds.items(), key=lambda item: -item[1])[:3]),
    }
