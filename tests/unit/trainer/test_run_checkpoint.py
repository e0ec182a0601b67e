"""The checkpoint folder: a crash at any instant and any damage leave the newest intact one, and old ones go."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tlt_megatron.policy.batching import balance_by_size
from tlt_megatron.runtime.process_groups import SINGLE, group_of
from tlt_megatron.trainer.manifest import (
    MANIFEST,
    POINTER,
    FileRecord,
    checkpoint_folders,
    read_manifest,
    read_pointer,
    write_manifest,
)
from tlt_megatron.trainer.run_checkpoint import CheckpointManager, SavedRun, find_saved_run


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


def find(root: Path) -> SavedRun:
    saved = find_saved_run(root, SINGLE)
    assert saved is not None
    return saved


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_a_critic_is_saved_beside_the_policy_and_starts_anew_where_there_is_none(
    tmp_path: Path, model: FileModel, caplog: pytest.LogCaptureFixture
) -> None:
    critic = FileModel()
    both = CheckpointManager(tmp_path, model, keep=0, world=SINGLE, critic=critic)
    model.value, critic.value = 3, 4
    folder = both.save(1, {})
    assert {"policy/value", "critic/value"} <= read_manifest(folder).files.keys()
    model.value = critic.value = 0
    both.restore(find(tmp_path))
    assert (model.value, critic.value) == (3, 4)
    manager(tmp_path, model).save(2, {})
    critic.value = 5
    both.restore(find(tmp_path))
    assert critic.value == 5
    assert "iter_0000002 holds no critic: it starts anew" in caplog.text


def test_save_then_load_restores_state_and_model(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model)
    model.value = 3
    folder = checkpoints.save(10, {"step": 10, "x": [1]})
    assert folder.name == "iter_0000010"
    assert (tmp_path / POINTER).read_text() == "10"
    model.value = 0
    saved = find(tmp_path)
    checkpoints.restore(saved)
    assert (saved.step, saved.state["x"], model.value) == (10, [1], 3)
    assert find(folder) == saved


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert find_saved_run(tmp_path, SINGLE) is None
    assert find_saved_run(tmp_path / "nowhere", SINGLE) is None


def test_a_save_that_dies_leaves_the_last_good_one(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model)
    checkpoints.save(1, {})
    model.fail = True
    with pytest.raises(RuntimeError, match=r"rank 0 on .*iter_0000002 was not written: disk full"):
        checkpoints.save(2, {})
    assert read_pointer(tmp_path) == find(tmp_path).step == 1
    model.fail = False
    checkpoints.save(2, {})
    assert find(tmp_path).step == 2
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_sealed_checkpoint_counts_wherever_the_crash_came(
    tmp_path: Path, model: FileModel, is_renamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager(tmp_path, model)
    checkpoints.save(1, {})
    folder = checkpoints.save(2, {})
    (tmp_path / POINTER).write_text("1")
    if not is_renamed:
        folder.rename(folder.with_suffix(".tmp"))
    assert find(tmp_path).step == 2
    assert "names step 1, step 2 was written last" in caplog.text
    checkpoints.save(3, {})
    assert find(tmp_path).step == 3


def test_a_resume_finishes_the_rename_that_a_crash_prevented(
    tmp_path: Path, model: FileModel
) -> None:
    """Otherwise a second crash, while the same step is saved again, would fall back to the older checkpoint."""
    checkpoints = manager(tmp_path, model)
    checkpoints.save(1, {})
    checkpoints.save(2, {}).rename(tmp_path / "iter_0000002.tmp")
    (tmp_path / POINTER).write_text("1")
    resumed = manager(tmp_path, model)
    folder = resumed.restore(find(tmp_path))
    assert folder == tmp_path / "iter_0000002"
    assert names(tmp_path) == ["iter_0000001", "iter_0000002"]
    assert read_pointer(tmp_path) == 2
    assert resumed.save(2, {}) == folder
    model.fail = True
    with pytest.raises(RuntimeError, match="disk full"):
        manager(tmp_path, model).save(2, {})
    assert find(tmp_path).step == 2


def test_a_restore_from_another_runs_folder_changes_nothing_there(
    tmp_path: Path, model: FileModel
) -> None:
    unfinished = manager(tmp_path / "theirs", model).save(2, {})
    unfinished = unfinished.rename(unfinished.with_suffix(".tmp"))
    saved = find(tmp_path / "theirs")
    assert manager(tmp_path / "ours", model).restore(saved) == unfinished
    assert names(tmp_path / "theirs") == ["iter_0000002.tmp"]


def test_an_old_checkpoint_that_cannot_be_deleted_costs_a_warning(
    tmp_path: Path,
    model: FileModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = manager(tmp_path, model, keep=1)
    checkpoints.save(1, {})
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "iter_0000001":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    checkpoints.save(2, {})
    assert find(tmp_path).step == read_pointer(tmp_path) == 2
    assert "old checkpoints are not deleted" in caplog.text
    assert "iter_0000001" in caplog.text


def _craft(folder: Path, name: str) -> None:
    empty = FileRecord(num_bytes=0, sha256=hashlib.sha256().hexdigest())
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files={**manifest.files, name: empty}))


def _make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _flip_order(folder: Path) -> None:
    text = (folder / MANIFEST).read_text().replace('"order": 2', '"order": 0')
    (folder / MANIFEST).write_text(text)


# Each damages a checkpoint, and the error that follows begins with the name of the file.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest.json is not a regular file": lambda folder: _make_pipe(folder / MANIFEST),
    "manifest.json is missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest.json is damaged": _flip_order,
    "policy/value is missing": lambda folder: (folder / "policy/value").unlink(),
    "policy/value is missing or not a regular file": lambda f: _make_pipe(f / "policy/value"),
    "policy/value has 0 bytes, 1 were": lambda folder: (folder / "policy/value").write_text(""),
    "policy/value is damaged": lambda folder: flip_bit(folder / "policy/value"),
    "trainer_state.json is damaged": lambda folder: flip_bit(folder / "trainer_state.json"),
    "manifest.json names 'policy/../../outside': must be in its folder": lambda folder: _craft(
        folder, "policy/../../outside"
    ),
    "manifest.json names '/dev/null': must be in": lambda folder: _craft(folder, "/dev/null"),
}


@pytest.mark.parametrize("named", DAMAGES)
def test_the_newest_intact_one_is_taken_and_the_broken_file_is_named(
    tmp_path: Path,
    model: FileModel,
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = manager(tmp_path, model)
    for step in (1, 2):
        checkpoints.save(step, {})
    DAMAGES[named](tmp_path / "iter_0000002")
    assert find(tmp_path).step == 1
    assert f"iter_0000002/{named}" in caplog.text
    damage_all = tmp_path / "iter_0000001" / "policy" / "half"
    damage_all.unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact: .*half is missing"):
        find_saved_run(tmp_path, SINGLE)


@pytest.mark.parametrize("content", [None, b"7", b"seven", b"\xff\xfe"])
def test_a_wrong_pointer_costs_a_warning_and_a_pointer_alone_an_error(
    tmp_path: Path, model: FileModel, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    manager(tmp_path, model).save(3, {})
    (tmp_path / POINTER).unlink()
    if content is not None:
        (tmp_path / POINTER).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert find(tmp_path).step == 3
    assert POINTER in caplog.text
    shutil.rmtree(tmp_path / "iter_0000003")
    if content is None:
        assert find_saved_run(tmp_path, SINGLE) is None
    else:
        with pytest.raises(ValueError, match=POINTER):
            find_saved_run(tmp_path, SINGLE)


def test_only_the_newest_are_kept(tmp_path: Path, model: FileModel) -> None:
    checkpoints = manager(tmp_path, model, keep=2)
    for step in (1, 2, 3, 10):
        checkpoints.save(step, {})
    assert names(tmp_path) == ["iter_0000003", "iter_0000010"]


def test_a_broken_folder_and_the_rest_of_a_save_of_its_step_are_both_deleted(
    tmp_path: Path, model: FileModel, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, model, keep=1, world=SINGLE)
    (manager.save(1, {}) / MANIFEST).write_text("?")
    (tmp_path / "iter_0000001.tmp" / "policy").mkdir(parents=True)  # a save of step 1 again died
    manager.save(2, {})
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["iter_0000002"]
    assert caplog.messages == []


def test_newest_is_by_the_order_of_writing_not_by_number(tmp_path: Path, model: FileModel) -> None:
    earlier = manager(tmp_path, model, keep=2)
    for step in (8, 9):
        earlier.save(step, {})
    branch = manager(tmp_path, model, keep=2)  # goes on from an older checkpoint
    branch.save(1, {})
    assert names(tmp_path) == ["iter_0000001", "iter_0000009"]
    assert find(tmp_path).step == read_pointer(tmp_path) == 1
    branch.save(2, {})
    assert names(tmp_path) == ["iter_0000001", "iter_0000002"]


def test_another_run_in_the_same_folder_does_write_its_own(
    tmp_path: Path, model: FileModel
) -> None:
    manager(tmp_path, model).save(3, {})
    model.value = 8
    manager(tmp_path, model).save(3, {})
    assert read_manifest(tmp_path / "iter_0000003").order == 2
    model.value = 0
    manager(tmp_path, model).restore(find(tmp_path))
    assert model.value == 8


def test_all_ranks_verify_and_agree(tmp_path: Path, model: FileModel) -> None:
    manager(tmp_path, model).save(1, {})
    manager(tmp_path, model).save(2, {})
    files = read_manifest(tmp_path / "iter_0000002").files
    names = sorted(files)
    (alone,) = balance_by_size([files[name].num_bytes for name in names], 3)[2]  # read by rank 2
    flip_bit(tmp_path / "iter_0000002" / names[alone])

    def step() -> int:
        import torch.distributed as dist

        saved = find_saved_run(tmp_path, group_of(dist.group.WORLD))
        assert saved is not None
        return saved.step

    assert run_ranks(3, step) == [1, 1, 1]


def test_state_that_is_told_of_the_run_is_in_every_checkpoint(
    tmp_path: Path, model: FileModel
) -> None:
    checkpoints = CheckpointManager(tmp_path, model, keep=0, world=SINGLE, about={"identity": {}})
    folder = checkpoints.save(4, {"step": 4})
    assert json.loads((folder / "trainer_state.json").read_text()) == {"identity": {}, "step": 4}
