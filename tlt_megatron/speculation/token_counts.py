"""Counts the tokens of an engine's responses. The most frequent ones are what a drafter with a
reduced head proposes.

A token outside the set is never drafted, so the policy's own draw of it ends the accepted path. It
changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlt_megatron.saved_files import amount


class TokenCounts:
    """Counts by token id. A count loses a quarter of itself, at least 1, with every `fade`."""

    def __init__(self, vocab_size: int, num_kept: int) -> None:
        """`num_kept`: number of ids that `most_frequent` returns."""
        self._num_kept = num_kept
        self._counts_V = torch.zeros(vocab_size, dtype=torch.int64)

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of a response."""
        ids_T = torch.tensor(token_ids, dtype=torch.int64)
        self._counts_V.index_add_(0, ids_T, torch.ones_like(ids_T))

    def fade(self) -> None:
        """Forget a part, because the policy changed."""
        self._counts_V.mul_(3).div_(4, rounding_mode="floor")

    def most_frequent(self) -> Tensor:
        """Return the most frequent token ids, ascending. The lowest ids win a tie."""
        vocab_size = len(self._counts_V)
        ranks_V = self._counts_V * vocab_size - torch.arange(vocab_size)
        return ranks_V.topk(self._num_kept).indices.sort().values

    def state_dict(self) -> dict[str, list[int]]:
        """Return the state as values that JSON can hold."""
        ids_N = self._counts_V.nonzero().flatten()
        return {"ids": ids_N.tolist(), "counts": self._counts_V[ids_N].tolist()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore `state_dict`. ValueError as in `merge`; then the counts stay as they are."""
        self._add_saved(torch.zeros_like(self._counts_V), state)

    def merge(self, state: Mapping[str, Sequence[int]]) -> None:
        """Add the counts of another engine's `state_dict`. ValueError if they are of a larger
        vocabulary.
        """
        self._add_saved(self._counts_V, state)

    def _add_saved(self, counts_V: Tensor, state: Mapping[str, Sequence[int]]) -> None:
        vocab_size = len(counts_V)
        for token_id, count in zip(state["ids"], state["counts"], strict=True):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token_counts: token id {token_id}: must be in [0, {vocab_size})")
            amount(count)
        ids_N, counts_N = (
            torch.tensor(state[name], dtype=torch.int64) for name in ("ids", "counts")
        )
        self._counts_V = counts_V.index_add(0, ids_N, counts_N)
