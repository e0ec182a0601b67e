"""A run folder belongs to one run at a time, and a used one is not started in by mistake."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tlt_megatron.trainer.saving.run_folder import (
    LOCK_FILE,
    RunFolder,
    check_run_folder,
    owner_has_ended,
)
from tools.run_report.running import is_over


def _hold(path: Path, connection: Connection) -> None:
    """Lock the folder, leave a child that outlives this process, and wait to be killed."""
    folder = RunFolder(path, resume="never")
    child = os.fork()
    if child == 0:
        signal.pause()
    connection.send(child)
    signal.pause()
    folder.close()


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    holder = context.Process(target=_hold, args=(tmp_path, sender))
    holder.start()
    child = receiver.recv()
    try:
        with pytest.raises(
            ValueError, match=rf"in use by pid {holder.pid} on {socket.gethostname()} since 20"
        ):
            RunFolder(tmp_path, resume="auto")
        assert not owner_has_ended(tmp_path)
        with pytest.raises(ValueError, match=f"is in use by a run on {socket.gethostname()}"):
            check_run_folder(tmp_path, resume="auto")
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        assert owner_has_ended(tmp_path)
        RunFolder(tmp_path, resume="never").close()  # its child lives on without the lock
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_file_without_a_holder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text('{"pid": 1')
    assert not owner_has_ended(tmp_path)  # not known
    with closing(RunFolder(tmp_path, resume="never")):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()


@pytest.mark.parametrize("mark", ["checkpoints", "metrics.jsonl", "config.yaml"])
def test_a_used_folder_is_refused_or_resumed_and_logs_alone_do_not_count(
    tmp_path: Path, mark: str
) -> None:
    (tmp_path / "logs").mkdir()
    RunFolder(tmp_path, resume="never").close()
    (tmp_path / mark).mkdir()
    with pytest.raises(ValueError, match=rf"holds an earlier run \({mark}\): resume it"):
        RunFolder(tmp_path, resume="never")
    RunFolder(tmp_path, resume="auto").close()


def test_resume_of_a_path_must_name_checkpoints_and_elsewhere_needs_an_unused_folder(
    tmp_path: Path,
) -> None:
    used, other = tmp_path / "used", tmp_path / "other"
    for folder in (used, other):
        (folder / "checkpoints" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="a folder of checkpoints or one of them"):
        RunFolder(tmp_path / "new", resume=str(tmp_path))
    own = used / "checkpoints"
    for resume in (own, own / "iter_0000001"):
        RunFolder(used, resume=str(resume)).close()
    with pytest.raises(ValueError, match="holds an earlier run"):
        RunFolder(used, resume=str(other / "checkpoints"))


def test_a_full_disk_is_refused_in_the_same_words(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ValueError, match=r"^run.dir='.*': cannot be written: "):
            RunFolder(tmp_path, resume="never")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    RunFolder(tmp_path, resume="never").close()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_refused_run_leaves_the_folder_as_it_was(tmp_path: Path, is_used: bool) -> None:
    path = tmp_path / "run"
    if is_used:
        RunFolder(path, resume="never").close()
        (path / "config.yaml").touch()
        (path / "summary.json").touch()
        holder = (path / LOCK_FILE).read_text().replace('"host"', '"host" ')
        (path / LOCK_FILE).write_text(holder)
        os.utime(path / LOCK_FILE, (1, 1))  # an earlier run, which has written its summary
    with closing(RunFolder(path, resume="auto")) as folder:
        (path / "logs").mkdir()  # as ranks do before they find what is wrong
        folder.withdraw()
    assert path.exists() == is_used
    if is_used:
        assert (path / LOCK_FILE).read_text() == holder
        assert is_over(path)
