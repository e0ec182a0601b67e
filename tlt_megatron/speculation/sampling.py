"""Sampling keyed by (request seed, position): the token does not depend on batch, rank or drafter.

The rollout engines call it for every token; drafters use the same noise to rank candidates. Over
the allowed set, token = argmax(logits / temperature + Gumbel noise) is an exact sample of the
tempered distribution (Gumbel-max). The noise is a pure function of (seed, position, token id),
defined in `noise.py`. Sharing it makes the output independent of the drafter: Daliri, Musco, Suresh
2024, "Coupling without communication and drafter-invariant speculative decoding".
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from tlt_megatron.runtime.device import has_triton
from tlt_megatron.speculation import noise
from tlt_megatron.speculation.noise import GOLDEN, MULTIPLIERS, SHIFTS
from tlt_megatron.types import SamplingParams

_MASK_64 = (1 << 64) - 1
_NOISE_AHEAD = 1 << 12  # elements; below this, call overhead dominates the cost of noise
MAX_KEPT = 512  # token ids recorded of one cut distribution; prime-rl's bound, which a top-p rarely exceeds
_SEARCHED_TOKENS = 1 << 12  # vocabulary size; below this, noise for all of it is as fast
_SEARCHED_LOGITS = 1 << 14  # logits of all rows; below this, call overhead dominates a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token per row."""

    token_ids_B: Tensor  # int64
    logprobs_B: Tensor  # float32, of the sampled distribution: tempered, cut, renormalized
    policy_logprobs_B: Tensor  # float32, of the raw policy: temperature 1, no cut
    kept: Tensor | None = None  # [B, 1 + C]: see `kept_table`; None without top-p and top-k


def _signed(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    return int(_mix_(torch.tensor(_signed(value))))


def _mix_(value: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to an int64 tensor in place. Multiplications wrap; masks turn
    arithmetic shifts into logical ones.
    """
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        value ^= (value >> shift) & ((1 << (64 - shift)) - 1)
        value *= _signed(multiplier)
    value ^= (value >> SHIFTS[2]) & ((1 << (64 - SHIFTS[2])) - 1)
    return value


def request_seed(seed: int, draw_index: int, sample_index: int, first_position: int = 0) -> int:
    """Return the signed 64-bit noise seed of one request, from the run's seed, draw index and
    sample index.

    Its position 0 has the noise of position `first_position` of the request that it continues.
    """
    key = _mix(seed + GOLDEN)
    key = _mix(key + draw_index * GOLDEN + 1)
    return _signed(_mix(key + sample_index * GOLDEN + 2) + first_position * GOLDEN)


def seed_at_origin(seed: int, num_prompt_tokens: int) -> int:
    """Return the seed for noise keyed by the last token's sequence position instead of the next
    token's response position.

    Both give the same noise: response position 0 follows sequence position num_prompt_tokens - 1.
    """
    return _signed(seed - (num_prompt_tokens - 1) * GOLDEN)


def gumbel_noise(seeds_B: Tensor, positions_B: Tensor, vocab_size: int) -> Tensor:
    """Return [B, V] float64 standard Gumbel noise. Element (b, v) depends only on (seeds_B[b],
    positions_B[b], v).

    A position is the index of the token in the response, from 0. `seeds_B` and `positions_B` are
    int64. The noise is always finite: within [-3.7, 40.9].
    """
    ids_V = torch.arange(vocab_size, device=seeds_B.device)
    return noise_of_ids(row_keys(seeds_B, positions_B), ids_V)


def noise_of_ids(keys_B: Tensor, ids_C: Tensor) -> Tensor:
    """Return [B, C]: the columns `ids_C`, ascending, of `gumbel_noise`, for the keys from
    `row_keys`.
    """
    return gumbel_of(keys_B, ids_C) if keys_B.is_cuda else noise.gumbel_of_ids(keys_B, ids_C)


def gumbel_of(keys_B: Tensor, ids_C: Tensor) -> Tensor:
    """`noise.gumbel_of_ids` in torch, for CUDA without triton: it reads nothing back."""
    keys_B1 = keys_B.unsqueeze(1)
    block_hashes_BC = _mix_(keys_B1 - ids_C // noise.BLOCK * _signed(GOLDEN))
    race_BC = _exponential(_mix_(keys_B1 + (ids_C + 1) * _signed(GOLDEN)))
    race_BC *= block_hashes_BC % noise.BLOCK != ids_C % noise.BLOCK
    race_BC += _exponential(block_hashes_BC) / noise.BLOCK
    return race_BC.log_().neg_()


def _exponential(hashes: Tensor) -> Tensor:
    bits = (hashes >> (64 - noise.UNIFORM_BITS)) & ((1 << noise.UNIFORM_BITS) - 1)
    return bits.double().add_(0.5).mul_(2.0**-noise.UNIFORM_BITS).log_().neg_()


def noisy_argmax(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return [B] int64: the argmax over V of logits + `gumbel_noise`, without making all of the
    noise where that is faster.
    """
    if kernels := _kernels(seeds_B):
        return kernels.noisy_argmax(logits_BV, seeds_B, positions_B)
    if is_searched(logits_BV.shape[0], logits_BV.shape[1], logits_BV.device):
        return noise.noisy_argmax(logits_BV, row_keys(seeds_B, positions_B))
    noise_BV = gumbel_noise(seeds_B, positions_B, logits_BV.shape[-1])
    return noise_BV.add_(logits_BV).argmax(dim=-1)


def row_keys(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return [B] int64: the hash of seed and position, to which the token id is added."""
    return _mix_(positions_B * _signed(GOLDEN) + seeds_B)


def is_searched(num_rows: int, vocab_size: int, device: torch.device) -> bool:
    """Return whether `noisy_argmax` makes noise for few tokens only, so that noise made ahead costs
    more.
    """
    is_large = vocab_size >= _SEARCHED_TOKENS and num_rows * vocab_size >= _SEARCHED_LOGITS
    return is_large and device.type == "cpu"


def _kernels(like: Tensor) -> ModuleType | None:
    """Return the Triton kernels for a CUDA tensor. CPU builds of torch come without triton."""
    if not like.is_cuda or not has_triton():
        return None
    return importlib.import_module("tlt_megatron.speculation.noise_kernel")


class NoiseWindow:
    """`gumbel_noise` for a decode loop. If one pass is small, it makes the noise of several passes
    in one call.

    Keeps a block of positions per row, and makes noise only for those that it lacks. Call `start`
    after the rows change.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_BAV: Tensor | None = None

    def start(self) -> None:
        """Discard the noise made ahead."""
        self._block_BAV = None

    def window(self, seeds_B: Tensor, positions_B: Tensor, length: int) -> Tensor:
        """Return [B, length, V]: the noise of positions_B and the `length` - 1 positions after
        each. Do not overwrite it.
        """
        if self._block_BAV is not None:
            # Passes that ask for no noise move the rows on too.
            offsets_B = positions_B - self._first_B
            if int(offsets_B.max()) + length <= self._block_BAV.shape[1]:
                starts_B1 = (offsets_B + self._starts_B).unsqueeze(1)
                places_BS = starts_B1 + torch.arange(length, device=seeds_B.device)
                found_PV = self._block_BAV.flatten(0, 1).index_select(0, places_BS.view(-1))
                return found_PV.view(len(seeds_B), length, -1)
        self._block_BAV = self._block_from(seeds_B, positions_B, length)
        num_rows, ahead, _ = self._block_BAV.shape
        self._first_B = positions_B.clone()
        self._starts_B = torch.arange(0, num_rows * ahead, ahead, device=seeds_B.device)
        return self._block_BAV[:, :length]

    def _block_from(self, seeds_B: Tensor, positions_B: Tensor, length: int) -> Tensor:
        """Return [B, A, V], A >= length. Copies the noise that the last block has already."""
        num_rows, vocab_size, device = len(seeds_B), self._vocab_size, seeds_B.device
        ahead = max(_NOISE_AHEAD // (num_rows * vocab_size), 1) + length - 1
        steps_A = torch.arange(ahead, device=device)
        positions_BA = positions_B.unsqueeze(1) + steps_A
        old_BAV = self._block_BAV
        if old_BAV is None or length == 1:  # one position per row: nothing of the old block is left
            seeds_BA = seeds_B.unsqueeze(1).expand_as(positions_BA)
            noise_NV = gumbel_noise(seeds_BA.reshape(-1), positions_BA.view(-1), vocab_size)
            return noise_NV.view(num_rows, ahead, vocab_size)
        offsets_BA = positions_BA - self._first_B.unsqueeze(1)
        rows_N, new_N = (offsets_BA >= old_BAV.shape[1]).nonzero(as_tuple=True)
        offsets_BA.clamp_(max=old_BAV.shape[1] - 1)
        block_BAV = old_BAV[torch.arange(num_rows).unsqueeze(1), offsets_BA]
        new_positions_N = positions_BA[rows_N, new_N]
        block_BAV[rows_N, new_N] = gumbel_noise(seeds_B[rows_N], new_positions_N, vocab_size)
        return block_BAV


def cut_logits(scaled_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set logits outside the allowed set to -inf.

    The set is the `top_k` largest, then the fewest of them whose probability reaches `top_p`. Equal
    logits rank by token id, lowest first, so the set is the same on every device. `top_k=0` and
    `top_p=1.0` keep all.
    """
    if top_k == 0 and top_p >= 1.0:
        return scaled_BV
    ids_BC, values_BC = None, scaled_BV
    if 0 < top_k < scaled_BV.shape[-1]:
        ids_BC = _top_ids(scaled_BV, top_k)
        values_BC = scaled_BV.gather(1, ids_BC)
    if top_p < 1.0:
        values_BC, order_BC = values_BC.sort(dim=-1, descending=True, stable=True)
        ids_BC = order_BC if ids_BC is None else ids_BC.gather(1, order_BC)
        probs_BC = values_BC.softmax(dim=-1)
        reached_before_BC = probs_BC.cumsum(dim=-1) - probs_BC
        reached_before_BC[:, 0].fill_(0.0)
        values_BC = values_BC.masked_fill(reached_before_BC >= top_p, -torch.inf)
    if ids_BC is None:
        return scaled_BV
    return torch.full_like(scaled_BV, -torch.inf).scatter_(1, ids_BC, values_BC)


def kept_table(cut_BV: Tensor) -> Tensor:
    """Return [B, 1 + C] int64: how many ids `cut_logits` kept in each row, then these ids,
    ascending. C is at most MAX_KEPT.

    A row with more than MAX_KEPT counts as 0. Nothing is read back.
    """
    is_kept_BV = cut_BV > -torch.inf
    counts_B1 = is_kept_BV.sum(dim=-1, keepdim=True)
    is_recorded_B1 = counts_B1 <= MAX_KEPT
    ids_BC = _ids_of(is_kept_BV & is_recorded_B1, min(MAX_KEPT, cut_BV.shape[-1]))
    return torch.cat((counts_B1 * is_recorded_B1, ids_BC), dim=1)


def kept_ids(table: Tensor) -> list[Tensor]:
    """Return the ids of each row of a `kept_table`, int32 on the CPU. One read-back."""
    table = table.int().cpu()
    counts = table[:, 0].tolist()
    return [row[1 : count + 1].clone() for row, count in zip(table, counts, strict=True)]


def _ids_of(is_kept_BV: Tensor, most: int) -> Tensor:
    """Return [B, most]: the ids that are kept in each row, ascending, then zeros. No row keeps
    more. No read-back.
    """
    places_BV = (is_kept_BV.cumsum(dim=-1) - 1).masked_fill_(~is_kept_BV, most)
    ids_BV = torch.arange(is_kept_BV.shape[-1], device=is_kept_BV.device).expand_as(places_BV)
    table = places_BV.new_zeros(len(places_BV), most + 1)
    return table.scatter_(1, places_BV, ids_BV)[:, :most]


def _top_ids(scaled_BV: Tensor, top_k: int) -> Tensor:
    """Return the ids of the `top_k` largest, ascending. `topk` alone does not define which of equal
    values it takes.
    """
    smallest_B1 = scaled_BV.topk(top_k, dim=-1).values[:, -1:]
    larger_BV = scaled_BV > smallest_B1
    equal_BV = scaled_BV == smallest_B1
    room_B1 = top_k - larger_BV.sum(dim=-1, keepdim=True)
    kept_BV = larger_BV | (equal_BV & (equal_BV.cumsum(dim=-1) <= room_B1))
    return _ids_of(kept_BV, top_k)


def allowed_logits(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Return the logits that tokens are drawn from: over the temperature, -inf where they are cut.
    Greedy sampling takes the raw ones.
    """
    if params.is_plain:
        return logits_BV
    return cut_logits(logits_BV / params.temperature, params.top_p, params.top_k)


def sample(
    logits_BV: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    params: SamplingParams,
    *,
    noise_BV: Tensor | None = None,
) -> Sampled:
    """Draw one token per row. `temperature=0` is greedy: the first of the largest logits, with
    logprob 0.

    `noise_BV` is `gumbel_noise(seeds_B, positions_B, V)` if the caller has it already. One row of
    noise serves all nodes of a draft tree at one depth, so `seeds_B` and `positions_B` may then be
    shorter than the logits.
    """
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    is_greedy, scaled = params.temperature == 0.0, allowed_logits(logits, params)
    if is_greedy:
        tokens_B = logits.argmax(dim=-1)
    elif noise_BV is not None:
        tokens_B = (noise_BV + scaled).argmax(dim=-1)
    else:
        tokens_B = noisy_argmax(scaled, seeds_B, positions_B)
    policy_B = _logprobs(logits, tokens_B)
    logprobs_B = policy_B if params.is_plain else _logprobs(scaled, tokens_B)
    return Sampled(
        token_ids_B=tokens_B,
        logprobs_B=torch.zeros_like(policy_B) if is_greedy else logprobs_B,
        policy_logprobs_B=policy_B,
        kept=kept_table(scaled) if params.is_cut and not is_greedy else None,
    )


def sample_each(
    logits_BV: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    params: Sequence[SamplingParams],
    noise_BV: Tensor | None = None,
) -> Sampled:
    """Draw one token per row, each as `sample` does with the row's own settings. `kept` is None."""
    rows_of: dict[tuple[float, float, int], list[int]] = {}
    for row, one in enumerate(params):
        rows_of.setdefault(one.distribution, []).append(row)
    tokens_B = torch.empty_like(seeds_B)
    logprobs_2B = logits_BV.new_empty(2, len(params), dtype=torch.float32)
    for rows in rows_of.values():
        index = torch.tensor(rows, device=seeds_B.device)
        noise = None if noise_BV is None else noise_BV[index]
        found = sample(
            logits_BV[index], seeds_B[index], positions_B[index], params[rows[0]], noise_BV=noise
        )
        tokens_B[index] = found.token_ids_B
        logprobs_2B[:, index] = torch.stack((found.logprobs_B, found.policy_logprobs_B))
    return Sampled(
        token_ids_B=tokens_B, logprobs_B=logprobs_2B[0], policy_logprobs_B=logprobs_2B[1]
    )


def _logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    logprobs_BV = logits_BV.log_softmax(dim=-1)
    return logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).float()


def add_noise(
    logits: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    scale: Tensor,
    factor: Tensor,
    ids_V: Tensor | None = None,
) -> Tensor:
    """Return logits * scale + `gumbel_noise` * factor in at least float32, for logits [B, V] or [B,
    K, V].

    The K rows of a request share its noise. `scale` is 0-dim, `factor` 0-dim or [B], both float64.
    `ids_V` are the token ids of the columns, ascending (None: 0 to V - 1). On CUDA the noise is not
    written.
    """
    if kernels := _kernels(seeds_B):
        return kernels.add_noise(logits, seeds_B, positions_B, scale, factor, ids_V)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ids_V = torch.arange(logits.shape[-1], device=logits.device) if ids_V is None else ids_V
    noise_BV = noise_of_ids(row_keys(seeds_B, positions_B), ids_V)
    offset_BV = noise_BV.mul_(factor.expand_as(seeds_B).unsqueeze(1)).to(dtype)
    offset = offset_BV if logits.dim() == 2 else offset_BV.unsqueeze(1)
    return (logits.to(dtype) * scale).add_(offset)
