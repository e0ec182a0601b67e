"""Where the tokens of a packed micro-batch lie on the ranks that share it. The schedule and the
hidden-state tap ask.

Context parallelism cuts every sequence into 2 x CP chunks. Rank r has chunks r and 2 x CP - 1 - r,
so all ranks have equally many pairs of query and key. Under sequence parallelism, tensor-parallel
peers each have a contiguous part of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.runtime.process_groups import ProcessGroups

_FP8_TOKENS = 32  # a rank's tokens are a multiple of it: Transformer Engine's mxfp8 needs most


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """The parts of the ranks follow each other, those of tensor-parallel peers first: M places, of
    tokens and padding.
    """

    bounds: Tensor  # [S + 1] int32, cumulative lengths of the S padded sequences; the last is M
    of_tokens: Tensor  # [P] int64

    def fill(self, values_P: Tensor, padding: int = 0) -> Tensor:
        """Return [M, ...]: the values [P, ...] at the places of their tokens."""
        values_M = values_P.new_full((int(self.bounds[-1]), *values_P.shape[1:]), padding)
        return values_M.index_copy(0, self.of_tokens, values_P)


def place_tokens(
    cu_seqlens: Tensor, groups: ProcessGroups, *, has_fp8: bool = False
) -> TokenPlaces:
    """Return the places of a micro-batch whose sequences have the bounds `cu_seqlens`, [S + 1].

    Every sequence is padded to a multiple of 2 x CP. What the tensor-parallel peers, or matrix
    products in FP8, need beyond that is a further sequence of padding: real tokens cannot see it,
    and every kernel finds all tokens covered. Example: a sequence of 7 tokens at CP 2 has the
    places 0 1 4 5 6 7 2.
    """
    tp, cp = groups.tp.size, groups.cp.size
    multiple = 2 * cp if cp > 1 else 1
    cu_seqlens, num_tokens = cu_seqlens.long(), int(cu_seqlens[-1])
    lengths_S = cu_seqlens.diff()
    padded_S = lengths_S + -lengths_S % multiple
    if rest := -int(padded_S.sum()) % (multiple * tp * (_FP8_TOKENS if has_fp8 else 1)):
        padded_S = torch.cat([padded_S, padded_S.new_tensor([rest])])
    bounds = torch.cat([cu_seqlens[:1], padded_S.cumsum(0)])
    sequences_S = torch.arange(lengths_S.numel())
    sequence_P = sequences_S.repeat_interleave(lengths_S, output_size=num_tokens)
    offset_P = torch.arange(num_tokens) - cu_seqlens[sequence_P]
    size_P = -(-padded_S[sequence_P] // (2 * cp))  # tokens of a chunk
    chunk_P = offset_P // size_P
    rank_P = torch.minimum(chunk_P, 2 * cp - 1 - chunk_P)
    start_P = rank_P * (bounds[-1] // cp) + bounds[sequence_P] // cp + size_P * (chunk_P >= cp)
    return TokenPlaces(bounds=bounds.int(), of_tokens=start_P + offset_P % size_P)
