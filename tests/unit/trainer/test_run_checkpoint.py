"""The checkpoint folder: damaged files are named, the newest intact one is taken, and old ones go.

`tests/checkpoint_machine.py` cuts saves off at any file operation; here is what it does not reach.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint_machine import NumberModel
from tlt_megatron.runtime.process_groups import SINGLE
from tlt_megatron.trainer.saving.manifest import (
    MANIFEST,
    POINTER,
    FileRecord,
    read_manifest,
    read_pointer,
    write_manifest,
)
from tlt_megatron.trainer.saving.run_checkpoint import CheckpointManager, find_saved_run


def manager(root: Path, keep: int = 0) -> CheckpointManager:
    return CheckpointManager(root=root, models={"policy": NumberModel()}, keep=keep, world=SINGLE)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_a_restore_from_another_runs_folder_changes_nothing_there(tmp_path: Path) -> None:
    unfinished = manager(tmp_path / "theirs").save(2, {})
    unfinished = unfinished.rename(unfinished.with_suffix(".tmp"))
    saved = find_saved_run(tmp_path / "theirs", SINGLE)
    assert manager(tmp_path / "ours").restore(saved) == unfinished
    assert names(tmp_path / "theirs") == ["iter_0000002.tmp"]


def test_an_old_checkpoint_that_cannot_be_deleted_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager(tmp_path, keep=1)
    checkpoints.save(1, {})
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "iter_0000001":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    checkpoints.save(2, {})
    assert find_saved_run(tmp_path, SINGLE).step == read_pointer(tmp_path) == 2
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


POLICY = "policy/__0_0.distcp"
# Each damages a checkpoint, and the error that follows begins with the name of the file.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest.json: is not a regular file": lambda folder: _make_pipe(folder / MANIFEST),
    "manifest.json is missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest.json is damaged": _flip_order,
    f"{POLICY} is missing": lambda folder: (folder / POLICY).unlink(),
    f"{POLICY} is missing or not a regular file": lambda folder: _make_pipe(folder / POLICY),
    f"{POLICY} has 0 bytes, 1 were": lambda folder: (folder / POLICY).write_text(""),
    f"{POLICY} is damaged": lambda folder: flip_bit(folder / POLICY),
    "trainer_state.json is damaged": lambda folder: flip_bit(folder / "trainer_state.json"),
    "manifest.json names 'policy/../../outside': must be in its folder": lambda folder: _craft(
        folder, "policy/../../outside"
    ),
    "manifest.json names '/dev/null': must be in": lambda folder: _craft(folder, "/dev/null"),
}


@pytest.mark.parametrize("named", DAMAGES)
def test_the_newest_intact_one_is_taken_and_the_broken_file_is_named(
    tmp_path: Path, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        manager(tmp_path).save(step, {})
    DAMAGES[named](tmp_path / "iter_0000002")
    assert find_saved_run(tmp_path, SINGLE).step == 1
    assert f"iter_0000002/{named}" in caplog.text
    (tmp_path / "iter_0000001" / "policy" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact: .*metadata is missing"):
        find_saved_run(tmp_path, SINGLE)


@pytest.mark.parametrize("content", [None, b"7", b"seven", b"\xff\xfe"])
def test_a_wrong_pointer_costs_a_warning_and_a_pointer_alone_an_error(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    manager(tmp_path).save(3, {})
    (tmp_path / POINTER).unlink()
    if content is not None:
        (tmp_path / POINTER).write_bytes(content)
    assert find_saved_run(tmp_path, SINGLE).step == 3
    assert POINTER in caplog.text
    shutil.rmtree(tmp_path / "iter_0000003")
    if content is None:
        assert find_saved_run(tmp_path, SINGLE) is None
    else:
        with pytest.raises(ValueError, match=POINTER):
            find_saved_run(tmp_path, SINGLE)


def test_a_broken_folder_and_the_rest_of_a_save_of_its_step_are_both_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager(tmp_path, keep=1)
    (checkpoints.save(1, {}) / MANIFEST).write_text("?")
    (tmp_path / "iter_0000001.tmp" / "policy").mkdir(parents=True)  # a save of step 1 again died
    checkpoints.save(2, {})
    assert names(tmp_path) == ["iter_0000002"]
    assert caplog.messages == []


def test_a_resume_from_an_older_checkpoint_by_name_leaves_the_newer_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        manager(tmp_path).save(step, {})
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000003.tmp")
    (tmp_path / POINTER).write_text("2")
    manager(tmp_path).restore(find_saved_run(tmp_path / "iter_0000001", SINGLE))
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003.tmp"]
    assert read_pointer(tmp_path) == 2
