"""Drafters that reach ranks in the middle of a rollout: the newest arrives, once, and old ones are not kept."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tlt_megatron.trainer.live_publish import LiveChannel


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
            assert torch.equal(taken[name], tensor)
        assert channel.take() is None
    leader.offer(weights(6))
    taken = busy.take()
    assert taken is not None
    assert torch.equal(taken["fc.bias"], weights(6)["fc.bias"])
    assert len(list(tmp_path.iterdir())) == 2


def test_polling_does_not_ask_the_store_at_every_pass(tmp_path: Path) -> None:
    store = dist.HashStore()
    channel = LiveChannel(store, tmp_path)
    assert channel.poll() is None
    LiveChannel(store, tmp_path).offer(weights(1))
    assert channel.poll() is None  # too soon after the last look
    assert channel.take() is not None
