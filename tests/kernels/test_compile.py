"""Every Triton kernel compiles and fits, specialized as in real launches. It needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_task import REPO

pytest.importorskip(
    "triton", reason="the CPU build of torch comes without triton: make test-sglang"
)


def test_kernels_compile(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(entry for entry in (os.environ.get("PYTHONPATH"), str(REPO)) if entry)
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}  # of the same Triton
    words = ["-m", "tests.kernels.compile_kernels", "89", "90", "--only", "7B", "head 256"]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *words], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
