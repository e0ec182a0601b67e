"""Bookkeeping of KV slots: copies between index tables, in place as SGLang's kernels do it."""

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor
) -> None:
    """Row by row in every buffer; all sources are read before anything is written."""
    targets, sources = target_slots.tolist(), source_slots.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


def assign_extend_cache_locs_cpu(
    requests_R: Tensor,
    req_to_token: Tensor,
    starts_R: Tensor,
    ends_R: Tensor,
    out: Tensor,
    table_width: int,
) -> None:
    """The slots start..end-1 of each request, packed one request after the other."""
    parts = [
        req_to_token[request, start:end]
        for request, start, end in zip(
            requests_R.tolist(), starts_R.tolist(), ends_R.tolist(), strict=True
        )
    ]
    packed = torch.cat(parts)
    out[: packed.numel()] = packed.to(out.dtype)


def assign_req_to_token_pool_cpu(
    requests_R: Tensor,
    req_to_token: Tensor,
    starts_R: Tensor,
    ends_R: Tensor,
    slots: Tensor,
    table_width: int,
) -> None:
    """The other way: write packed slots to positions start..end-1 of each request."""
    sizes = (ends_R - starts_R).tolist()
    for request, start, end, part in zip(
        requests_R.tolist(), starts_R.tolist(), ends_R.tolist(), slots.split(sizes), strict=True
    ):
        req_to_token[request, start:end] = part.to(req_to_token.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    requests_R: Tensor,
    req_to_token: Tensor,
    lengths_R: Tensor,
    out: Tensor,
    table_width: int,
    topk: int,
    num_steps: int,
) -> None:
    """The `topk * num_steps` slots behind each request's committed tokens."""
    ends_R = lengths_R + topk * num_steps
    assign_extend_cache_locs_cpu(
        requests_R, req_to_token, lengths_R, ends_R, out.view(-1), table_width
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    requests_R: Tensor,
    lengths_R: Tensor,
    topk: int,
    num_steps: int,
    table_width: int,
) -> Tensor:
    """[R * topk, width]: branch k of a request sees its committed slots, then its own `num_steps`
    slots.
    """
    table = req_to_token[requests_R.long()].repeat_interleave(topk, dim=0)
    for row, length in enumerate(lengths_R.repeat_interleave(topk).tolist()):
        own = length + (row % topk) * num_steps
        table[row, length : length + num_steps] = table[row, own : own + num_steps].clone()
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens_R: Tensor, bonus_tokens_R: Tensor, stride: int
) -> None:
    """The last accepted token of each request."""
    tokens_RS = accept_tokens.view(-1, stride)
    last_R1 = accept_lens_R.long().unsqueeze(1) - 1
    bonus_tokens_R.copy_(tokens_RS.gather(1, last_R1).squeeze(1))


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accepted: Tensor
) -> None:
    """The slots of accepted rows, packed; -1 marks what was not accepted."""
    rows = accept_index[accept_index >= 0].long()
    accepted[: rows.numel()] = out_cache_loc[rows]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    starts_R: Tensor,
    lengths_R: Tensor,
    next_ids: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one; the next token goes to the end, or to
    `select_index`.
    """
    for request, (start, length) in enumerate(
        zip(starts_R.tolist(), lengths_R.tolist(), strict=True)
    ):
        if length == 0:
            continue
        ids = input_ids[start : start + length]
        ids[:-1] = ids[1:].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = next_ids.view(-1)[request]
