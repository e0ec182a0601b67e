"""Attention over the KV cache for prefill, and for decoding over pages.

`PagedAttention` serves many sequences of unequal length with shared prompts.
`lanes.LaneTreeAttention` serves few contiguous sequences with one kernel call and no merging. Both
give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.kernels import (
    attend_grouped,
    attend_with_lse,
    bias_for_queries,
    merge_attention,
)
from tlt_megatron.models.kv_cache import KvCache, SequenceKv


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSegment:
    """Consecutive tokens of one sequence in a prefill pass."""

    new_slots_C: Tensor  # slots for their keys and values
    context_slots_S: Tensor  # slots of all positions up to and including them, in order


_QUERIES = 512  # queries of one call with a cached start: bounds the memory of bias and results


class PrefillAttention:
    """Causal attention of packed segments, each over its sequence. Its start may be cached.

    torch's attention writes the scores of grouped heads on CUDA if it is given a bias. So a segment
    with a cached start uses `attend_grouped`.
    """

    def __init__(self, cache: KvCache, segments: Sequence[PrefillSegment]) -> None:
        self._cache = cache
        self._slots_P = torch.cat([segment.new_slots_C for segment in segments])
        self._sizes = [segment.new_slots_C.numel() for segment in segments]
        self._contexts: list[tuple[Tensor, Tensor | None]] = []  # slots and bias of each segment
        for segment, num_new in zip(segments, self._sizes, strict=True):
            num_all = segment.context_slots_S.numel()
            bias_CS = None
            if num_new < num_all:  # otherwise is_causal is enough
                hidden = cache.bias_T.new_full((num_new, num_all), -torch.inf)
                bias_CS = hidden.triu_(num_all - num_new + 1)
            self._contexts.append((segment.context_slots_S, bias_CS))

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots_P, kv_PKH)
        outputs = []
        queries = query_PNH.split(self._sizes)
        for query_CNH, (slots_S, bias_CS) in zip(queries, self._contexts, strict=True):
            kv_1KSH = cache.layers[layer].index_select(1, slots_S)[None]
            key, value = kv_1KSH.chunk(2, dim=1)
            if bias_CS is None:
                out_1NCH = F.scaled_dot_product_attention(
                    query_CNH.transpose(0, 1)[None],
                    key,
                    value,
                    is_causal=True,
                    enable_gqa=cache.num_heads_per_kv > 1,
                )
                outputs.append(out_1NCH[0].transpose(0, 1).flatten(1))
                continue
            parts = zip(query_CNH.split(_QUERIES), bias_CS.split(_QUERIES), strict=True)
            for query, bias_BRS in ((query[None], bias[None]) for query, bias in parts):
                bias = bias_for_queries(bias_BRS, cache.num_heads_per_kv)
                outputs.append(attend_grouped(query, key, value, bias))
        return torch.cat(outputs)


class PagedAttention:
    """One query per sequence over pages: a page is a row of a batched kernel, and lse merges them.

    A prompt page serves all siblings at once, so a shared prompt is read from memory once. Call
    `rebuild` after pages or sequences change, and `pass_of` before each pass.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._paged = [
            layer.unflatten(1, (-1, cache.page_size)).transpose(0, 1) for layer in cache.layers
        ]

    def rebuild(self, sequences: Sequence[SequenceKv]) -> None:
        """Plan for these sequences, in batch order.

        Each sequence must have its own pages, and each page a written position once the pass
        begins: the kernel's lse over no keys is not -inf.
        """
        cache = self._cache
        end, start = cache.response_end, cache.prompt_start
        owner = [0] * end  # a free page is computed for row 0, and its result is never read
        readers: list[list[int]] = [[] for _ in range(cache.num_pages - start)]
        shared: list[list[tuple[int, int]]] = []  # for each row: prompt page, number as its reader
        for row, sequence in enumerate(sequences):
            for page in sequence.pages:
                owner[page] = row
            assert sequence.prompt is not None
            shared.append([(p - start, len(readers[p - start])) for p in sequence.prompt])
            for page in sequence.prompt:
                readers[page - start].append(row)
        num_siblings = max(map(len, readers), default=0) or 1
        # Part numbers: response pages, then (prompt page, sibling), then one empty part as padding.
        parts = [
            [end + page * num_siblings + sibling for page, sibling in pages] + sequence.pages
            for pages, sequence in zip(shared, sequences, strict=True)
        ]
        num_parts, empty = max(map(len, parts)), end + len(readers) * num_siblings
        parts = [numbers + [empty] * (num_parts - len(numbers)) for numbers in parts]
        readers = [rows + [0] * (num_siblings - len(rows)) for rows in readers]
        self._table_BM = torch.tensor(parts, device=cache.device)
        self._owner_P = torch.tensor(owner, device=cache.device)
        self._readers_XG = torch.tensor(readers, device=cache.device) if readers else None
        own, prompts = slice(0, end), slice(start, cache.num_pages)
        self._response_kv = [layer[own].chunk(2, dim=1) for layer in self._paged]
        self._prompt_kv = [layer[prompts].chunk(2, dim=1) for layer in self._paged]
        bias = cache.bias_T.view(-1, 1, 1, cache.page_size)
        self._response_bias, self._prompt_bias = bias[own], bias[prompts]

    def pass_of(self, slots_B: Tensor, _positions_B: Tensor) -> PagedAttention:
        self._slots_B = slots_B
        return self

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots_B, kv_PKH)
        num_rows, num_heads, head_dim = query_PNH.shape
        num_kv_heads, repeat = cache.num_kv_heads, cache.num_heads_per_kv
        query_BKRH = query_PNH.view(num_rows, num_kv_heads, repeat, head_dim)
        query = query_BKRH.index_select(0, self._owner_P)
        keys, values = self._response_kv[layer]
        out, lse = attend_with_lse(query, keys, values, self._response_bias)
        outs = [out, out.new_zeros(1, num_kv_heads, repeat, head_dim)]
        lses = [lse, lse.new_full((1, num_kv_heads, repeat), -torch.inf)]
        if self._readers_XG is not None:
            num_pages, num_siblings = self._readers_XG.shape
            query = query_BKRH.index_select(0, self._readers_XG.view(-1))
            query = query.view(num_pages, num_siblings, num_kv_heads, repeat, head_dim)
            query = query.transpose(1, 2).reshape(num_pages, num_kv_heads, -1, head_dim)
            keys, values = self._prompt_kv[layer]
            out, lse = attend_with_lse(query, keys, values, self._prompt_bias)
            siblings = (num_siblings, repeat)
            outs.insert(1, out.unflatten(2, siblings).transpose(1, 2).flatten(0, 1))
            lses.insert(1, lse.unflatten(2, siblings).transpose(1, 2).flatten(0, 1))
        table = self._table_BM.view(-1)
        parts = (num_rows, -1, num_kv_heads, repeat)
        merged = merge_attention(
            torch.cat(outs).index_select(0, table).view(*parts, head_dim),
            torch.cat(lses).index_select(0, table).view(parts),
        )
        return merged.view(num_rows, num_heads * head_dim)
