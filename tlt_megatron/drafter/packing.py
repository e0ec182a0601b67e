"""Packs sequences with the target's hidden states into training batches, without padding.

Row t of a sequence pairs token x_{t+1} with the target's state h_t. Its training targets are token
x_{t+2} and the target's next state h_{t+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.types import DraftSequence, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Rows of several sequences, one after the other. All tensors are on one device.

    Example: tokens [a b c d] with states h_0..h_2 give token_ids [b c], labels [c d],
    features [h_0 h_1], target_hidden [h_1 h_2], position_ids [0 1].
    """

    token_ids: Tensor  # [P] int64, x_{t+1}
    labels: Tensor  # [P] int64, x_{t+2}
    position_ids: Tensor  # [P] int64, t
    features: Tensor  # [P, D or 3D], h_t
    target_hidden: Tensor  # [P, D], h_{t+1} after the target's final norm
    loss_mask: Tensor  # [P] bool, whether the prediction of `labels` is trained
    lengths: tuple[int, ...]  # rows of each sequence

    @property
    def num_rows(self) -> int:
        """Return P."""
        return self.token_ids.numel()

    def to(self, device: torch.device) -> DraftBatch:
        names = ("token_ids", "labels", "position_ids", "features", "target_hidden", "loss_mask")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return DraftBatch(lengths=self.lengths, **moved)


def draft_sequence(
    rollout: Rollout, features_TF: Tensor, hidden_size: int, first_position: int = 0
) -> DraftSequence:
    """Return a rollout with the engine's states [T - 1, F]: the final state (D columns), then any
    taps. `first_position` is the noise position of its first token.
    """
    has_taps = features_TF.shape[1] > hidden_size
    mask = rollout.loss_mask
    if mask is not None:
        mask = torch.cat((mask.new_zeros(len(rollout.prompt_ids)), mask))
    return DraftSequence(
        token_ids=torch.cat((torch.tensor(rollout.prompt_ids), rollout.token_ids)),
        features=features_TF[:, hidden_size:] if has_taps else features_TF,
        final_hidden=features_TF[:, :hidden_size] if has_taps else None,
        loss_start=len(rollout.prompt_ids),
        loss_mask=mask,
        request=(rollout.draw_index, rollout.sample_index, first_position),
    )


def pack_batch(sequences: Sequence[DraftSequence]) -> DraftBatch:
    """Return one batch of all `sequences`, at least one, each with a row or more."""
    lengths = tuple(sequence.num_rows for sequence in sequences)
    hidden = [s.features if s.final_hidden is None else s.final_hidden for s in sequences]
    rows = list(zip(sequences, hidden, lengths, strict=True))
    device = sequences[0].features.device
    positions = [torch.arange(length) for length in lengths]
    masks = [
        (position + 2 >= s.loss_start) & (True if s.loss_mask is None else s.loss_mask[2 : n + 2])
        for position, (s, _, n) in zip(positions, rows, strict=True)
    ]
    return DraftBatch(
        token_ids=torch.cat([s.token_ids[1 : n + 1] for s, _, n in rows]).to(device),
        labels=torch.cat([s.token_ids[2 : n + 2] for s, _, n in rows]).to(device),
        position_ids=torch.cat(positions).to(device),
        features=torch.cat([s.features[:n] for s, _, n in rows]),
        target_hidden=torch.cat([h[1 : n + 1] for _, h, n in rows]),
        loss_mask=torch.cat(masks).to(device),
        lengths=lengths,
    )


def pack_sequences(sequences: Sequence[DraftSequence], max_rows: int) -> list[DraftBatch]:
    """Pack sequences into batches of at most `max_rows` rows: first fit, longest first.

    A longer sequence is a batch of its own: it is not cut, because its end attends to its start. A
    sequence without rows is left out.
    """
    plans: list[list[DraftSequence]] = []
    room: list[int] = []
    for sequence in sorted(sequences, key=lambda sequence: -sequence.num_rows):
        num_rows = sequence.num_rows
        if num_rows < 1:
            break
        place = next((i for i, free in enumerate(room) if free >= num_rows), len(plans))
        if place == len(plans):
            plans.append([])
            room.append(max_rows)
        plans[place].append(sequence)
        room[place] -= num_rows
    return [pack_batch(plan) for plan in plans]
