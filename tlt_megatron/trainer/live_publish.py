"""Drafters on their way to engines that are still decoding: `spot.publish=live`.

The leader of a session offers, ranks with unfinished rollouts take. Rollouts do not depend on the drafter, so nothing has to
be agreed: who takes a drafter later only decodes slower. The one thing to know: weights go through a file under the run
folder, which all hosts share, and the store carries a counter alone, which a busy rank reads a few times per second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

_COUNTER = "offers"
_POLL_S = 0.25
_KEPT_OFFERS = 2  # a rank that has just read the counter must still find the file


class LiveChannel:
    """One way, from whoever leads to all. Every rank has one; offers are numbered over the whole run."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        self._store = dist.PrefixStore("live", store)
        self._folder = folder
        self._taken = 0
        self._polled_at = 0.0

    def offer(self, weights: Mapping[str, Tensor]) -> None:
        """Put a drafter up. One rank at a time."""
        number = self._count() + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(number)
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(copies, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        self._store.add(_COUNTER, 1)
        self._path(number - _KEPT_OFFERS).unlink(missing_ok=True)

    def poll(self) -> dict[str, Tensor] | None:
        """The newest drafter, if one was offered since the last time; asks the store a few times per second at most."""
        now = time.monotonic()
        if now - self._polled_at < _POLL_S:
            return None
        self._polled_at = now
        return self.take()

    def take(self) -> dict[str, Tensor] | None:
        """The newest drafter, if one was offered since the last time."""
        while (number := self._count()) != self._taken:
            path = self._path(number)
            if path.is_file():
                self._taken = number
                return load_file(path)
            # Newer offers have come since the counter was read, and this one has gone.
        return None

    def _count(self) -> int:
        return self._store.add(_COUNTER, 0)

    def _path(self, number: int) -> Path:
        return self._folder / f"offer_{number:07d}.safetensors"
