"""Sends drafters to engines that are still decoding: `spot.publish=live`.

The leader of a session offers a drafter, and ranks with unfinished rollouts load it when they see
it: responses do not depend on the drafter. The weights go through a file under the run folder, which
all hosts share. The store holds number and checksum of the newest offer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_megatron.models.hf_io import checksum_tensors

log = logging.getLogger(__name__)

_NEWEST = "newest"  # key: "<number> <checksum>"
_NONE = "0 0"
_POLL_S = 0.25
_KEPT_OFFERS = 2  # a rank that has just read the number must still find its file


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOffer:
    """An offered drafter."""

    number: int  # counts all offers of the run, from 1
    checksum: int
    weights: dict[str, Tensor]


class LiveChannel:
    """One-way channel from the leader to all ranks. Every rank creates one."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        """`store` is a part of the job store that only this channel uses."""
        self._store = store
        self._folder = folder
        self._settled = 0  # number of the newest offer that was taken or skipped
        self._polled_at = -_POLL_S
        self._problem = "it was not read yet"  # why the newest offer was not taken
        store.compare_set(_NEWEST, "", _NONE)

    def offer(self, weights: dict[str, Tensor]) -> bool:
        """Offer a drafter on the CPU. Only one rank at a time may call it.

        Returns False, and logs why, if the file cannot be written.
        """
        number = self._newest()[0] + 1
        path = self._path(number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
        except (OSError, SafetensorError) as error:
            log.warning(
                "live drafter %d is not offered: %s cannot be written (%s)", number, path, error
            )
            return False
        self._store.set(_NEWEST, f"{number} {checksum_tensors(weights.items())}")
        self._path(number - _KEPT_OFFERS).unlink(missing_ok=True)
        return True

    def poll(self) -> LiveOffer | None:
        """Return the result of `take`, at most once per `_POLL_S` seconds; None in between."""
        now = time.monotonic()
        if now - self._polled_at < _POLL_S:
            return None
        self._polled_at = now
        return self.take()

    def take(self) -> LiveOffer | None:
        """Return the newest offer if it was not taken before, else None. Never waits.

        If the file cannot be read yet, the next call tries again: a shared file system may show it
        some seconds late.
        """
        number, checksum = self._newest()
        if number == self._settled:
            return None
        path = self._path(number)
        try:
            weights = load_file(path)
            if checksum_tensors(weights.items()) == checksum:
                self._settled = number
                return LiveOffer(number=number, checksum=checksum, weights=weights)
            problem = f"{path} does not hold what was offered (its checksum differs)"
        except (OSError, SafetensorError) as error:
            problem = f"{path} cannot be read here ({error})"
        self._problem = problem
        return None

    def skip_unread(self) -> None:
        """Skip the newest offer if it was not taken, with a warning. No rank may decode."""
        number, _ = self._newest()
        if number != self._settled:
            self._settled = number
            log.warning("live drafter %d is skipped: %s", number, self._problem)

    def _newest(self) -> tuple[int, int]:
        number, checksum = self._store.get(_NEWEST).decode().split()
        return int(number), int(checksum)

    def _path(self, number: int) -> Path:
        return self._folder / f"offer_{number:07d}.safetensors"
