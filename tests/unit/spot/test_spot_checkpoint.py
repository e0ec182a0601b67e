"""Checkpoints written in the background: what is in them, what a crash or a full queue leaves, how errors surface."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.slow_draft import HIDDEN_SIZE, VOCAB_SIZE, make_draft_model, make_sequence
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import load_draft_config, load_drafter, load_trainer_state
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.engines.embedded.freed_weights import FreedWeights
from tlt_megatron.models.draft_model import DraftConfig, DraftModel, fingerprint_target
from tlt_megatron.spot.drafter_checkpoint import (
    AsyncDrafterCheckpointer,
    find_best,
    find_newest,
    load_checkpoint,
    write_checkpoint,
)


class GatedModel:
    """A drafter whose config can be read only while `gate` is open: the writing thread waits there."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.gate = threading.Event()
        self.has_arrived = threading.Event()

    @property
    def config(self) -> DraftConfig:
        self.has_arrived.set()
        assert self.gate.wait(timeout=300)
        return self._model.config

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def make_trainer(architecture: str = "eagle") -> DrafterTrainer:
    section = DrafterSection(algorithm=architecture)
    return DrafterTrainer(make_draft_model(architecture), section)


def state_of(model: DraftModel, number: float) -> dict[str, Tensor]:
    """A state whose every number is `number`."""
    state = {f"model.{n}": torch.full_like(p, number) for n, p in model.state_dict().items()}
    return state | {"exp_avg.fc.weight": torch.full((3, 3), number)}


@pytest.fixture
def model() -> DraftModel:
    return make_draft_model("eagle")


@pytest.fixture
def gated(
    model: DraftModel, tmp_path: Path
) -> Iterator[tuple[AsyncDrafterCheckpointer, GatedModel]]:
    """A checkpointer that is busy with save 0 until the gate opens."""
    proxy = GatedModel(model)
    checkpointer = AsyncDrafterCheckpointer(tmp_path, proxy, keep=9)  # type: ignore[arg-type]
    checkpointer.save(state_of(model, 0), {"step": 0})
    assert proxy.has_arrived.wait(timeout=300)
    yield checkpointer, proxy
    proxy.gate.set()
    checkpointer.close()


def steps_in(root: Path) -> list[object]:
    return [load_checkpoint(folder).record["step"] for folder in sorted(root.glob("save_*"))]


@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(
    architecture: str, tmp_path: Path
) -> None:
    straight = make_trainer(architecture)
    batch = pack_batch([make_sequence(straight.model, 9), make_sequence(straight.model, 6, seed=1)])
    straight.step(batch)
    checkpointer = AsyncDrafterCheckpointer(tmp_path, straight.model)
    checkpointer.save(straight.state_dict(), {"step": 1})
    expected = straight.step(batch)  # while it is written: the snapshot is of before
    checkpointer.close()
    folder = find_newest(tmp_path)
    assert folder is not None
    model = straight.model
    tensors = {"embedding_VD": model.embedding_VD, "lm_head_VD": model.lm_head_VD}
    resumed = DrafterTrainer(
        load_drafter(folder, dtype=torch.float64, **tensors),
        DrafterSection(algorithm=architecture),
    )
    resumed.load_state_dict(load_checkpoint(folder).state)
    assert resumed.step(batch) == expected
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    loaded = load_trainer_state(folder)  # as a drafter folder made elsewhere is read
    assert loaded is not None
    assert loaded.keys() == straight.state_dict().keys()


def test_nothing_of_the_target_is_written(tmp_path: Path) -> None:
    trainer = make_trainer()
    checkpointer = AsyncDrafterCheckpointer(tmp_path, trainer.model)
    checkpointer.save(trainer.state_dict(), {})
    checkpointer.close()
    shapes = []
    for file in tmp_path.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            shapes += [tuple(handle.get_slice(name).get_shape()) for name in handle.keys()]  # noqa: SIM118
    assert len(shapes) == len(trainer.state_dict())
    assert (VOCAB_SIZE, HIDDEN_SIZE) not in shapes
    state = trainer.state_dict() | {"model.embed_tokens.weight": trainer.model.embedding_VD}
    again = AsyncDrafterCheckpointer(tmp_path, trainer.model)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: must hold exactly"):
        again.save(state, {})


def test_record_and_extra_tensors_come_back(model: DraftModel, tmp_path: Path) -> None:
    record: dict = {"step": 3, "accept_length": 2.5, "nested": {"a": [1, None]}}
    target = fingerprint_target(model.embedding_VD)
    extra = {"publisher": {"published.x": torch.ones(2)}}
    write_checkpoint(
        tmp_path / "part", model, state_of(model, 1), record, target=target, extra=extra
    )
    loaded = load_checkpoint(tmp_path / "part")
    assert loaded.record == record
    assert torch.equal(loaded.extra["publisher"]["published.x"], torch.ones(2))
    checkpointer = AsyncDrafterCheckpointer(tmp_path / "drafter", model)
    checkpointer.save(state_of(model, 1), record)
    record["nested"]["a"] = 4  # the caller's own again
    checkpointer.wait()
    checkpointer.save(state_of(model, 2), record)  # in the same memory
    checkpointer.close()
    first, second = (load_checkpoint(path) for path in sorted(checkpointer.root.glob("save_*")))
    assert first.record == {"step": 3, "accept_length": 2.5, "nested": {"a": [1, None]}}
    assert second.record["nested"] == {"a": 4}
    for one, number in ((first, 1), (second, 2)):
        assert one.extra == {}
        assert all((tensor == number).all() for tensor in one.state.values())


def test_the_newest_and_the_best_stay(model: DraftModel, tmp_path: Path) -> None:
    checkpointer = AsyncDrafterCheckpointer(tmp_path, model, keep=2)
    assert find_newest(tmp_path) is find_best(tmp_path) is None
    for step in range(6):
        checkpointer.save(state_of(model, step), {"step": step}, is_best=step in (0, 1))
        checkpointer.wait()
    assert steps_in(tmp_path) == [1, 4, 5]
    best, newest = find_best(tmp_path), find_newest(tmp_path)
    assert best is not None
    assert newest is not None
    assert load_checkpoint(best).record["step"] == 1
    assert load_checkpoint(newest).record["step"] == 5
    again = AsyncDrafterCheckpointer(tmp_path, model, keep=2)  # the next run: numbers go on
    again.save(state_of(model, 2), {"step": 2})
    again.close()
    assert steps_in(tmp_path) == [1, 5, 2]
    checkpointer.close()


def test_a_newer_save_replaces_a_waiting_one(
    gated: tuple[AsyncDrafterCheckpointer, GatedModel], model: DraftModel, tmp_path: Path
) -> None:
    checkpointer, proxy = gated
    for step in (1, 2, 3):
        checkpointer.save(state_of(model, step), {"step": step})
    proxy.gate.set()
    checkpointer.wait()
    assert steps_in(tmp_path) == [0, 3]
    newest = find_newest(tmp_path)
    assert newest is not None
    state = load_checkpoint(newest).state
    assert all((tensor == 3).all() for tensor in state.values())


def test_a_waiting_best_gives_way_to_a_better_one_alone(
    gated: tuple[AsyncDrafterCheckpointer, GatedModel], model: DraftModel, tmp_path: Path
) -> None:
    checkpointer, proxy = gated
    for step, is_best in ((1, True), (2, False), (3, True), (4, False)):
        checkpointer.save(state_of(model, step), {"step": step}, is_best=is_best)
    proxy.gate.set()
    checkpointer.wait()
    assert steps_in(tmp_path) == [0, 3, 4]
    best = find_best(tmp_path)
    assert best is not None
    assert load_checkpoint(best).record["step"] == 3


def test_a_checkpoint_never_replaces_another(model: DraftModel, tmp_path: Path) -> None:
    target = fingerprint_target(model.embedding_VD)
    folder = tmp_path / "iter_0000001.tmp" / "drafter"
    folder.parent.mkdir()
    write_checkpoint(folder, model, state_of(model, 7), {"step": 7}, target=target)
    with pytest.raises(OSError, match="must not exist"):
        write_checkpoint(folder, model, state_of(model, 9), {"step": 9}, target=target)
    assert load_checkpoint(folder).record == {"step": 7}
    assert list(folder.parent.iterdir()) == [folder]  # nothing half done


def test_a_failed_write_is_logged_and_the_next_save_succeeds(
    model: DraftModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "drafter"
    checkpointer = AsyncDrafterCheckpointer(root, model)
    shutil.rmtree(root)
    root.write_text("in the way")
    checkpointer.save(state_of(model, 0), {"step": 0})
    checkpointer.wait()
    [line] = caplog.records
    assert "drafter/save_0000000 was not written" in line.getMessage()
    assert "Not a directory" in line.getMessage()
    assert line.exc_info is None, "the console shows no traceback"
    root.unlink()
    checkpointer.save(state_of(model, 2), {"step": 2})
    checkpointer.close()
    assert steps_in(root) == [2]
    with pytest.raises(RuntimeError, match="after shutdown"):
        checkpointer.save(state_of(model, 3), {"step": 3})


def test_a_bug_in_the_background_is_raised(model: DraftModel, tmp_path: Path) -> None:
    checkpointer = AsyncDrafterCheckpointer(tmp_path, model)
    checkpointer.save(state_of(model, 0), {"step": object()})  # no JSON
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer.close()


def test_a_kill_at_any_instant_leaves_whole_checkpoints(model: DraftModel, tmp_path: Path) -> None:
    """25 kills, spread over the writes; what is found must be of one save, and newer each time."""

    def save_forever(start: int) -> None:
        checkpointer = AsyncDrafterCheckpointer(tmp_path, model, keep=1)
        for step in range(start, start + 10**6):
            checkpointer.save(state_of(model, step), {"step": step}, is_best=step % 3 == 0)
            checkpointer.wait()

    newest_step = -1
    for kill in range(25):
        process = multiprocessing.get_context("fork").Process(
            target=save_forever, args=(newest_step + 1,)
        )
        process.start()
        before = newest_step
        while (newest := find_newest(tmp_path)) is None or _step_in_name(newest) == before:
            time.sleep(0.0005)
        time.sleep(0.0007 * kill)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        newest = find_newest(tmp_path)
        assert newest is not None
        assert (find_best(tmp_path) or newest).is_dir()
        for folder in (path for path in tmp_path.glob("save_*") if path.suffix != ".tmp"):
            loaded = load_checkpoint(folder)
            assert all((tensor == loaded.record["step"]).all() for tensor in loaded.state.values())
            load_drafter(folder, embedding_VD=model.embedding_VD, lm_head_VD=model.lm_head_VD)
        newest_step = load_checkpoint(newest).record["step"]
        assert newest_step == _step_in_name(newest) > before
    AsyncDrafterCheckpointer(tmp_path, model).close()
    assert not list(tmp_path.glob("*.tmp"))


def _step_in_name(folder: Path) -> int:
    """Here every step is saved once, so the serial number is the step."""
    return int(folder.name.removeprefix("save_"))


def test_what_was_saved_does_not_need_the_borrowed_embedding_any_more(
    gated: tuple[AsyncDrafterCheckpointer, GatedModel], model: DraftModel, tmp_path: Path
) -> None:
    """The engine goes to sleep, and its memory with it, while a save waits."""
    checkpointer, proxy = gated
    checkpointer.save(state_of(model, 1), {"step": 1})
    borrowed = [model.embedding_VD, model.lm_head_VD]
    contents = [tensor.clone() for tensor in borrowed]
    freed = FreedWeights(borrowed)
    proxy.gate.set()
    checkpointer.wait()
    freed.restore()
    for tensor, content in zip(borrowed, contents, strict=True):
        tensor.copy_(content)
    newest = find_newest(tmp_path)
    assert newest is not None
    assert steps_in(tmp_path) == [0, 1]
    assert load_draft_config(newest).target == fingerprint_target(model.embedding_VD)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a folder with training/record\.json"):
        load_checkpoint(tmp_path)
