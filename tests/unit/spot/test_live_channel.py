"""Drafters that reach ranks in the middle of a rollout: the newest arrives, once; what cannot be read is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tlt_megatron.spot.live_channel import LiveChannel


def weights(value: int) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((2, 3), float(value)), "fc.bias": torch.arange(3.0) + value}


def test_the_newest_offer_is_taken_once_by_everyone(tmp_path: Path) -> None:
    store = dist.HashStore()
    leader, busy = LiveChannel(store, tmp_path), LiveChannel(store, tmp_path)
    assert busy.take() is None
    for number in range(1, 6):
        leader.offer(weights(number))
    for channel in (busy, leader, LiveChannel(store, tmp_path)):
        taken = channel.take()
        assert taken is not None
        for name, tensor in weights(5).items():
            assert torch.equal(taken.weights[name], tensor)
        assert channel.take() is None
    leader.offer(weights(6))
    taken = busy.take()
    assert taken is not None
    assert torch.equal(taken.weights["fc.bias"], weights(6)["fc.bias"])
    assert len(list(tmp_path.iterdir())) == 2


def test_polling_does_not_ask_the_store_at_every_pass(tmp_path: Path) -> None:
    store = dist.HashStore()
    channel = LiveChannel(store, tmp_path)
    assert channel.poll() is None
    LiveChannel(store, tmp_path).offer(weights(1))
    assert channel.poll() is None  # too soon after the last time
    assert channel.take() is not None


def test_an_offer_whose_file_this_host_does_not_see_is_skipped_at_the_end_of_the_phase(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    leader, elsewhere = LiveChannel(store, tmp_path / "a"), LiveChannel(store, tmp_path / "b")
    leader.offer(weights(1))
    for _ in range(2):
        assert elsewhere.take() is None
    assert not caplog.records
    elsewhere.skip_unread()
    assert "live drafter 1 is skipped" in caplog.text
    assert "offer_0000001.safetensors cannot be read here" in caplog.text
    caplog.clear()
    elsewhere.skip_unread()
    assert not caplog.records
    leader.offer(weights(2))
    assert elsewhere.take() is None
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the file system shows it late
    taken = elsewhere.take()
    assert taken is not None
    assert taken.number == 2


def test_a_file_that_does_not_hold_what_was_offered_is_not_taken(tmp_path: Path) -> None:
    store = dist.HashStore()
    leader, busy = LiveChannel(store, tmp_path), LiveChannel(store, tmp_path)
    leader.offer(weights(1))
    path = tmp_path / "offer_0000001.safetensors"
    whole = path.read_bytes()
    for spoiled in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2]):
        path.write_bytes(spoiled)
        assert busy.take() is None
    path.write_bytes(whole)
    assert busy.take() is not None


def test_an_offer_that_cannot_be_written_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    (tmp_path / "file").write_text("in the way of the folder")
    assert not LiveChannel(store, tmp_path / "file").offer(weights(1))
    assert "live drafter 1 is not offered" in caplog.text
    assert LiveChannel(store, tmp_path).offer(weights(2))
    taken = LiveChannel(store, tmp_path).take()
    assert taken is not None
    assert taken.number == 1
