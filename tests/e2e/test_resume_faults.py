"""What a user meets at a save or a resume, through the program itself: full disks, other weights, lost rows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_task import run_forked

pytestmark = pytest.mark.e2e

EVERY_STEP = (
    *("logging.tensorboard=false", "logging.trace=false", "logging.progress=none"),
    *("checkpoint.interval=1", "checkpoint.keep=0", "data.eval="),
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB: a checkpoint of the tiny task has 1.7."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mount is refused here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_is_one_line_that_names_disk_and_folder(config: Path, small_disk: Path) -> None:
    (small_disk / "run" / "logs").mkdir(parents=True)
    (small_disk / "run" / "logs" / "rank_00000.log").symlink_to("/dev/full")
    arguments = ("--config", config, f"run.dir={small_disk / 'run'}", *EVERY_STEP)
    [(code, stderr)] = run_forked(1, *arguments)
    assert code == 1
    assert "Traceback" not in stderr
    (line,) = (line for line in stderr.splitlines() if "pretrain_rl: " in line)
    assert f"checkpoint {small_disk}/run/checkpoints/iter_0000002 was not written" in line
    assert "No space left on device" in line
    assert f"the disk at {small_disk} " in line
    assert stderr.count("rank_00000.log: cannot be written: [Errno 28]") == 1
