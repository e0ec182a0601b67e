"""Training data of a rank's drafter: sequences with the target's states, bounded in bytes.

Ranks go idle before the long responses finish, so this step alone would bias the drafter to short
ones. Every second batch is filled from the long tail of earlier steps first (TLT, arXiv 2511.16665,
section 4.2). If steps have few responses, raise `spot.keep_steps`; else the drafter overfits.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.packing import DraftBatch, pack_batch
from tlt_megatron.saved_files import amount
from tlt_megatron.types import DraftSequence

log = logging.getLogger(__name__)

_TENSORS = ("token_ids", "features", "final_hidden", "loss_mask")


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A sequence in the buffer."""

    key: str  # hash of its tokens, which also puts samples into a random order
    sequence: DraftSequence
    step: int  # RL step of its rollout
    is_tail: bool = False  # one of the longest of an earlier step, which hold half of its rows
    num_uses: int = 0  # batches with it that were trained on

    @property
    def num_rows(self) -> int:
        return self.sequence.num_rows

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.sequence).values())

    def window(self, max_rows: int) -> DraftSequence:
        """Return the part for the next batch: all, or one window of `max_rows` rows, in turn."""
        if self.num_rows <= max_rows:
            return self.sequence
        turn = self.num_uses % -(-self.num_rows // max_rows)
        return self.sequence.window(min(turn * max_rows, self.num_rows - max_rows), max_rows)


class DataBuffer:
    """Sequences of this RL step and the last `keep_steps`, on the CPU, within `data_bytes`.

    Example: `start_step(7)`; `add(sequence)` as responses finish; `next_batch(4096)` and
    `mark_trained()` while idle; `start_step(8)`. The order of batches depends only on the samples
    and the calls, so a restored buffer gives the same batches.

    Eviction order: short sequences of earlier steps; long tails, while above half of `data_bytes`;
    sequences of this step; the other long tails. Within each group the oldest step goes first, then
    the shortest sequence.
    """

    def __init__(self, section: SpotSection, dtype: torch.dtype = torch.float32) -> None:
        self.step = 0
        self.num_bytes = 0
        self.dtype = dtype  # the dtype of the states
        self.max_bytes = section.data_bytes
        self._keep_steps = section.keep_steps
        self._samples: dict[str, _Sample] = {}  # those trained on: in the order of last use
        self._num_batches = 0  # batches that were trained on
        self._given: list[_Sample] = []  # samples of the last batch, until it was trained on

    @property
    def has_new(self) -> bool:
        """Return whether it holds a sequence of this step."""
        return any(sample.step == self.step for sample in self._samples.values())

    def start_step(self, step: int) -> None:
        """Begin RL step `step`: find the long tail of the last step, and evict what is too old."""
        assert step >= self.step, (step, self.step)
        for sample in [*self._samples.values()]:
            if sample.step < step - self._keep_steps:
                self._remove(sample)
        ended = [s for s in self._samples.values() if self.step == s.step < step]
        num_rows, num_tail = sum(sample.num_rows for sample in ended), 0
        for sample in sorted(ended, key=lambda s: (-s.num_rows, s.key)):
            sample.is_tail = 2 * num_tail < num_rows
            num_tail += sample.num_rows
        self.step = step

    def add(self, sequence: DraftSequence) -> DraftSequence | None:
        """Add a copy of a sequence of this step, and return the copy. It replaces an earlier one
        with the same tokens. None for a sequence without rows or above `data_bytes`.
        """
        if sequence.num_rows < 1:
            return None
        sample = self._sample(sequence, self.step)
        if sample.num_bytes > self.max_bytes:
            size, budget = sample.num_bytes, self.max_bytes
            log.warning("a sequence is refused: its %d bytes exceed data_bytes=%d", size, budget)
            return None
        before = self._samples.get(sample.key)
        if before is not None:
            sample.num_uses = before.num_uses
            self._remove(before)
        self._insert(sample)
        return sample.sequence

    def next_batch(self, max_tokens: int) -> DraftBatch | None:
        """Return a batch of at most `max_tokens` rows, or None if there is nothing to train on.

        Long tail and rest come first in turn. In each, new sequences come first, and then those
        that were not used for the longest time. A sequence longer than a batch gives its next
        window. Until `mark_trained` is called, the next batch is the same.
        """
        order = sorted(self._samples.values(), key=lambda s: (1, "") if s.num_uses else (0, s.key))
        is_tail_first = self._num_batches % 2 == 0
        first = [sample for sample in order if sample.is_tail == is_tail_first]
        second = [sample for sample in order if sample.is_tail != is_tail_first]
        if not first:
            first, second = second, first
        self._given = _fit(first, max_tokens, at_least=1)
        room = max_tokens - sum(sample.num_rows for sample in self._given)
        self._given += _fit(second, room)
        if not self._given:
            return None
        return pack_batch([sample.window(max_tokens) for sample in self._given])

    def mark_trained(self) -> None:
        """Count the last batch as trained on."""
        self._num_batches += 1
        for sample in self._given:
            sample.num_uses += 1
            self._samples[sample.key] = self._samples.pop(sample.key)
        self._given = []

    def state_dict(self) -> dict[str, Any]:
        """Return {"tensors": by name, "values": JSON-able}. The tensors never change."""
        samples = self._samples.values()
        names = ("key", "step", "is_tail", "num_uses")
        return {
            "tensors": {
                f"{sample.key}.{name}": tensor
                for sample in samples
                for name, tensor in _tensors(sample.sequence).items()
            },
            "values": {
                "step": self.step,
                "num_batches": self._num_batches,
                "samples": [
                    {name: getattr(s, name) for name in names}
                    | {"loss_start": s.sequence.loss_start}
                    for s in samples
                ],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content with the result of `state_dict`. Evicts what does not fit."""
        tensors, values = state["tensors"], state["values"]
        counts = [int(amount(values[name])) for name in ("step", "num_batches")]
        samples = []
        for record in values["samples"]:
            parts = {name: tensors.get(f"{record['key']}.{name}") for name in _TENSORS}
            sequence = DraftSequence(loss_start=int(amount(record["loss_start"])), **parts)
            sample = self._sample(sequence, int(amount(record["step"])))
            sample.is_tail = bool(record["is_tail"])
            sample.num_uses = int(amount(record["num_uses"]))
            samples.append(sample)
        self.step, self._num_batches = counts
        self._samples, self.num_bytes, self._given = {}, 0, []
        for sample in samples:
            self._insert(sample)

    def _sample(self, sequence: DraftSequence, step: int) -> _Sample:
        own = _compact(sequence, self.dtype)
        key = hashlib.blake2b(own.token_ids.numpy().tobytes(), digest_size=16).hexdigest()
        return _Sample(key=key, sequence=own, step=step)

    def _insert(self, sample: _Sample) -> None:
        """Insert a sample, and evict others or itself until all fit."""
        self._samples[sample.key] = sample
        self.num_bytes += sample.num_bytes
        while self.num_bytes > self.max_bytes:
            self._remove(self._first_to_go())

    def _first_to_go(self) -> _Sample:
        """Return the sample to evict, in the order that the class docstring gives."""
        samples = self._samples.values()
        tail_bytes = sum(sample.num_bytes for sample in samples if sample.is_tail)
        tail_order = 3 if 2 * tail_bytes <= self.max_bytes else 1

        def rank(sample: _Sample) -> tuple[int, int, int, str]:
            order = 2 if sample.step == self.step else 0
            order = tail_order if sample.is_tail else order
            return order, sample.step, sample.num_rows, sample.key

        return min(samples, key=rank)

    def _remove(self, sample: _Sample) -> None:
        del self._samples[sample.key]
        self.num_bytes -= sample.num_bytes


def _fit(order: Sequence[_Sample], max_rows: int, *, at_least: int = 0) -> list[_Sample]:
    """Return the first samples of `order` that fit into `max_rows`, or its first `at_least`.

    It ends at the first one that does not fit: if shorter ones went before, they would come more
    often than long ones.
    """
    total = itertools.accumulate(sample.num_rows for sample in order)
    num_fitting = sum(num_rows <= max_rows for num_rows in total)
    return list(order[: max(num_fitting, at_least)])


def _tensors(sequence: DraftSequence) -> dict[str, Tensor]:
    values = {name: getattr(sequence, name) for name in _TENSORS}
    return {name: tensor for name, tensor in values.items() if tensor is not None}


def _compact(sequence: DraftSequence, dtype: torch.dtype) -> DraftSequence:
    """Return a CPU copy in `dtype`, without the last state and not a view."""
    num_states = sequence.token_ids.numel() - 1

    def states(tensor: Tensor) -> Tensor:
        kept = tensor.detach()[:num_states]
        return torch.empty(kept.shape, dtype=dtype).copy_(kept)

    hidden, mask = sequence.final_hidden, sequence.loss_mask
    return DraftSequence(
        token_ids=sequence.token_ids.detach().to("cpu", torch.int64, copy=True),
        features=states(sequence.features),
        final_hidden=None if hidden is None else states(hidden),
        loss_start=sequence.loss_start,
        loss_mask=None if mask is None else mask.to("cpu", copy=True),
        request=sequence.request,
    )
