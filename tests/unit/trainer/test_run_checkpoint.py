"""The checkpoint folder: what a crash at any instant leaves must load, and old ones must go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.trainer.checkpoint import POINTER, CheckpointManager, read_pointer


class FileModel:
    """A policy whose whole state is one number; `fail` makes save die half way."""

    def __init__(self) -> None:
        self.value = 0
        self.fail = False

    def save(self, path: Path) -> None:
        (path / "half").write_text("?")
        if self.fail:
            raise OSError("disk full")
        (path / "value").write_text(str(self.value))

    def load(self, path: Path) -> None:
        self.value = int((path / "value").read_text())


@pytest.fixture
def model() -> FileModel:
    return FileModel()


def manager(root: Path, model: FileModel, keep: int = 0) -> CheckpointManager:
    return CheckpointManager(root, model, keep=keep, world=SINGLE)


def test_save_then_load_restores_state_and_model(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model)
    model.value = 3
    folder = checkpoints.save(10, {"step": 10})
    assert folder.name == "iter_0000010"
    assert (tmp_path / POINTER).read_text() == "10"
    model.value = 0
    assert checkpoints.load_latest() == {"step": 10}
    assert model.value == 3


def test_nothing_saved_is_none(tmp_path: Path, model: FileModel) -> None:
    assert manager(tmp_path, model).load_latest() is None


def test_a_save_that_dies_leaves_the_last_good_one(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model)
    model.value = 1
    checkpoints.save(1, {"step": 1})
    model.value, model.fail = 2, True
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, {"step": 2})
    assert read_pointer(tmp_path) == 1
    assert checkpoints.load_latest() == {"step": 1}
    model.fail = False
    model.value = 2
    checkpoints.save(2, {"step": 2})
    assert checkpoints.load_latest() == {"step": 2}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_crash_between_rename_and_pointer_loads_the_older_one(
    tmp_path: Path, model: FileModel
) -> None:
    checkpoints = manager(tmp_path, model)
    model.value = 1
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2})
    (tmp_path / POINTER).write_text("1")
    assert checkpoints.load_latest() == {"step": 1}


def test_only_the_newest_are_kept(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model, keep=2)
    for step in (1, 2, 3, 10):
        checkpoints.save(step, {"step": step})
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000010"]


def test_a_pointer_to_nothing_is_refused(tmp_path: Path, model: FileModel) -> None:
    (tmp_path / POINTER).write_text("7")
    with pytest.raises(ValueError, match="iter_0000007 is not a checkpoint"):
        manager(tmp_path, model).load_latest()
    (tmp_path / POINTER).write_text("seven")
    with pytest.raises(ValueError, match="must be a step number"):
        manager(tmp_path, model).load_latest()


def test_a_step_that_stands_is_not_written_again(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model)
    checkpoints.save(3, {"step": 3})
    model.fail = True
    assert checkpoints.save(3, {"step": 3}) == tmp_path / "iter_0000003"
    resumed = manager(tmp_path, model)
    resumed.load_latest()
    resumed.save(3, {"step": 3})


def test_another_run_in_the_same_folder_does_write_its_own(
    tmp_path: Path, model: FileModel
) -> None:
    manager(tmp_path, model).save(3, {"step": 3})
    model.value = 8
    manager(tmp_path, model).save(3, {"step": 3})
    model.value = 0
    manager(tmp_path, model).load_latest()
    assert model.value == 8
