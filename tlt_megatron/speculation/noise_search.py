"""Noise on a CPU for a real vocabulary. Finds the winner of logits + noise with few logarithms, or makes all of the noise.

`sampling.py` calls it; results equal those of its torch form bit for bit. Noise grows with the integer of its hash. So a
token can win only if its integer reaches a threshold, which follows from a good score and from a bound on the token's logit.
The tokens with the largest logits give both. All others are hashed and compared, and only the few above the threshold get
noise. NumPy hashes, because it has logical shifts of unsigned integers: half as many passes over memory as in torch.

Shapes: N scored tokens of any rows, K blocks of consecutive tokens, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tlt_megatron.speculation import sampling

_BLOCK = 64  # tokens; only the largest logit of a block is compared with those of other blocks
# blocks; the tokens at least as large as the least of their maxima are scored first
_NUM_LEADERS = 32
_CHUNK = 1 << 15  # tokens hashed at once; two buffers of 8 bytes each fit in a level-2 cache
_MOST_NOISE = 36.8  # see `sampling.gumbel_noise`
# the last step of the hash changes only these bits, so the comparison leaves them out
_LOW_BITS = 33


def noisy_argmax(logits_BV: Tensor, keys_B: Tensor) -> Tensor | None:
    """Return [B] int64: the argmax over V of logits + noise of `sampling.row_keys`; None if a row has no finite maximum."""
    num_rows, vocab_size = logits_BV.shape
    rows_N, tokens_N, bound_B = _leaders(logits_BV)
    scores_N = _scores(logits_BV, keys_B, rows_N, tokens_N)
    none_B = scores_N.new_full((num_rows,), -torch.inf)
    best_B = none_B.scatter_reduce(0, rows_N, scores_N, "amax")
    if not (best_B.isfinite() & (bound_B < torch.inf)).all():
        return None
    rivals = _rivals(keys_B, _least_hashes(best_B, bound_B), vocab_size)
    if rivals is not None:
        scores_R = _scores(logits_BV, keys_B, *rivals)
        best_B = best_B.scatter_reduce(0, rivals[0], scores_R, "amax")
        rows_N, tokens_N = torch.cat((rows_N, rivals[0])), torch.cat((tokens_N, rivals[1]))
        scores_N = torch.cat((scores_N, scores_R))
    is_best_N = scores_N == best_B[rows_N]
    none_B = keys_B.new_full((num_rows,), vocab_size)
    return none_B.scatter_reduce(0, rows_N[is_best_N], tokens_N[is_best_N], "amin")


def _leaders(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows and ids of tokens that include all with a logit above the bound, and the bound [B] float64.

    The tokens after the last whole block are included. The bound is not finite if a logit is inf or NaN.
    """
    num_rows, vocab_size = logits_BV.shape
    num_blocks = vocab_size // _BLOCK
    end = num_blocks * _BLOCK
    blocks_BKW = logits_BV[:, :end].unflatten(1, (num_blocks, _BLOCK))
    largest_BK = blocks_BKW.amax(dim=2)
    top = largest_BK.topk(min(_NUM_LEADERS, num_blocks), dim=1)
    top_BKW = blocks_BKW.gather(1, top.indices.unsqueeze(2).expand(-1, -1, _BLOCK))
    bound_B = top.values[:, -1]
    rows_N, blocks_N, offsets_N = (top_BKW >= bound_B.view(-1, 1, 1)).nonzero(as_tuple=True)
    tokens_N = top.indices[rows_N, blocks_N] * _BLOCK + offsets_N
    if end < vocab_size:
        rest_R = torch.arange(end, vocab_size)
        rows_N = torch.cat((rows_N, torch.arange(num_rows).repeat_interleave(len(rest_R))))
        tokens_N = torch.cat((tokens_N, rest_R.repeat(num_rows)))
    is_usable_B = top.values[:, 0] < torch.inf  # `topk` puts NaN first
    return rows_N, tokens_N, bound_B.double().masked_fill(~is_usable_B, torch.inf)


def _scores(logits_BV: Tensor, keys_B: Tensor, rows_N: Tensor, tokens_N: Tensor) -> Tensor:
    noise_N = sampling.gumbel_of(keys_B[rows_N], tokens_N)
    return noise_N.add_(logits_BV[rows_N, tokens_N])


def _least_hashes(best_B: Tensor, bound_B: Tensor) -> list[int | None]:
    """Return the least hash with which a token of at most the bound can reach the best; None if no noise is that large.

    Every rounding is covered: that of the sum and of the logarithms by the margin on the noise, that of the uniform number
    next to 1 by 4 of its steps.
    """
    needed_B = best_B - bound_B - (1e-9 + best_B.abs() * 2.0**-50)
    uniform_B = (-(-needed_B).exp()).exp()
    bits_B = (uniform_B * 2.0**sampling.UNIFORM_BITS).long().sub_(4).clamp_(min=0)
    shift = _LOW_BITS - (64 - sampling.UNIFORM_BITS)
    hashes = ((bits_B >> shift) << shift).tolist()
    return [
        None if noise > _MOST_NOISE else value << (64 - sampling.UNIFORM_BITS)
        for noise, value in zip(needed_B.tolist(), hashes, strict=True)
    ]


def _rivals(
    keys_B: Tensor, least_B: list[int | None], vocab_size: int
) -> tuple[Tensor, Tensor] | None:
    """Return rows and ids of the tokens whose hash is at least the least of their row; None if there are none."""
    rows, tokens = [], []
    for row, (key, least) in enumerate(zip(keys_B.tolist(), least_B, strict=True)):
        if least is None:
            continue
        for start, hashes, _ in _hashes(key, vocab_size):
            (found,) = (hashes >= np.uint64(least)).nonzero()
            if len(found):
                tokens.append(found + start)
                rows.append(np.full_like(found, row))
    if not rows:
        return None
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(tokens))


def fill_gumbel(keys_B: Tensor, vocab_size: int) -> Tensor:
    """Return [B, V] float64 noise of `sampling.row_keys`."""
    noise_BV = torch.empty(len(keys_B), vocab_size, dtype=torch.float64)
    shift, unused_bits = np.uint64(sampling.SHIFTS[2]), np.uint64(64 - sampling.UNIFORM_BITS)
    for noise_V, key in zip(noise_BV, keys_B.tolist(), strict=True):
        for start, hashes, shifted in _hashes(key, vocab_size):
            np.right_shift(hashes, shift, out=shifted)
            np.bitwise_xor(hashes, shifted, out=hashes)
            np.right_shift(hashes, unused_bits, out=hashes)
            part = noise_V[start : start + len(hashes)]
            sampling.gumbel_(part.copy_(torch.from_numpy(hashes.view(np.int64))))
    return noise_BV


def _hashes(key: int, vocab_size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield, by chunk: its first token, the hashes without the last step, and a buffer of their size. They are overwritten."""
    steps_C = _steps(min(vocab_size, _CHUNK))
    hashes_C, shifted_C = np.empty_like(steps_C), np.empty_like(steps_C)
    mask = (1 << 64) - 1
    for start in range(0, vocab_size, _CHUNK):
        length = min(_CHUNK, vocab_size - start)
        hashes, shifted = hashes_C[:length], shifted_C[:length]
        first = np.uint64((key + start * sampling.GOLDEN) & mask)
        np.add(steps_C[:length], first, out=hashes)
        for shift, multiplier in zip(sampling.SHIFTS, sampling.MULTIPLIERS, strict=False):
            np.right_shift(hashes, np.uint64(shift), out=shifted)
            np.bitwise_xor(hashes, shifted, out=hashes)
            np.multiply(hashes, np.uint64(multiplier), out=hashes)
        yield start, hashes, shifted


@functools.cache
def _steps(length: int) -> np.ndarray:
    """Return what is added to a row's key for each of the first `length` tokens."""
    return np.arange(1, length + 1, dtype=np.uint64) * np.uint64(sampling.GOLDEN)
