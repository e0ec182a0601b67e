"""Checkpoints of the drafter: what is in them, what a crash or a busy thread leaves, how errors
surface.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.slow_draft import make_draft_model
from tlt_megatron.drafter.eagle_folder import config_of, load_drafter
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.spot.drafter_checkpoint import AsyncDrafterCheckpointer, DrafterCheckpoint


def numbered(model: DraftModel, number: int) -> DrafterCheckpoint:
    """A checkpoint in which every value is `number`."""
    weights = {n: torch.full_like(p, number) for n, p in model.state_dict().items()}
    state = {f"model.{name}": tensor.clone() for name, tensor in weights.items()}
    record = {"step": number}
    return DrafterCheckpoint(config=config_of(model), weights=weights, state=state, record=record)


def number_in(folder: Path) -> int:
    """The number of a whole checkpoint."""
    loaded = DrafterCheckpoint.load(folder, make_draft_model("eagle").config)
    number = loaded.record["step"]
    for tensor in [*loaded.weights.values(), *loaded.state.values()]:
        assert (tensor == number).all()
    return number


class Gate(dict[str, Any]):
    """A record that can be written only while the gate is open: the writing thread waits there."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self.has_arrived, self.open = threading.Event(), threading.Event()

    def items(self) -> Any:
        self.has_arrived.set()
        assert self.open.wait(timeout=300)
        return super().items()


@pytest.fixture
def model() -> DraftModel:
    return make_draft_model("eagle")


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[AsyncDrafterCheckpointer]:
    checkpointer = AsyncDrafterCheckpointer(tmp_path / "drafter")
    yield checkpointer
    checkpointer._thread.shutdown()


def test_a_newer_save_replaces_a_waiting_one(
    saver: AsyncDrafterCheckpointer, model: DraftModel
) -> None:
    gate = Gate({"step": 0})
    saver.save(replace(numbered(model, 0), record=gate))
    assert gate.has_arrived.wait(timeout=300)
    bad: dict[str, Tensor] = {"fc.weight": torch.ones(1).to_sparse()}
    saver.save(replace(numbered(model, 1), weights=bad))  # an error, if it were written
    newest = numbered(model, 2)
    saver.save(newest)
    for tensor in newest.state.values():
        tensor.zero_()  # training goes on: the save is of before
    gate.open.set()
    saver.wait()
    assert number_in(saver.folder) == 2


def test_a_failed_write_is_logged_and_the_next_save_succeeds(
    saver: AsyncDrafterCheckpointer, model: DraftModel, caplog: pytest.LogCaptureFixture
) -> None:
    parent = saver.folder.parent
    shutil.rmtree(parent)
    parent.write_text("in the way")
    saver.save(numbered(model, 0))
    saver.wait()
    [line] = caplog.records
    assert "drafter was not written" in line.getMessage()
    assert "Not a directory" in line.getMessage()
    assert line.exc_info is None, "the console shows no traceback"
    parent.unlink()
    saver.save(numbered(model, 2))
    saver.close()
    assert number_in(saver.folder) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        saver.save(numbered(model, 3))


def test_a_bug_in_the_background_is_raised(
    saver: AsyncDrafterCheckpointer, model: DraftModel
) -> None:
    saver.save(replace(numbered(model, 0), record={"step": object()}))  # no JSON
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.close()


def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(model: DraftModel, tmp_path: Path) -> None:
    """25 kills, spread over the writes. Between two renames the old one is beside its place."""
    folder, old = tmp_path / "drafter", tmp_path / "drafter.old"

    def save_forever(start: int) -> None:
        checkpointer = AsyncDrafterCheckpointer(folder)
        for step in range(start, start + 10**6):
            checkpointer.save(numbered(model, step))
            checkpointer.wait()

    newest = -1
    for kill in range(25):
        process = multiprocessing.get_context("fork").Process(
            target=save_forever, args=(newest + 1,)
        )
        process.start()
        while not folder.exists() or json_step(folder) <= newest:
            time.sleep(0.0005)
        time.sleep(0.0007 * kill)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = folder if folder.exists() else old
        number = number_in(found)
        load_drafter(found, embedding_VD=model.embedding_VD, lm_head_VD=model.lm_head_VD)
        assert number > newest
        newest = number


def json_step(folder: Path) -> int:
    """The step of a folder that another process replaces at any time, or -1 while it is away."""
    try:
        return json.loads((folder / "training" / "record.json").read_text())["step"]
    except FileNotFoundError:
        return -1


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a folder with training/record\.json"):
        DrafterCheckpoint.load(tmp_path, make_draft_model("eagle").config)
