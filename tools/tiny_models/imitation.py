"""Batches of right responses that a policy imitates: for make_tiny_policy.py and
imitate_sums.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NO_LABEL = -100  # which cross_entropy ignores
Row = tuple[list[int], int]  # token ids of prompt and response, number of prompt tokens


def pack(rows: Iterable[Row], batch_tokens: int) -> list[list[Row]]:
    """Return batches of rows of similar lengths, at most `batch_tokens` each with the padding."""
    batches: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row[0])):
        if batches[-1] and (len(batches[-1]) + 1) * len(row[0]) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def pad(rows: list[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T], and for each the next token, which is its label.

    Tokens before a prompt's token or padding have NO_LABEL.
    """
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    ids_BT, labels_BT = torch.full(shape, pad_id), torch.full(shape, NO_LABEL)
    for row, (ids, num_prompt) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, num_prompt - 1 : len(ids) - 1] = torch.tensor(ids[num_prompt:])
    return ids_BT, labels_BT
