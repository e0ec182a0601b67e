"""Gumbel noise of token ids on a CPU, and the search for the winner of logits + noise, which makes
little of it.

The noise of a token is -log(E). All E are independent Exp(1) numbers, drawn as an exponential race
in blocks of 64 ids: one hash gives a block its smallest E, which is Exp(1) / 64, and the id that
has it. The E of another id is the smallest plus an Exp(1) number from a hash of that id, because
the exponential distribution has no memory. The last block of a vocabulary is drawn like a whole
one, so noise does not depend on the vocabulary's size.

So one hash bounds the noise of 64 tokens. A block can hold the winner only if its largest logit
plus this bound reaches a good score. `noise_kernel.py` is the same noise for CUDA. NumPy hashes,
because it has logical shifts of unsigned integers.

Shapes: K blocks, W = 64 ids of a block, C token ids, R some rows, N blocks of any rows, T tokens of
any rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): the golden-ratio increment and the two multipliers of its
# finalizer.
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
UNIFORM_BITS = 52  # (k + 1/2) / 2^52 is exact in float64 and never 0 or 1
DEFINITION = "race in blocks of 64"  # checkpoints record it; change it if any token's noise changes
BLOCK = 64  # ids; the bits of a hash below `UNIFORM_BITS` give a place among them
_CHUNK = 1 << 15  # elements of noise made at once, so that they fit in the cache
_NUM_LIKELY = 8  # blocks; the lowest of their bounds is the first guess of the winner's score
LOG_ERROR = 1e-12  # far above the rounding error of a logarithm below 41
_LEAST = np.finfo(np.float64).min


def _hashes(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return SplitMix64's outputs of these numbers for uint64 states, broadcast."""
    values = keys + numbers.astype(np.uint64) * np.uint64(GOLDEN)
    shifted = np.empty_like(values)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        np.right_shift(values, np.uint64(shift), out=shifted)
        values ^= shifted
        values *= np.uint64(multiplier)
    np.right_shift(values, np.uint64(SHIFTS[2]), out=shifted)
    values ^= shifted
    return values


def _exponential(hashes: np.ndarray) -> np.ndarray:
    """Return Exp(1) numbers in float64 from the upper bits of hashes."""
    uniform = (hashes >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-UNIFORM_BITS
    return np.negative(np.log(uniform, out=uniform), out=uniform)


def _smallest(keys: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest E of blocks, and the place in the block that has it (int8).

    The numbers of their hashes are 0, -1, -2, ...; those of tokens are 1, 2, 3, ...
    """
    hashes = _hashes(keys, -blocks)
    return _exponential(hashes) / BLOCK, (hashes & np.uint64(BLOCK - 1)).astype(np.int8)


def _gumbel(
    keys: np.ndarray, ids: np.ndarray, smallest: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Return the noise of token ids from `_smallest` of their blocks."""
    race = _exponential(_hashes(keys, ids + 1))
    race *= places != (ids % BLOCK).astype(np.int8)
    race += smallest
    return np.negative(np.log(race, out=race), out=race)


def gumbel_of_ids(keys_B: Tensor, ids_C: Tensor) -> Tensor:
    """Return [B, C] float64 noise of ascending token ids under keys of `sampling.row_keys`."""
    keys_B1, ids_all = _as_numpy(keys_B), ids_C.numpy()
    noise_BC = np.empty((len(keys_B1), len(ids_all)))
    length = max(_CHUNK // max(len(keys_B1), 1), 4 * BLOCK)
    for start in range(0, len(ids_all), length):
        ids = ids_all[start : start + length]
        blocks = ids // BLOCK
        smallest_BK, places_BK = _smallest(keys_B1, np.arange(blocks[0], blocks[-1] + 1))
        blocks -= blocks[0]
        of_ids = smallest_BK.take(blocks, axis=1), places_BK.take(blocks, axis=1)
        noise_BC[:, start : start + length] = _gumbel(keys_B1, ids, *of_ids)
    return torch.from_numpy(noise_BC)


def _as_numpy(keys_B: Tensor) -> np.ndarray:
    return keys_B.numpy().view(np.uint64)[:, None]


def noisy_argmax(logits_BV: Tensor, keys_B: Tensor) -> Tensor:
    """Return [B] int64: the argmax over V of logits + noise, for V of at least `BLOCK`, in float32
    or float64.

    The lowest id wins a tie. NaN is larger than any number.
    """
    race = _Race(logits_BV.detach(), keys_B)
    if not (race.bounds_BK.max(axis=1) > -np.inf).all():  # NaN, or nothing but -inf
        noise_BV = gumbel_of_ids(keys_B, torch.arange(logits_BV.shape[1]))
        return noise_BV.add_(logits_BV).argmax(dim=1)
    num_likely = min(_NUM_LIKELY, race.bounds_BK.shape[1])
    likely_BL = torch.from_numpy(race.bounds_BK).topk(num_likely, dim=1).values.numpy()
    guess_B = likely_BL[:, -1].clip(min=_LEAST)
    tokens_B, scores_B = race.best(np.arange(len(guess_B)), guess_B)
    # A score that reaches the guess wins. Another is a guess that will be reached.
    (late_R,) = (scores_B < guess_B).nonzero()
    if len(late_R):
        tokens_B[late_R], _ = race.best(late_R, scores_B[late_R])
    return torch.from_numpy(tokens_B)


class _Race:
    """Blocks of tokens, and a bound on the score of each."""

    def __init__(self, logits_BV: Tensor, keys_B: Tensor) -> None:
        num_blocks, num_left = divmod(logits_BV.shape[1], BLOCK)
        whole_BV = logits_BV[:, : num_blocks * BLOCK]
        largest_BK = whole_BV.unflatten(1, (num_blocks, BLOCK)).amax(dim=2)
        if num_left:
            last_B1 = logits_BV[:, -num_left:].amax(dim=1, keepdim=True)
            largest_BK = torch.cat((largest_BK, last_B1), dim=1)
        self.keys_B1 = _as_numpy(keys_B)
        # A view: the logits from each of the V - W + 1 ids on.
        self.windows_BSW = logits_BV.unfold(1, BLOCK, 1).numpy()
        blocks_K = np.arange(largest_BK.shape[1])
        self.smallest_BK, self.places_BK = _smallest(self.keys_B1, blocks_K)
        self.most_BK = LOG_ERROR - np.log(self.smallest_BK)  # above the noise of every token
        # At least the score of every token: rounding keeps the order of sums.
        self.bounds_BK = self.most_BK + largest_BK.numpy()

    def best(self, rows_R: np.ndarray, least_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for some rows, the best of the tokens whose bound is at least `least_R`, and its
        score.
        """
        is_open_RK = self.bounds_BK[rows_R] >= least_R[:, None]
        index_N, blocks_N = np.divmod(np.flatnonzero(is_open_RK), is_open_RK.shape[1])
        # the window of the last block starts in the block before, if the last one is not whole
        starts_N = np.minimum(blocks_N * BLOCK, self.windows_BSW.shape[1] - 1)
        logits_NW = self.windows_BSW[rows_R[index_N], starts_N]
        most_N1 = self.most_BK[rows_R[index_N], blocks_N][:, None]
        is_open_NW = logits_NW + most_N1 >= least_R[index_N][:, None]
        of_block_T, offsets_T = np.divmod(np.flatnonzero(is_open_NW), BLOCK)
        index_T, tokens_T = index_N[of_block_T], starts_N[of_block_T] + offsets_T
        cell = rows_R[index_T], tokens_T // BLOCK
        keys_T = self.keys_B1[cell[0], 0]
        scores_T = _gumbel(keys_T, tokens_T, self.smallest_BK[cell], self.places_BK[cell])
        scores_T += logits_NW[of_block_T, offsets_T]
        order_T = np.lexsort((-scores_T, index_T))  # stable: the lowest id wins a tie
        first_R = order_T[np.searchsorted(index_T, np.arange(len(rows_R)))]
        return tokens_T[first_R], scores_T[first_R]
