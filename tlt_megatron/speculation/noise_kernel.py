"""Triton kernels of the sampling noise, for CUDA. `sampling.py` calls them; `noise.py` defines the
noise.

One kernel replaces about thirty elementwise ones: it hashes (row key, block) and (row key, token
id) and turns both into Gumbel noise in registers. `noisy_argmax` and `add_noise` write no noise at
all. `noisy_argmax` makes the noise of few tokens, as `noise.noisy_argmax` does: three float64
logarithms for each token take milliseconds on GPUs with few float64 units. `TRITON_INTERPRET=1`
runs all kernels on a CPU: tests/kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_megatron.speculation import noise

_GOLDEN = tl.constexpr(noise.GOLDEN)
_FIRST = tl.constexpr(noise.MULTIPLIERS[0])
_SECOND = tl.constexpr(noise.MULTIPLIERS[1])
_PLACES = tl.constexpr(noise.BLOCK)
_LOG_ERROR = tl.constexpr(noise.LOG_ERROR)
_BLOCK = 1024  # token ids of one program that adds noise: 8 for each of its 128 threads
_SEARCHED = 512  # token ids of one program that looks for the winner: 8 blocks, one after another
_BOUNDED = 8192  # token ids of one program that bounds blocks: a block for each of its 128 threads
_OPTIONS = {"enable_fp_fusion": False}  # every rounding as in the torch form


@triton.jit
def _hash(key, number):
    """SplitMix64."""
    bits = key.to(tl.uint64) + number.to(tl.uint64) * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return bits ^ (bits >> 31)


@triton.jit
def _exponential(bits):
    """-log(u) of the upper 52 bits as a float64 in (0, 1)."""
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52)


@triton.jit
def _gumbel(key, token_ids):
    """`noise._gumbel`: -log of the block's smallest E, plus the token's own number if another token
    has it.
    """
    block_bits = _hash(key, -(token_ids // _PLACES).to(tl.int64))
    smallest = _exponential(block_bits) / _PLACES
    others = _exponential(_hash(key, (token_ids + 1).to(tl.int64)))
    has_smallest = block_bits % _PLACES == (token_ids % _PLACES).to(tl.uint64)
    return -tl.log(tl.where(has_smallest, smallest, smallest + others))


@triton.jit
def _bound_blocks(logits, seeds, positions, bounds, guesses, vocab_size, NUM: tl.constexpr):
    """Of NUM noise blocks: a bound on the score of each one's tokens, and the best score of the
    tokens that have the largest logits of their blocks, or a little less.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * NUM + tl.arange(0, NUM)
    token_ids = blocks[:, None] * _PLACES + tl.arange(0, _PLACES)[None, :]
    values = tl.load(
        logits + row * vocab_size + token_ids, mask=token_ids < vocab_size, other=-float("inf")
    )
    key = _hash(tl.load(seeds + row), tl.load(positions + row))
    values, places = tl.max(values, axis=1, return_indices=True)
    values = values.to(tl.float64)
    most = -tl.log(_exponential(_hash(key, -blocks.to(tl.int64))) / _PLACES)
    num_blocks = tl.cdiv(vocab_size, _PLACES)
    tl.store(bounds + row * num_blocks + blocks, values + (most + _LOG_ERROR), blocks < num_blocks)
    scores = values + (_gumbel(key, blocks * _PLACES + places) - _LOG_ERROR)
    tl.store(guesses + row * tl.num_programs(1) + tl.program_id(1), tl.max(scores, axis=0))


@triton.jit
def _search(
    logits, seeds, positions, bounds, guesses, largest, winners, vocab_size, num_guesses,
    NUM: tl.constexpr, GUESSES: tl.constexpr,
):  # fmt: skip
    """Of NUM noise blocks: the largest logit + noise and the first id that has it, from the blocks
    whose bounds reach the best guess of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    at, num_blocks = tl.arange(0, GUESSES), tl.cdiv(vocab_size, _PLACES)
    guess = tl.max(
        tl.load(guesses + row * num_guesses + at, mask=at < num_guesses, other=-float("inf"))
    )
    key = _hash(tl.load(seeds + row), tl.load(positions + row))
    best = tl.full([], -float("inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    first = tl.program_id(1) * NUM
    for block in range(first, tl.minimum(first + NUM, num_blocks)):
        if tl.load(bounds + row * num_blocks + block) >= guess:
            token_ids = block * _PLACES + tl.arange(0, _PLACES)
            is_token = token_ids < vocab_size
            values = tl.load(
                logits + row * vocab_size + token_ids, mask=is_token, other=-float("inf")
            )
            noisy = values.to(tl.float64) + _gumbel(key, token_ids)
            score, index = tl.max(noisy, axis=0, return_indices=True)
            winner = tl.where(score > best, block * _PLACES + index, winner)
            best = tl.maximum(best, score)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + cell, best)
    tl.store(winners + cell, winner)


@triton.jit
def _add(
    logits, seeds, positions, scale, factors, ids, out, vocab_size, rows_per_seed,
    BLOCK: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < vocab_size
    token_ids = tl.load(ids + columns, mask=is_token, other=0) if HAS_IDS else columns
    request = row // rows_per_seed
    kind = out.dtype.element_ty
    key = _hash(tl.load(seeds + request), tl.load(positions + request))
    offsets = (_gumbel(key, token_ids) * tl.load(factors + request)).to(kind)
    values = tl.load(logits + row * vocab_size + columns, mask=is_token, other=0.0).to(kind)
    noisy = values * tl.load(scale).to(kind) + offsets
    tl.store(out + row * vocab_size + columns, noisy, mask=is_token)


def noisy_argmax(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return [B] int64: the argmax over V of logits + noise. The lowest id wins a tie."""
    num_rows, vocab_size = logits_BV.shape
    given = logits_BV.contiguous(), seeds_B.contiguous(), positions_B.contiguous()
    bounds_BK, guesses_BG = bound_blocks(*given)
    num_programs, num_guesses = triton.cdiv(vocab_size, _SEARCHED), guesses_BG.shape[1]
    largest_BP = bounds_BK.new_empty((num_rows, num_programs))
    winners_BP = seeds_B.new_empty((num_rows, num_programs))
    _search[(num_rows, num_programs)](  # pyright: ignore[reportIndexIssue]
        *given,
        bounds_BK,
        guesses_BG,
        largest_BP,
        winners_BP,
        vocab_size,
        num_guesses,
        NUM=_SEARCHED // noise.BLOCK,
        GUESSES=triton.next_power_of_2(num_guesses),
        num_warps=1,
        **_OPTIONS,
    )
    program_B1 = largest_BP.argmax(dim=1, keepdim=True)
    return winners_BP.gather(1, program_B1).squeeze(1)


def bound_blocks(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bound on logit + noise [B, K] of each of K blocks of 64 ids, and guesses [B, G]: the
    winner of a row reaches them. All given tensors are contiguous.
    """
    num_rows, vocab_size = logits_BV.shape
    num_programs = triton.cdiv(vocab_size, _BOUNDED)
    bounds_BK, guesses_BG = (
        logits_BV.new_empty((num_rows, count), dtype=torch.float64)
        for count in (triton.cdiv(vocab_size, noise.BLOCK), num_programs)
    )
    given = logits_BV, seeds_B, positions_B, bounds_BK, guesses_BG, vocab_size
    _bound_blocks[(num_rows, num_programs)](*given, NUM=_BOUNDED // noise.BLOCK, **_OPTIONS)  # pyright: ignore[reportIndexIssue]
    return bounds_BK, guesses_BG


def add_noise(
    logits: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    scale: Tensor,
    factor: Tensor,
    ids_V: Tensor | None = None,
) -> Tensor:
    """See `sampling.add_noise`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    vocab_size, num_seeds = logits.shape[-1], seeds_B.shape[0]
    num_rows = logits.numel() // vocab_size
    grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
    factor_B = factor.expand_as(seeds_B).contiguous()
    has_ids = ids_V is not None
    ids = ids_V if has_ids else seeds_B  # any pointer: without ids it is not read
    keys = seeds_B.contiguous(), positions_B.contiguous()
    arguments = (logits.contiguous(), *keys, scale, factor_B, ids, out, vocab_size)
    constants = {"BLOCK": _BLOCK, "HAS_IDS": has_ids}
    _add[grid](*arguments, num_rows // num_seeds, **constants, **_OPTIONS)  # pyright: ignore[reportIndexIssue]
    return out
