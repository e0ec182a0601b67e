"""Attention over the KV cache for prefill and for decoding over pages.

Each class satisfies `Attention`; the engine passes an instance to `Transformer.forward`. `PagedAttention` serves
many sequences of unequal length with shared prompts. `tree_attention.LaneTreeAttention` serves few contiguous sequences
with one kernel call and no merging. Both give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention.kernels import attend_with_lse, merge_attention
from tlt_megatron.models.kv_cache import KvCache, SequenceKv


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSegment:
    """Consecutive tokens of one sequence in a prefill pass."""

    new_slots_C: Tensor  # slots for their keys and values
    context_slots_S: Tensor  # slots of all positions up to and including them, in order


class PrefillAttention:
    """Causal attention of several packed segments, each over its own sequence. Any prefix may be cached already."""

    def __init__(self, cache: KvCache, segments: Sequence[PrefillSegment]) -> None:
        self._cache = cache
        self._segments = segments
        self._slots_P = torch.cat([segment.new_slots_C for segment in segments])
        self._masks: list[Tensor | None] = []
        for segment in segments:
            num_new, num_all = segment.new_slots_C.numel(), segment.context_slots_S.numel()
            mask = None
            if num_new < num_all:  # otherwise is_causal is enough
                visible = torch.ones(num_new, num_all, dtype=torch.bool, device=cache.device)
                mask = visible.tril(num_all - num_new)
            self._masks.append(mask)
        cache.mark_written(self._slots_P)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`."""
        cache = self._cache
        cache.write(layer, self._slots_P, kv_PKH)
        num_heads, num_kv_heads = query_PNH.shape[1], cache.num_kv_heads
        outputs = []
        start = 0
        for segment, mask in zip(self._segments, self._masks, strict=True):
            end = start + segment.new_slots_C.numel()
            kv_KSH = cache.layers[layer].index_select(1, segment.context_slots_S).unsqueeze(0)
            out = F.scaled_dot_product_attention(
                query_PNH[start:end].transpose(0, 1).unsqueeze(0),
                kv_KSH[:, :num_kv_heads],
                kv_KSH[:, num_kv_heads:],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=num_heads != num_kv_heads,
            )
            outputs.append(out.squeeze(0).transpose(0, 1).reshape(end - start, -1))
            start = end
        return torch.cat(outputs)


class PagedAttention:
    """One query per sequence over pages: every page is one row of a batched kernel, and lse merges the parts.

    A prompt page serves all siblings at once, so a shared prompt is read from memory once. Call `rebuild` after pages or
    sequences change, and `begin_step` before each pass.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        attend: Callable[
            [Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
        ] = attend_with_lse,
        merge: Callable[[Tensor, Tensor], Tensor] = merge_attention,
    ) -> None:
        """`attend` computes attention over one page; `merge` combines the parts of a sequence in position order."""
        self._cache = cache
        self._attend, self._merge = attend, merge
        self._paged = [
            layer.unflatten(1, (-1, cache.page_size)).transpose(0, 1) for layer in cache.layers
        ]

    def rebuild(self, sequences: Sequence[SequenceKv]) -> None:
        """Plan for these sequences, in batch order.

        Each sequence must have its own pages, and each page a written position once the pass begins: the kernel's
        lse over no keys is not -inf.
        """
        cache = self._cache
        device = cache.device
        end, start = cache.response_end, cache.prompt_start
        owner = [0] * end  # a free page is computed for row 0, and its result is never read
        readers: list[list[int]] = [[] for _ in range(cache.num_pages - start)]
        prompt_pages: list[list[int]] = []  # of each sequence
        for row, sequence in enumerate(sequences):
            for page in sequence.pages:
                owner[page] = row
            assert sequence.prompt is not None
            # Skip the last page of a prompt if the sequence holds a copy of its content.
            shared = sequence.prompt.pages[: -1 if sequence.num_copied else None]
            prompt_pages.append([page - start for page in shared])
            for index in prompt_pages[-1]:
                readers[index].append(row)
        num_siblings = max(map(len, readers), default=0) or 1
        # Part numbers: response pages, then (prompt page, sibling), then one empty part as padding.
        empty = end + len(readers) * num_siblings
        parts = [
            [end + index * num_siblings + readers[index].index(row) for index in indices]
            + sequence.pages
            for row, (indices, sequence) in enumerate(zip(prompt_pages, sequences, strict=True))
        ]
        for rows in readers:
            rows.extend([0] * (num_siblings - len(rows)))
        num_parts = max(map(len, parts))
        for row_parts in parts:
            row_parts.extend([empty] * (num_parts - len(row_parts)))
        self._table_BM = torch.tensor(parts, device=device)
        self._owner_P = torch.tensor(owner, device=device)
        self._readers_XG = torch.tensor(readers, device=device) if readers else None
        num_kv_heads = cache.num_kv_heads
        pages = slice(0, end), slice(start, cache.num_pages)
        self._response_kv = [
            (p[pages[0], :num_kv_heads], p[pages[0], num_kv_heads:]) for p in self._paged
        ]
        self._prompt_kv = [
            (p[pages[1], :num_kv_heads], p[pages[1], num_kv_heads:]) for p in self._paged
        ]
        bias = cache.bias_T.view(-1, 1, 1, cache.page_size)
        self._response_bias, self._prompt_bias = bias[pages[0]], bias[pages[1]]

    def begin_step(self, slots_B: Tensor) -> None:
        """Set the slots that this pass writes, one per sequence."""
        self._slots_B = slots_B
        self._cache.mark_written(slots_B)

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:
        """See `Attention`."""
        cache = self._cache
        cache.write(layer, self._slots_B, kv_PKH)
        num_rows, num_heads, head_dim = query_PNH.shape
        num_kv_heads = cache.num_kv_heads
        repeat = num_heads // num_kv_heads
        query_BKRH = query_PNH.view(num_rows, num_kv_heads, repeat, head_dim)
        key, value = self._response_kv[layer]
        out, lse = self._attend(
            query_BKRH.index_select(0, self._owner_P), key, value, self._response_bias
        )
        outs = [out, out.new_zeros(1, num_kv_heads, repeat, head_dim)]
        lses = [lse, lse.new_full((1, num_kv_heads, repeat), -torch.inf)]
        if self._readers_XG is not None:
            num_pages, num_siblings = self._readers_XG.shape
            query = query_BKRH.index_select(0, self._readers_XG.view(-1))
            query = query.view(num_pages, num_siblings, num_kv_heads, repeat, head_dim)
            query = query.transpose(1, 2).reshape(num_pages, num_kv_heads, -1, head_dim)
            key, value = self._prompt_kv[layer]
            out, lse = self._attend(query, key, value, self._prompt_bias)
            out = out.reshape(num_pages, num_kv_heads, num_siblings, repeat, head_dim)
            out = out.transpose(1, 2)
            lse = lse.reshape(num_pages, num_kv_heads, num_siblings, repeat).transpose(1, 2)
            outs.insert(1, out.reshape(-1, num_kv_heads, repeat, head_dim))
            lses.insert(1, lse.reshape(-1, num_kv_heads, repeat))
        table = self._table_BM.view(-1)
        parts = (num_rows, -1, num_kv_heads, repeat)
        merged = self._merge(
            torch.cat(outs).index_select(0, table).view(*parts, head_dim),
            torch.cat(lses).index_select(0, table).view(parts),
        )
        return merged.view(num_rows, num_heads * head_dim)
