"""Triton kernels of the sampling noise, for CUDA. `sampling.py` calls them; `noise.py` defines the
noise.

One kernel replaces about thirty elementwise ones: it hashes (row key, block) and (row key, token
id) and turns both into Gumbel noise in registers. `noisy_argmax` and `add_noise` write no noise at
all. `TRITON_INTERPRET=1` runs both on a CPU: tests/kernels.
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
_BLOCK = 1024  # token ids of one program: 8 for each of its 128 threads
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
def _argmax_of_block(logits, seeds, positions, largest, winners, vocab_size, BLOCK: tl.constexpr):
    """Find for each block of token ids the largest logit + noise and the first id that has it."""
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token_ids < vocab_size
    values = tl.load(logits + row * vocab_size + token_ids, mask=is_token, other=-float("inf"))
    key = _hash(tl.load(seeds + row), tl.load(positions + row))
    noisy = values.to(tl.float64) + _gumbel(key, token_ids)
    best, index = tl.max(noisy, axis=0, return_indices=True)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + cell, best)
    tl.store(winners + cell, (tl.program_id(1) * BLOCK + index).to(tl.int64))


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
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    largest_BK = logits_BV.new_empty((num_rows, num_blocks), dtype=torch.float64)
    winners_BK = seeds_B.new_empty((num_rows, num_blocks))
    grid = (num_rows, num_blocks)
    keys = seeds_B.contiguous(), positions_B.contiguous()
    arguments = (logits_BV.contiguous(), *keys, largest_BK, winners_BK, vocab_size)
    _argmax_of_block[grid](*arguments, BLOCK=_BLOCK, **_OPTIONS)  # pyright: ignore[reportIndexIssue]
    block_B1 = largest_BK.argmax(dim=1, keepdim=True)
    return winners_BK.gather(1, block_B1).squeeze(1)


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
