"""Sequences of drafter data that carry their name in tokens and states, and what a buffer holds of
them.
"""

from __future__ import annotations

from typing import Any

import torch

from tlt_megatron.config.schema import SpotSection
from tlt_megatron.drafter.data_buffer import DataBuffer
from tlt_megatron.drafter.packing import DraftBatch
from tlt_megatron.types import DraftSequence

HIDDEN_SIZE = 4


def make_sequence(name: int, num_tokens: int, *, loss_start: int = 2) -> DraftSequence:
    """Tokens [name, 1, 2, ..]; the state at token t is (name, t, 0, 0)."""
    features = torch.zeros(num_tokens, HIDDEN_SIZE)
    features[:, 0], features[:, 1] = name, torch.arange(num_tokens)
    token_ids = torch.arange(num_tokens)
    token_ids[0] = name
    return DraftSequence(token_ids=token_ids, features=features, loss_start=loss_start)


def bytes_of(num_tokens: int) -> int:
    """Of what is kept: int64 tokens and float32 states at all but the last."""
    return 8 * num_tokens + 4 * HIDDEN_SIZE * (num_tokens - 1)


def names_in(batch: DraftBatch | None) -> list[int]:
    """The names of the sequences of a batch, in order."""
    assert batch is not None
    starts = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)
    return batch.features[starts, 0].int().tolist()


def names_kept(buffer: DataBuffer) -> set[int]:
    return {int(t[0]) for n, t in buffer.state_dict()["tensors"].items() if n.endswith("token_ids")}


def tail_in(buffer: DataBuffer) -> set[int]:
    """The names of the long tail."""
    state = buffer.state_dict()
    keys = [sample["key"] for sample in state["values"]["samples"] if sample["is_tail"]]
    return {int(state["tensors"][f"{key}.token_ids"][0]) for key in keys}


def make_buffer(**settings: Any) -> DataBuffer:
    return DataBuffer(SpotSection(**settings))


def fill(buffer: DataBuffer, step: int, lengths: dict[int, int]) -> None:
    """Sequences of the step that the buffer is in."""
    assert buffer.step == step
    for name, num_tokens in lengths.items():
        buffer.add(make_sequence(name, num_tokens))


def take(buffer: DataBuffer, max_tokens: int) -> tuple[list[int], DraftBatch]:
    """The next batch and the names in it; it counts as trained on."""
    batch = buffer.next_batch(max_tokens)
    assert batch is not None
    buffer.mark_trained()
    return names_in(batch), batch
