"""What a rank's drafter trains on: the newest sequences with the target's states, bounded in bytes.

Filled by the rollout worker (responses of this step, as they finish) and by the log-prob pass (all lengths, from the hidden
state tap), emptied by nobody: spot sessions draw packed batches. The one thing to know is the one-step offset: ranks go idle
when short responses have finished and long ones have not, so training on this step alone would bias the drafter to the
short; a share of every batch comes from the long tail of the step before (TLT, arXiv 2511.16665, section 4.2), or of several:
where a step brings few responses (`spot.keep_steps`), a drafter that sees each of them only in two steps learns them by heart.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.holdout import choose_slice
from tlt_megatron.drafter.packing import DraftBatch, DraftSequence, pack_batch, pack_sequences

log = logging.getLogger(__name__)

_TENSORS = ("token_ids", "features", "final_hidden")
_COUNTS = (
    "num_added",
    "num_replaced",
    "num_evicted",  # for age or for room
    "num_evicted_old",  # for age
    "evicted_bytes",
    "num_batches",
)
_REFUSALS = ("oversized", "short", "stale")


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A sequence in the buffer. All but `epoch` stays as it is."""

    key: str  # of its tokens: the same on every rank and in every run
    sequence: DraftSequence
    step: int  # RL step of its rollout
    is_held_out: bool
    epoch: int = 0  # turns that it had, counting those before it came as if it had been there

    @property
    def num_rows(self) -> int:
        return self.sequence.num_rows

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.sequence)

    def window(self, max_rows: int) -> DraftSequence:
        """What is trained on in this turn: all of it, or the window of `max_rows` rows whose turn it is."""
        if self.num_rows <= max_rows:
            return self.sequence
        turn = self.epoch % -(-self.num_rows // max_rows)
        return self.sequence.window(min(turn * max_rows, self.num_rows - max_rows), max_rows)


class DataBuffer:
    """Keeps sequences of this RL step and the last `section.keep_steps`, on the CPU, in `dtype`, in `section.data_bytes`.

    Example: `start_step(7)`; `add(sequence, 7)` as responses finish; `next_batch(4096)` while idle; `start_step(8)`.
    The order of batches depends on the seed, the samples and the calls alone, so a restored buffer goes on as the
    saved one would have. What must go first when bytes are short: the short sequences of earlier steps, then their long
    tails down to `long_tail_share` of the budget, then this step's; always the oldest, and the shortest of them.
    """

    def __init__(self, section: SpotSection, dtype: torch.dtype = torch.float32) -> None:
        self.step = 0
        self.num_bytes = 0
        self._section = section
        self._dtype = dtype
        self._samples: dict[str, _Sample] = {}
        self._rows_seen: dict[int, dict[str, int]] = {}  # by step and key, whatever became of them
        self._tail_starts: dict[int, int] = {}  # by step: rows of its tail's shortest; where known
        self._tail_balance = 0.0  # rows that the long tail is owed
        self._last_batch: tuple[list[_Sample], float] = ([], 0.0)  # and the balance before it
        self._counts: Counter[str] = Counter()

    def start_step(self, step: int) -> None:
        """Begin RL step `step`: what was this step's becomes the last step's, and too old sequences go."""
        if step < self.step:
            raise ValueError(f"step={step}: the buffer is at step {self.step} already")
        oldest = step - self._section.keep_steps
        for sample in [s for s in self._samples.values() if s.step < oldest]:
            self._evict(sample)
            self._counts["num_evicted_old"] += 1
        self._rows_seen = {s: rows for s, rows in self._rows_seen.items() if s >= oldest}
        self._tail_starts = {}
        self._last_batch = ([], self._tail_balance)
        tail, _ = self._pools()
        known, running = {s.key for s in tail}, min((s.epoch for s in tail), default=0)
        self.step = step
        for sample in self._samples.values():
            if tail and sample.key not in known and self._is_tail(sample):
                sample.epoch = running  # the other pool's says nothing of its turn in this one

    def add(self, sequence: DraftSequence, step: int) -> bool:
        """Take a copy of a sequence that was rolled out in RL step `step`; whether it stays.

        The same tokens again replace what was there. ValueError for a step that `start_step` has not begun.
        """
        if step > self.step:
            raise ValueError(
                f"step={step}: the buffer is at step {self.step}; start_step comes first"
            )
        sequence = _compact(sequence, self._dtype)
        num_bytes = _num_bytes(sequence)
        if step < self.step - self._section.keep_steps:
            return self._refuse("stale", f"it is of step {step}, and this is step {self.step}")
        if sequence.num_rows < 1:
            return self._refuse("short", f"its {sequence.token_ids.numel()} tokens make no row")
        if num_bytes > self._section.data_bytes:
            budget = self._section.data_bytes
            return self._refuse("oversized", f"its {num_bytes} bytes exceed data_bytes={budget}")
        sample = self._sample(_key(sequence), sequence, step)
        before = self._samples.get(sample.key)
        if before is not None:
            self._remove(before)
            sample.epoch = before.epoch
            self._counts["num_replaced"] += 1
        self._rows_seen.setdefault(step, {})[sample.key] = sample.num_rows
        self._tail_starts.pop(step, None)
        self._counts["num_added"] += 1
        # In the running epoch of its pool: one that starts from 0 would fill the next batches alone.
        is_tail = self._is_tail(sample)
        peers = [
            other.epoch
            for other in self._samples.values()
            if not other.is_held_out and self._is_tail(other) == is_tail
        ]
        sample.epoch = max(sample.epoch, min(peers, default=0))
        return self._insert(sample)

    def next_batch(self, max_tokens: int) -> DraftBatch | None:
        """At most `max_tokens` rows; None while there is nothing to train on. A longer sequence gives a window, the next one in
        each of its turns.

        Within the long tail and within the rest, no sequence comes again before all others have come.
        """
        tail, rest = self._pools()
        if not tail and not rest:
            return None
        share = self._section.long_tail_share
        wanted = share * max_tokens + self._tail_balance if rest else float(max_tokens)
        picked: list[_Sample] = []
        self._last_batch = (picked, self._tail_balance)
        _pick(picked, tail, max_tokens, wanted)
        _pick(picked, rest, max_tokens)
        _pick(picked, tail, max_tokens)  # where the rest could not fill the batch
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
        self._counts["num_batches"] += 1
        return batch

    def put_back(self) -> None:
        """Undo the last `next_batch`, which nobody trained on. Nothing has come or gone since then."""
        picked, self._tail_balance = self._last_batch
        for sample in picked:
            sample.epoch -= 1
        self._counts["num_batches"] -= bool(picked)
        self._last_batch = ([], self._tail_balance)

    def holdout_batches(
        self, max_tokens: int, *, has_new: bool = False, max_rows: int | None = None
    ) -> list[DraftBatch]:
        """Sequences that are never trained on, in batches of `max_tokens`; the same for the same content.

        With `has_new` also this step's other ones: a drafter of earlier steps has not been trained on them. With
        `max_rows` a part of them, of all lengths, the newest first (`choose_slice`).
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

    def stats(self) -> dict[str, float]:
        """What is inside now, and what came and went in the buffer's life."""
        samples = list(self._samples.values())
        values: dict[str, float] = {
            "num_samples": len(samples),
            "num_holdout": sum(s.is_held_out for s in samples),
            "num_tail": sum(self._is_tail(s) for s in samples),
            "num_tokens": sum(s.num_rows for s in samples),
            "num_bytes": self.num_bytes,
        }
        values |= {name: self._counts[name] for name in _COUNTS}
        refused = {f"num_refused_{reason}": self._counts[reason] for reason in _REFUSALS}
        values |= refused | {"num_refused": sum(refused.values())}
        return {f"buffer/{name}": float(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """{"tensors": named tensors, "values": JSON-able}. Tensors are live, and never change."""
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
            "counts": dict(self._counts),
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
        """Hold what `state_dict` gave, and nothing else. A smaller budget than then evicts."""
        tensors, values = state["tensors"], state["values"]
        self.step = values["step"]
        self._tail_balance = values["tail_balance"]
        self._rows_seen = {step: dict(rows) for step, rows in values["rows_seen"]}
        self._tail_starts = {}
        self._last_batch = ([], self._tail_balance)
        self._counts = Counter(values["counts"])
        self._samples, self.num_bytes = {}, 0
        for record in values["samples"]:
            parts = {name: tensors.get(f"{record['key']}.{name}") for name in _TENSORS}
            sequence = DraftSequence(loss_start=record["loss_start"], **parts)
            sequence = _compact(sequence, self._dtype)
            sample = self._sample(record["key"], sequence, record["step"])
            sample.epoch = record["epoch"]
            self._insert(sample)

    def _sample(self, key: str, sequence: DraftSequence, step: int) -> _Sample:
        is_held_out = _hash(key) < self._section.holdout_share * 2**64
        return _Sample(key=key, sequence=sequence, step=step, is_held_out=is_held_out)

    def _pools(self) -> tuple[list[_Sample], list[_Sample]]:
        """What may be trained on: the long tails of earlier steps, and the rest; each in the order of its turns."""
        tail, rest = [], []
        for sample in sorted(self._samples.values(), key=self._turn):
            if not sample.is_held_out:
                is_apart = self._section.long_tail_share > 0 and self._is_tail(sample)
                (tail if is_apart else rest).append(sample)
        return tail, rest

    def _turn(self, sample: _Sample) -> tuple[int, int, str]:
        """Who comes first: by epoch, and in an epoch in an order of its own."""
        return sample.epoch, _hash(f"{self._section.seed}/{sample.epoch}/{sample.key}"), sample.key

    def _is_tail(self, sample: _Sample) -> bool:
        """Whether it is of an earlier step, and among its longest sequences that hold half of its rows."""
        if sample.step >= self.step:
            return False
        start = self._tail_starts.get(sample.step)
        if start is None:
            start = _find_tail_start(self._rows_seen.get(sample.step, {}).values())
            self._tail_starts[sample.step] = start
        return sample.num_rows >= start

    def _insert(self, sample: _Sample) -> bool:
        """Make room, by evicting others or the newcomer itself, and put it in."""
        while self.num_bytes + sample.num_bytes > self._section.data_bytes:
            victim = self._first_to_go([*self._samples.values(), sample])
            self._evict(victim)
            if victim is sample:
                return False
        self._samples[sample.key] = sample
        self.num_bytes += sample.num_bytes
        return True

    def _first_to_go(self, samples: Iterable[_Sample]) -> _Sample:
        """See the class: by age, except for the long tail's share of the budget, then the shortest."""
        samples = list(samples)
        is_tail = {sample.key: self._is_tail(sample) for sample in samples}
        tail_bytes = sum(s.num_bytes for s in samples if is_tail[s.key])
        is_tail_kept = tail_bytes <= self._section.long_tail_share * self._section.data_bytes

        def rank(sample: _Sample) -> tuple[int, int, int, str]:
            order = 2  # of this step
            if is_tail[sample.key]:
                order = 3 if is_tail_kept else 1
            elif sample.step < self.step:
                order = 0
            return order, sample.step, sample.num_rows, sample.key

        return min(samples, key=rank)

    def _evict(self, sample: _Sample) -> None:
        if sample.key in self._samples:
            self._remove(sample)
        self._counts["num_evicted"] += 1
        self._counts["evicted_bytes"] += sample.num_bytes

    def _remove(self, sample: _Sample) -> None:
        del self._samples[sample.key]
        self.num_bytes -= sample.num_bytes

    def _refuse(self, reason: str, text: str) -> bool:
        self._counts[reason] += 1
        log.warning("a sequence is refused: %s (%s, %d so far)", text, reason, self._counts[reason])
        return False


def _pick(
    picked: list[_Sample], pool: Sequence[_Sample], max_tokens: int, wanted: float = float("inf")
) -> None:
    """Add samples of `pool` in turn, those already picked left out, until `wanted` rows came or no more fit.

    One that does not fit is passed over, but then nobody of a later epoch is taken: it comes first the next time, and
    the first of a batch may be longer than `max_tokens` (it is cut), so that everybody's turn comes.
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
    """The smallest length among the longest that hold half of all rows."""
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


def _num_bytes(sequence: DraftSequence) -> int:
    return sum(tensor.nbytes for tensor in _tensors(sequence).values())


def _compact(sequence: DraftSequence, dtype: torch.dtype) -> DraftSequence:
    """A copy of what batches use: on the CPU, in `dtype`, without the last state, no view of anything larger."""
    num_states = max(0, sequence.token_ids.numel() - 1)

    def states(tensor: Tensor) -> Tensor:
        kept = tensor.detach()[:num_states]
        return torch.empty(kept.shape, dtype=dtype).copy_(kept)

    hidden = sequence.final_hidden
    return DraftSequence(
        token_ids=sequence.token_ids.detach().to("cpu", torch.int64, copy=True),
        features=states(sequence.features),
        final_hidden=None if hidden is None else states(hidden),
        loss_start=sequence.loss_start,
    )


def _key(sequence: DraftSequence) -> str:
    tokens = sequence.token_ids.numpy().tobytes()
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def _hash(text: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
