"""Run folders and checkpoints through the program itself: used folders, damage, crafted files,
other settings, full disks, lost rows.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sealed_checkpoint import seal
from tests.tiny_task import checkpoints, metric_rows, python, run, run_ending
from tests.unit.mcore.test_checkpoint_reader import Call
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.trainer.saving.manifest import read_manifest

pytestmark = pytest.mark.e2e

QUIET = ("logging.trackers=[]", "logging.progress=none")
EVERY_STEP = (*QUIET, "checkpoint.interval=1", "checkpoint.keep=0")
RESUME = ("--resume", "auto", *EVERY_STEP)
NO_EVAL = (*EVERY_STEP, "data.eval=")
NEWEST = "iter_0000003"


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps at DP2 with a checkpoint after each, under the usual umask."""
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    before = os.umask(0o022)
    run(2, config, run_dir, *EVERY_STEP)
    os.umask(before)
    return run_dir


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    """A run folder to damage."""
    return shutil.copytree(straight, tmp_path / "run")


def steps_of(run_dir: Path) -> list[int]:
    """The RL steps in metrics.jsonl; each must be there once, as must each evaluation."""
    rows = metric_rows(run_dir)
    evaluated = [row["step"] for row in rows if "eval/accuracy" in row]
    assert len(evaluated) == len(set(evaluated))
    return [row["step"] for row in rows if "actor/pg_loss" in row]


# ---- the run folder


def test_a_used_folder_is_refused_before_torch_is_imported(straight: Path, config: Path) -> None:
    arguments = ["--config", str(config), f"run.dir={straight}"]
    program = (
        f"import os, runpy, sys; sys.argv[1:] = {arguments!r}\n"
        "try: runpy.run_path('launch/pretrain_rl.py', run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)\n"
        "print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    )
    done = python("-c", program)
    assert done.stdout.split() == ["2", "False", "1"], done.stderr
    (line,) = done.stderr.splitlines()
    assert f"run.dir='{straight}': holds an earlier run (checkpoints, metrics.jsonl" in line
    assert "--resume auto" in line
    assert checkpoints(straight) == ["iter_0000001", "iter_0000002", NEWEST]


def test_files_have_the_rights_that_the_umask_asks_for(straight: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in straight.rglob("*") if path.is_file()}
    assert (straight / "hf" / "model.safetensors") in modes
    assert set(modes.values()) == {0o644}, modes


# ---- an older checkpoint


def test_a_run_goes_on_from_an_older_checkpoint_by_name(copy: Path, config: Path) -> None:
    older = copy / "checkpoints" / "iter_0000001"
    options = (f"checkpoint.resume={older}", "run.num_steps=2", "checkpoint.keep=1", *QUIET)
    run(1, config, copy, *options)
    assert checkpoints(copy) == ["iter_0000002"]  # written last, though 3 is a higher number
    assert read_manifest(copy / "checkpoints" / "iter_0000002").order == 4
    assert steps_of(copy) == [1, 2]


# ---- crafted files


def test_a_crafted_index_runs_no_code_on_resume(copy: Path, config: Path, tmp_path: Path) -> None:
    trace, newest = tmp_path / "trace", copy / "checkpoints" / NEWEST
    (newest / "policy" / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, str(trace))))
    seal(newest, step=3)
    stderr = run_ending(2, 1, config, copy, *RESUME, "run.num_steps=4")
    assert not trace.exists()
    assert ".metadata is not loaded: posix.mkdir is not a class of" in stderr
    common = newest / "policy" / "common.pt"
    torch.save({"identity": Call(os.mkdir, str(trace))}, common)
    seal(newest, step=3)
    stderr = run_ending(2, 1, config, copy, *RESUME, "run.num_steps=4")
    assert not trace.exists()
    assert "common.pt is not loaded" in stderr


# ---- other settings


def test_a_refused_resume_leaves_the_run_as_it_was(config: Path, tmp_path: Path) -> None:
    """Other data, from an earlier checkpoint: the rows after it stay, and a folder of a fork is
    still new.
    """
    logged = ("logging.rollouts=true", *EVERY_STEP)
    run(1, config, tmp_path / "run", *logged)

    def content() -> dict[str, bytes]:
        files = [each for each in (tmp_path / "run").rglob("*") if each.is_file()]
        own = [each for each in files if each.name != "lock" and "logs" not in each.parts]
        return {str(each): each.read_bytes() for each in own}

    before = content()
    other = tmp_path / "other.jsonl"
    rows = (config.parent / "train.jsonl").read_text().splitlines()
    other.write_text("\n".join(rows[1:]) + "\n")
    first = tmp_path / "run" / "checkpoints" / "iter_0000001"
    arguments = (f"checkpoint.resume={first}", *logged)
    for name in ("run", "fork"):
        said = run_ending(2, 1, config, tmp_path / name, *arguments, f"data.train={other}")
        assert "the state belongs to the data set" in said
    assert content() == before
    run(1, config, tmp_path / "fork", *arguments)


def test_a_tracker_that_cannot_start_leaves_no_run_behind(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def tracker(**about):\n    raise OSError('no login')\n")
    tracker = f"logging.trackers=[{tmp_path}/mine.py:tracker]"
    assert "no login" in run_ending(2, 1, config, tmp_path / "run", *QUIET, tracker)
    run(1, config, tmp_path / "run", *QUIET, "run.num_steps=1")


@pytest.mark.parametrize("num_steps", ["0", "2"])
def test_fewer_steps_than_the_checkpoint_has_are_refused(
    straight: Path, config: Path, num_steps: str
) -> None:
    before = (straight / "summary.json").read_bytes()
    stderr = run_ending(2, 1, config, straight, *RESUME, f"run.num_steps={num_steps}")
    assert f"run.num_steps={num_steps}: must be >= 3, the step of the checkpoint" in stderr
    assert (straight / "summary.json").read_bytes() == before


def test_a_finished_run_without_held_out_prompts_is_not_saved_again(
    config: Path, tmp_path: Path
) -> None:
    run(1, config, tmp_path, *EVERY_STEP, "run.num_steps=1", "data.eval=")
    manifest = tmp_path / "checkpoints" / "iter_0000001" / "manifest.json"
    before = manifest.stat().st_ino, manifest.stat().st_mtime_ns
    run_ending(0, 1, config, tmp_path, *RESUME, "run.num_steps=1", "data.eval=")
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == before


def test_the_evaluation_of_step_0_is_written_once(config: Path, tmp_path: Path) -> None:
    run(1, config, tmp_path, *QUIET, "run.num_steps=0")
    run_ending(0, 1, config, tmp_path, *RESUME, "run.num_steps=1")
    assert steps_of(tmp_path) == [1]


def test_changed_strategies_drafter_and_spot_settings_do_not_block_a_resume(
    config: Path, tmp_path: Path
) -> None:
    spot = (
        "speculation.enabled=true",
        "spot.enabled=true",
        "drafter.batch_tokens=64",
        "data.eval=",
    )
    run(1, config, tmp_path, *EVERY_STEP, *spot, "speculation.strategies=['3_1_3']")
    for step, change in enumerate(
        (
            ["speculation.strategies=['3_2_6','off']", "speculation.selector=beg_mab"],
            ["speculation.strategies=['3_2_6']", f"speculation.drafter={tmp_path}/hf_drafter"],
            ["speculation.strategies=['ngram_4']", "spot.enabled=false"],
        ),
        start=4,
    ):
        stderr = run_ending(
            0, 1, config, tmp_path, *RESUME, *spot, *change, f"run.num_steps={step}"
        )
        (line,) = (line for line in stderr.splitlines() if "written with other settings" in line)
        assert all(name.partition("=")[0] in line for name in change)
        assert "starts anew" in stderr
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


# ---- full disks, other weights, lost rows


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB: a checkpoint of the tiny task has 1.7."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mount is refused here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_is_one_line_that_names_disk_and_folder(config: Path, small_disk: Path) -> None:
    (small_disk / "run" / "logs" / "node_0000").mkdir(parents=True)
    (small_disk / "run" / "logs" / "node_0000" / "rank_00000.log").symlink_to("/dev/full")
    stderr = run_ending(1, 1, config, small_disk / "run", *NO_EVAL)
    (line,) = (line for line in stderr.splitlines() if "pretrain_rl: " in line)
    assert f"checkpoint {small_disk}/run/checkpoints/iter_0000002 was not written" in line
    assert "No space left on device" in line
    assert f"the disk at {small_disk} " in line
    assert stderr.count("rank_00000.log: cannot be written: [Errno 28]") == 1


def test_a_changed_kl_reference_is_refused_and_a_copy_is_not(config: Path, tmp_path: Path) -> None:
    first = config.parent / "model"
    model = shutil.copytree(first, tmp_path / "model", copy_function=shutil.copy)
    options = (f"model.path={model}", "algorithm.kl_coef=0.1")
    run(1, config, tmp_path / "run", *NO_EVAL, *options, "run.num_steps=1")
    tensors = dict(HfReader(model).items())
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    save_tensors(tensors, model / "model.safetensors", metadata={"format": "pt"})
    stderr = run_ending(
        2, 1, config, tmp_path / "run", *RESUME, "data.eval=", *options, "run.num_steps=2"
    )
    assert "belongs to another run: weights in model.path (the KL reference) " in stderr
    copy = (f"model.path={first}", "algorithm.kl_coef=0.1")
    run_ending(0, 1, config, tmp_path / "run", *RESUME, "data.eval=", *copy, "run.num_steps=1")


def test_lost_rows_are_counted_and_a_damaged_file_is_kept(config: Path, tmp_path: Path) -> None:
    arguments = NO_EVAL
    run(1, config, tmp_path, *arguments, "run.num_steps=2")
    metrics, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.1.jsonl"
    damaged = ["{}", "[1]", "{\x00\x00", metrics.read_text().splitlines()[1]]
    metrics.write_text("\n".join(damaged) + "\n")
    (tmp_path / "speculation" / "rank_00000.jsonl").unlink()
    (tmp_path / "rollouts" / "step_0000001.rank_00000.jsonl").write_text("")
    (tmp_path / "timeline" / "rank_00000.jsonl").write_text("{}\n" + "\x00" * 64)
    stderr = run_ending(0, 1, config, tmp_path, *RESUME, "data.eval=", "run.num_steps=3")
    assert "metrics.jsonl: left out 3 lines that are no rows" in stderr
    assert aside.read_text().splitlines() == damaged
    assert [row["step"] for row in metric_rows(tmp_path)] == [2, 3]
    for lost in ("metrics.jsonl 1 of 2", "speculation/ 0 of 1", "rollouts/ 1 of 2"):
        assert lost in stderr
    assert "timeline/rank_00000.jsonl: left out 2 lines that are no rows" in stderr
