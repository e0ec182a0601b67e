"""What a user meets at a save or a resume, through the program itself: full disks, other weights,
lost rows.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_task import metric_rows, run, run_forked
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.durable import save_tensors

pytestmark = pytest.mark.e2e

EVERY_STEP = (
    *("logging.trackers=[]", "logging.trace=false", "logging.progress=none"),
    *("checkpoint.interval=1", "checkpoint.keep=0", "data.eval="),
)


def resume(config: Path, run_dir: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `--resume auto` on one rank."""
    own = ("--config", config, f"run.dir={run_dir}", "--resume", "auto", *EVERY_STEP)
    [(code, stderr)] = run_forked(1, *own, *arguments)
    return code, stderr


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


def test_a_changed_kl_reference_is_refused_and_a_copy_is_not(config: Path, tmp_path: Path) -> None:
    first = config.parent / "model"
    model = shutil.copytree(first, tmp_path / "model", copy_function=shutil.copy)
    options = (f"model.path={model}", "algorithm.kl_coef=0.1")
    run(1, config, tmp_path / "run", *EVERY_STEP, *options, "run.num_steps=1")
    tensors = dict(HfReader(model).items())
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    save_tensors(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, stderr = resume(config, tmp_path / "run", *options, "run.num_steps=2")
    assert code == 2
    assert "belongs to another run: weights in model.path (the KL reference) " in stderr
    copy = (f"model.path={first}", "algorithm.kl_coef=0.1")
    code, stderr = resume(config, tmp_path / "run", *copy, "run.num_steps=1")
    assert code == 0, stderr


def test_lost_rows_are_counted_and_a_damaged_file_is_kept(config: Path, tmp_path: Path) -> None:
    arguments = (*EVERY_STEP, "logging.trace=true")
    run(1, config, tmp_path, *arguments, "run.num_steps=2")
    metrics, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.1.jsonl"
    damaged = ["{}", "[1]", "{\x00\x00", metrics.read_text().splitlines()[1]]
    metrics.write_text("\n".join(damaged) + "\n")
    (tmp_path / "speculation.jsonl").unlink()
    (tmp_path / "rollouts" / "step_0000001.jsonl").write_text("")
    (tmp_path / "timeline" / "rank_00000.jsonl").write_text("{}\n" + "\x00" * 64)
    code, stderr = resume(config, tmp_path, "logging.trace=true", "run.num_steps=3")
    assert code == 0, stderr
    assert "metrics.jsonl: left out 3 lines that are no rows" in stderr
    assert aside.read_text().splitlines() == damaged
    assert [row["step"] for row in metric_rows(tmp_path)] == [2, 3]
    for lost in ("metrics.jsonl 1 of 2", "speculation.jsonl 0 of ", "rollouts/ 1 of 2"):
        assert lost in stderr
    assert "timeline/rank_00000.jsonl: left out 2 lines that are no rows" in stderr
