"""Run folders and checkpoints through the program itself: used folders, two runs at once, damage,
crafted files, other settings.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_hf
from tests.tiny_task import (
    REPO,
    answers,
    metric_rows,
    run,
    run_forked,
    weights,
)
from tlt_megatron.trainer.manifest import (
    Manifest,
    hash_file,
    list_files,
    read_manifest,
    write_manifest,
)

pytestmark = pytest.mark.e2e

QUIET = ("logging.trackers=[]", "logging.trace=false", "logging.progress=none")
EVERY_STEP = (*QUIET, "checkpoint.interval=1", "checkpoint.keep=0")
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


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*"))


def steps_of(run_dir: Path) -> list[int]:
    """The RL steps in metrics.jsonl; each must be there once, as must each evaluation."""
    rows = metric_rows(run_dir)
    evaluated = [row["step"] for row in rows if "eval/accuracy" in row]
    assert len(evaluated) == len(set(evaluated))
    return [row["step"] for row in rows if "actor/pg_loss" in row]


def resume(config: Path, run_dir: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `--resume auto` on one rank."""
    arguments = ("--config", str(config), f"run.dir={run_dir}", "--resume", "auto", *arguments)
    [(code, stderr)] = run_forked(1, *arguments, *EVERY_STEP)
    return code, stderr


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- the run folder


def test_a_used_folder_is_refused_before_torch_is_imported(straight: Path, config: Path) -> None:
    arguments = ["--config", str(config), f"run.dir={straight}"]
    program = (
        f"import runpy, sys; sys.argv[1:] = {arguments!r}\n"
        "try: runpy.run_path('launch/pretrain_rl.py', run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["2", "False"], done.stderr
    (line,) = done.stderr.splitlines()
    assert f"run.dir='{straight}': holds an earlier run (checkpoints, metrics.jsonl" in line
    assert "--resume auto" in line
    assert checkpoints(straight) == ["iter_0000001", "iter_0000002", NEWEST]


def test_files_have_the_rights_that_the_umask_asks_for(straight: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in straight.rglob("*") if path.is_file()}
    assert (straight / "hf" / "model.safetensors") in modes
    assert set(modes.values()) == {0o644}, modes


# ---- damage


def test_a_damaged_checkpoint_gives_a_warning_and_the_straight_run(
    copy: Path, straight: Path, config: Path
) -> None:
    flip_bit(copy / "checkpoints" / NEWEST / "policy" / "__1_0.distcp")
    arguments = ("--config", config, f"run.dir={copy}", "--resume", "auto", *EVERY_STEP)
    results = run_forked(2, *arguments)
    assert [code for code, _ in results] == [0, 0], results
    assert "iter_0000002 is the newest intact checkpoint" in results[0][1]
    assert "__1_0.distcp is damaged" in results[0][1]
    assert steps_of(copy) == [1, 2, 3]
    assert answers(copy) == answers(straight)
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(copy)[name], tensor), name


def test_no_intact_checkpoint_is_one_clear_error(copy: Path, config: Path) -> None:
    for name in checkpoints(copy):
        flip_bit(copy / "checkpoints" / name / "trainer_state.json")
    code, stderr = resume(config, copy)
    assert code == 2
    (line,) = stderr.splitlines()
    assert "no checkpoint in" in line
    assert line.count("trainer_state.json is damaged") == 3
    assert steps_of(copy) == [1, 2, 3]


def test_a_run_goes_on_from_an_older_checkpoint_by_name(copy: Path, config: Path) -> None:
    older = copy / "checkpoints" / "iter_0000001"
    options = (f"checkpoint.resume={older}", "run.num_steps=2", "checkpoint.keep=1", *QUIET)
    run(1, config, copy, *options)
    assert checkpoints(copy) == ["iter_0000002"]  # written last, though 3 is a higher number
    assert read_manifest(copy / "checkpoints" / "iter_0000002").order == 4
    assert steps_of(copy) == [1, 2]


# ---- crafted files


class MakeFolder:
    """Unpickling it makes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def seal(folder: Path, order: int) -> None:
    """What anybody can do who can write to the folder."""
    files = {name: hash_file(folder / name) for name in list_files(folder)}
    write_manifest(folder, Manifest(step=3, order=order, files=files))


def test_a_crafted_index_runs_no_code_on_resume(copy: Path, config: Path, tmp_path: Path) -> None:
    trace, newest = tmp_path / "trace", copy / "checkpoints" / NEWEST
    (newest / "policy" / ".metadata").write_bytes(pickle.dumps(MakeFolder(trace)))
    seal(newest, order=3)
    code, stderr = resume(config, copy, "run.num_steps=4")
    assert not trace.exists()
    assert code == 2
    assert ".metadata is not loaded: posix.mkdir is not a class of" in stderr
    common = newest / "policy" / "common.pt"
    torch.save({"identity": MakeFolder(trace)}, common)
    seal(newest, order=3)
    code, stderr = resume(config, copy, "run.num_steps=4")
    assert not trace.exists()
    assert code == 2
    assert "common.pt is not loaded" in stderr


# ---- other settings


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.seed=7", "run.seed 0 -> 7"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope.theta 1000000.0 -> 500000.0",
        ),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps 1e-06 -> 0.001"),
        ({"tied": True}, "tie_word_embeddings False -> True"),
        ({"vocab_size": 50}, "vocab_size 48 -> 50"),
    ],
)
def test_another_model_or_seed_is_refused_by_name(
    straight: Path,
    config: Path,
    tmp_path: Path,
    override: str | dict[str, object],
    named: str,
) -> None:
    if isinstance(override, dict):
        model = shutil.copytree(config.parent / "model", tmp_path / "model")  # for its tokenizer
        like = {"vocab_size": 48, "num_layers": 2, "eos_token_id": 1, "pad_token_id": 0}
        make_tiny_hf(model, "qwen2", **(like | override))
        override = f"model.path={model}"
    code, stderr = resume(config, straight, override)
    assert code == 2
    assert named in stderr
    assert "Traceback" not in stderr


def test_a_refused_resume_leaves_the_run_as_it_was(config: Path, tmp_path: Path) -> None:
    """Other data, from an earlier checkpoint: the rows after it stay, and a folder of a fork is
    still new.
    """
    logged = ("logging.rollouts=true", *EVERY_STEP)
    run(1, config, tmp_path / "run", *logged)

    def content() -> dict[str, bytes]:
        files = [each for each in (tmp_path / "run").rglob("*") if each.is_file()]
        own = [each for each in files if each.name != "lock" and each.parent.name != "logs"]
        return {str(each): each.read_bytes() for each in own}

    before = content()
    other = tmp_path / "other.jsonl"
    rows = (config.parent / "train.jsonl").read_text().splitlines()
    other.write_text("\n".join(rows[1:]) + "\n")
    first = tmp_path / "run" / "checkpoints" / "iter_0000001"
    arguments = ("--config", str(config), f"checkpoint.resume={first}", *logged)
    for run_dir in (tmp_path / "run", tmp_path / "fork"):
        wrong = (*arguments, f"run.dir={run_dir}", f"data.train={other}")
        [(code, stderr)] = run_forked(1, *wrong)
        assert code == 2
        assert "the state belongs to the data set" in stderr
    assert content() == before
    [(code, stderr)] = run_forked(1, *arguments, f"run.dir={tmp_path / 'fork'}")
    assert code == 0, stderr


def test_a_tracker_that_cannot_start_leaves_no_run_behind(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def tracker(**about):\n    raise OSError('no login')\n")
    arguments = ("--config", str(config), f"run.dir={tmp_path / 'run'}", *QUIET)
    [(code, stderr)] = run_forked(1, *arguments, f"logging.trackers=[{tmp_path}/mine.py:tracker]")
    assert code == 2
    assert "no login" in stderr
    [(code, stderr)] = run_forked(1, *arguments, "run.num_steps=1")
    assert code == 0, stderr


@pytest.mark.parametrize("num_steps", ["0", "2"])
def test_fewer_steps_than_the_checkpoint_has_are_refused(
    straight: Path, config: Path, num_steps: str
) -> None:
    before = (straight / "summary.json").read_bytes()
    code, stderr = resume(config, straight, f"run.num_steps={num_steps}")
    assert code == 2
    assert f"run.num_steps={num_steps}: must be >= 3, the step of the checkpoint" in stderr
    assert (straight / "summary.json").read_bytes() == before


def test_a_finished_run_without_held_out_prompts_is_not_saved_again(
    config: Path, tmp_path: Path
) -> None:
    run(1, config, tmp_path, *EVERY_STEP, "run.num_steps=1", "data.eval=")
    manifest = tmp_path / "checkpoints" / "iter_0000001" / "manifest.json"
    before = manifest.stat().st_ino, manifest.stat().st_mtime_ns
    code, stderr = resume(config, tmp_path, "run.num_steps=1", "data.eval=")
    assert code == 0, stderr
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == before


def test_the_evaluation_of_step_0_is_written_once(config: Path, tmp_path: Path) -> None:
    run(1, config, tmp_path, *QUIET, "run.num_steps=0")
    code, stderr = resume(config, tmp_path, "run.num_steps=1")
    assert code == 0, stderr
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
        code, stderr = resume(config, tmp_path, *spot, *change, f"run.num_steps={step}")
        assert code == 0, stderr
        (line,) = (line for line in stderr.splitlines() if "written with other settings" in line)
        assert all(name.partition("=")[0] in line for name in change)
        assert "starts anew" in stderr
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
