"""Training data of a rank's drafter: sequences with the target's states, bounded in bytes.

Ranks go idle before the long responses finish, so this step alone would bias the drafter to short
ones. A share of every batch comes from the long tail of earlier steps (TLT, arXiv 2511.16665,
section 4.2). If steps have few responses, raise `spot.keep_steps`; else the drafter overfits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.packing import (
    DraftBatch,
    DraftSequence,
    choose_slice,
    pack_batch,
    pack_sequences,
)

log = logging.getLogger(__name__)

_TENSORS = ("token_ids", "features", "final_hidden", "loss_mask")


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A sequence in the buffer. Only `epoch` changes."""

    key: str  # hash of its tokens: the same on every rank and in every run
    sequence: DraftSequence
    step: int  # RL step of its rollout
    is_held_out: bool
    num_rows: int
    num_bytes: int
    epoch: int = 0  # batches that it was in; a new sequence starts at the epoch of its pool

    def window(self, max_rows: int) -> DraftSequence:
        """Return the part for the next batch: all, or one window of `max_rows` rows, in turn."""
        if self.num_rows <= max_rows:
            return self.sequence
        turn = self.epoch % -(-self.num_rows // max_rows)
        return self.sequence.window(min(turn * max_rows, self.num_rows - max_rows), max_rows)


class DataBuffer:
    """Sequences of this RL step and the last `keep_steps`, on the CPU, within `data_bytes`.

    Example: `start_step(7)`; `add(sequence, 7)` as responses finish; `next_batch(4096)` while idle;
    `start_step(8)`. The order of batches depends only on the samples and the calls, so a
    restored buffer gives the same batches. The long tail of an earlier step is its longest
    sequences, which together hold half of its rows.

    Eviction order: short sequences of earlier steps; long tails, while above `long_tail_share` of
    `data_bytes`; sequences of this step; the other long tails. Within each group the oldest step
    goes first, then the shortest sequence.
    """

    def __init__(
        self,
        section: SpotSection,
        dtype: torch.dtype = torch.float32,
        *,
        long_tail_share: float = 0.5,
        holdout_share: float = 0.05,
    ) -> None:
        """`long_tail_share` of a batch comes from the longest responses of earlier steps.

        `holdout_share` of the samples are never trained on, and compare candidates.
        """
        self.step = 0
        self.num_bytes = 0
        self.dtype = dtype  # of the states
        self._section = section
        self._long_tail_share = long_tail_share
        self._holdout_share = holdout_share
        self._samples: dict[str, _Sample] = {}
        self._rows_seen: dict[int, dict[str, int]] = {}  # by step and key, evicted samples included
        self._tail_starts: dict[int, int] = {}  # by step: fewest rows in its long tail
        self._tail_balance = 0.0  # rows that batches owe the long tail to reach its share
        self._last_batch: tuple[list[_Sample], float] = ([], 0.0)  # with the balance before it

    @property
    def has_new(self) -> bool:
        """Return whether it holds a sequence of this step."""
        return any(sample.step == self.step for sample in self._samples.values())

    def start_step(self, step: int) -> None:
        """Begin RL step `step`, and evict sequences older than `keep_steps`."""
        if step < self.step:
            raise ValueError(f"step={step}: the buffer is at step {self.step} already")
        oldest = step - self._section.keep_steps
        for sample in [s for s in self._samples.values() if s.step < oldest]:
            self._remove(sample)
        self._rows_seen = {s: rows for s, rows in self._rows_seen.items() if s >= oldest}
        self._find_tails()
        self._last_batch = ([], self._tail_balance)
        tail, _ = self._pools()
        known, running = {s.key for s in tail}, min((s.epoch for s in tail), default=0)
        self.step = step
        for sample in self._samples.values():
            if tail and sample.key not in known and self._is_tail(sample):
                sample.epoch = running  # its epoch in the other pool does not apply here

    def add(self, sequence: DraftSequence, step: int) -> bool:
        """Add a copy of a sequence from RL step `step`. Returns whether the buffer keeps it.

        A sequence with the same tokens replaces the earlier one. ValueError for a step that
        `start_step` has not begun.
        """
        if step > self.step:
            raise ValueError(
                f"step={step}: the buffer is at step {self.step}; start_step comes first"
            )
        sample = self._sample(_compact(sequence, self.dtype), step)
        if step < self.step - self._section.keep_steps:
            return _refuse(f"it is of step {step}, and this is step {self.step}")
        if sample.num_rows < 1:
            return _refuse(f"its {sequence.token_ids.numel()} tokens make no row")
        if sample.num_bytes > self._section.data_bytes:
            budget = self._section.data_bytes
            return _refuse(f"its {sample.num_bytes} bytes exceed data_bytes={budget}")
        before = self._samples.get(sample.key)
        if before is not None:
            self._remove(before)
            sample.epoch = before.epoch
        self._rows_seen.setdefault(step, {})[sample.key] = sample.num_rows
        if step < self.step:
            self._find_tails()
        # Start at the current epoch of its pool: with epoch 0 it would repeat before the others.
        is_tail = self._is_tail(sample)
        peers = [
            other.epoch
            for other in self._samples.values()
            if not other.is_held_out and self._is_tail(other) == is_tail
        ]
        sample.epoch = max(sample.epoch, min(peers, default=0))
        return self._insert(sample)

    def next_batch(self, max_tokens: int) -> DraftBatch | None:
        """Return a batch of at most `max_tokens` rows, or None if there is nothing to train on.

        A longer sequence gives its next window. Within a pool (long tail, rest), a sequence repeats
        only after all others were used.
        """
        tail, rest = self._pools()
        if not tail and not rest:
            return None
        share = self._long_tail_share
        wanted = share * max_tokens + self._tail_balance if rest else float(max_tokens)
        picked: list[_Sample] = []
        self._last_batch = (picked, self._tail_balance)
        _pick(picked, tail, max_tokens, wanted)
        _pick(picked, rest, max_tokens)
        _pick(picked, tail, max_tokens)  # if the rest could not fill the batch
        if tail and rest:
            rows = {s.key: min(s.num_rows, max_tokens) for s in picked}
            num_tail = sum(rows[s.key] for s in picked if self._is_tail(s))
            owed = self._tail_balance + share * sum(rows.values()) - num_tail
            self._tail_balance = max(-float(max_tokens), min(float(max_tokens), owed))
        else:
            self._tail_balance = 0.0
        batch = pack_batch([sample.window(max_tokens) for sample in picked])
        for sample in picked:
            sample.epoch += 1
        return batch

    def put_back(self) -> None:
        """Undo the last `next_batch`, for a batch that was not trained on. Call it at once."""
        picked, self._tail_balance = self._last_batch
        for sample in picked:
            sample.epoch -= 1
        self._last_batch = ([], self._tail_balance)

    def holdout_batches(
        self, max_tokens: int, *, has_new: bool = False, max_rows: int | None = None
    ) -> list[DraftBatch]:
        """Return the hold-out sequences in batches of `max_tokens` rows. They are never trained on.

        `has_new` adds all sequences of this step: a drafter of an earlier step has not trained on
        them. `max_rows` limits the rows: `choose_slice` takes the newest first, of all lengths.
        """
        unseen = sorted(
            (
                s
                for s in self._samples.values()
                if s.is_held_out or (has_new and s.step == self.step)
            ),
            key=lambda s: (-s.step, s.key),
        )
        if max_rows is not None:
            steps, rows = [s.step for s in unseen], [s.num_rows for s in unseen]
            unseen = [unseen[index] for index in choose_slice(steps, rows, max_rows)]
        return pack_sequences([sample.sequence for sample in unseen], max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return {"tensors": by name, "values": JSON-able}. The tensors never change."""
        samples = list(self._samples.values())
        tensors = {
            f"{sample.key}.{name}": tensor
            for sample in samples
            for name, tensor in _tensors(sample.sequence).items()
        }
        values = {
            "step": self.step,
            "tail_balance": self._tail_balance,
            "rows_seen": [[step, dict(rows)] for step, rows in self._rows_seen.items()],
            "samples": [
                {
                    "key": s.key,
                    "step": s.step,
                    "epoch": s.epoch,
                    "loss_start": s.sequence.loss_start,
                }
                for s in samples
            ],
        }
        return {"tensors": tensors, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content with the result of `state_dict`. Evicts what does not fit."""
        tensors, values = state["tensors"], state["values"]
        self.step = values["step"]
        self._tail_balance = values["tail_balance"]
        self._rows_seen = {step: dict(rows) for step, rows in values["rows_seen"]}
        self._find_tails()
        self._last_batch = ([], self._tail_balance)
        self._samples, self.num_bytes = {}, 0
        for record in values["samples"]:
            parts = {name: tensors.get(f"{record['key']}.{name}") for name in _TENSORS}
            sequence = DraftSequence(loss_start=record["loss_start"], **parts)
            sample = self._sample(_compact(sequence, self.dtype), record["step"])
            sample.epoch = record["epoch"]
            self._insert(sample)

    def _sample(self, sequence: DraftSequence, step: int) -> _Sample:
        tokens = sequence.token_ids.numpy().tobytes()
        key = hashlib.blake2b(tokens, digest_size=16).hexdigest()
        return _Sample(
            key=key,
            sequence=sequence,
            step=step,
            is_held_out=_hash(key) < self._holdout_share * 2**64,
            num_rows=sequence.num_rows,
            num_bytes=sum(tensor.nbytes for tensor in _tensors(sequence).values()),
        )

    def _pools(self) -> tuple[list[_Sample], list[_Sample]]:
        """Return the long tails of earlier steps and the rest, each in the order of use."""
        tail, rest = [], []
        for sample in sorted(self._samples.values(), key=self._turn):
            if not sample.is_held_out:
                is_apart = self._long_tail_share > 0 and self._is_tail(sample)
                (tail if is_apart else rest).append(sample)
        return tail, rest

    def _turn(self, sample: _Sample) -> tuple[int, int, str]:
        """Sort by epoch, then in a random order that the epoch fixes."""
        return sample.epoch, _hash(f"{sample.epoch}/{sample.key}"), sample.key

    def _find_tails(self) -> None:
        self._tail_starts = {
            step: _find_tail_start(rows.values()) for step, rows in self._rows_seen.items()
        }

    def _is_tail(self, sample: _Sample) -> bool:
        """Return whether it is in the long tail of an earlier step."""
        return sample.step < self.step and sample.num_rows >= self._tail_starts[sample.step]

    def _insert(self, sample: _Sample) -> bool:
        """Insert a sample, evict others if needed. Returns False if it is itself evicted."""
        while self.num_bytes + sample.num_bytes > self._section.data_bytes:
            victim = self._first_to_go([*self._samples.values(), sample])
            if victim is sample:
                return False
            self._remove(victim)
        self._samples[sample.key] = sample
        self.num_bytes += sample.num_bytes
        return True

    def _first_to_go(self, samples: Sequence[_Sample]) -> _Sample:
        """Return the sample to evict, in the order that the class docstring gives."""
        is_tail = {sample.key: self._is_tail(sample) for sample in samples}
        tail_bytes = sum(s.num_bytes for s in samples if is_tail[s.key])
        is_tail_kept = tail_bytes <= self._long_tail_share * self._section.data_bytes

        def rank(sample: _Sample) -> tuple[int, int, int, str]:
            order = 2  # a sample of this step
            if is_tail[sample.key]:
                order = 3 if is_tail_kept else 1
            elif sample.step < self.step:
                order = 0
            return order, sample.step, sample.num_rows, sample.key

        return min(samples, key=rank)

    def _remove(self, sample: _Sample) -> None:
        del self._samples[sample.key]
        self.num_bytes -= sample.num_bytes


def _refuse(why: str) -> bool:
    log.warning("a sequence is refused: %s", why)
    return False


def _pick(
    picked: list[_Sample], pool: Sequence[_Sample], max_tokens: int, wanted: float = float("inf")
) -> None:
    """Append new samples of `pool` in order, until `wanted` rows are added or no more fit.

    A sample that does not fit is skipped, and then no sample of a later epoch is taken. So the
    skipped one comes first in the next batch. The first sample of a batch may exceed `max_tokens`;
    the caller cuts it to a window.
    """
    room = max_tokens - sum(sample.num_rows for sample in picked)
    taken = {sample.key for sample in picked}
    passed_epoch: int | None = None
    for sample in pool:
        if sample.key in taken:
            continue
        if wanted <= 0 or room <= 0 or (passed_epoch is not None and sample.epoch > passed_epoch):
            return
        if sample.num_rows <= room or not picked:
            picked.append(sample)
            room -= sample.num_rows
            wanted -= sample.num_rows
        elif passed_epoch is None:
            passed_epoch = sample.epoch


def _find_tail_start(rows: Iterable[int]) -> int:
    """Return the smallest length among the longest sequences that hold half of all rows."""
    lengths = sorted(rows, reverse=True)
    total, held = sum(lengths), 0
    for length in lengths:
        held += length
        if 2 * held >= total:
            return length
    return 0


def _tensors(sequence: DraftSequence) -> dict[str, Tensor]:
    values = {name: getattr(sequence, name) for name in _TENSORS}
    return {name: tensor for name, tensor in values.items() if tensor is not None}


def _compact(sequence: DraftSequence, dtype: torch.dtype) -> DraftSequence:
    """Return a CPU copy in `dtype`, without the last state and not a view."""
    num_states = max(0, sequence.token_ids.numel() - 1)

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
    )


def _hash(text: str) -> int:
    """Return a 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
