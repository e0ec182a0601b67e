"""The two attention operators of SGLang's `intel_amx` backend, through torch's own
scaled_dot_product_attention.

Shapes: P rows of queries, N query heads, K kv heads, H head dim, S slots of the KV memory, R
requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _attend(
    query_PNH: Tensor, key_TKH: Tensor, value_TKH: Tensor, is_seen_PT: Tensor, scale: float
) -> Tensor:
    """[P, N, H] of one request."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query_PNH, key_TKH, value_TKH))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen_PT, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def _refuse(logit_cap: float, is_cross: bool, window: int, sinks: Tensor | None) -> None:
    if logit_cap or is_cross or window > 0 or sinks is not None:
        raise NotImplementedError(
            f"stand-in attention: {logit_cap=}, {is_cross=}, {window=}, sinks={sinks is not None} must be off"
        )


def decode_attention_cpu(
    query_RNH: Tensor,
    key_buffer_SKH: Tensor,
    value_buffer_SKH: Tensor,
    k_scale: float,
    v_scale: float,
    out_RNH: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    slots_R: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    requests_R: Tensor,
    lengths_R: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store the new keys and values, then attend from one query per request to all of its
    positions.
    """
    _refuse(logit_cap, is_cross, window, sinks)
    for new, buffer in ((key, key_buffer_SKH), (value, value_buffer_SKH)):
        if new is not None:
            buffer[slots_R] = new.view(-1, *buffer.shape[1:])
    for row, (request, length) in enumerate(
        zip(requests_R.tolist(), lengths_R.tolist(), strict=True)
    ):
        slots_T = req_to_token[request, :length].long()
        out_RNH[row : row + 1] = _attend(
            query_RNH[row : row + 1],
            key_buffer_SKH[slots_T],
            value_buffer_SKH[slots_T],
            torch.ones(1, length, dtype=torch.bool),
            scale,
        )


def extend_attention_cpu(
    query_PNH: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out_PNH: Tensor,
    key_buffer_SKH: Tensor,
    value_buffer_SKH: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    requests_R: Tensor,
    lengths_R: Tensor,
    new_lengths_R: Tensor,
    starts_R: Tensor,
    max_new: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attend from the last `new_lengths_R` positions of each request, whose keys are stored
    already.

    `tree_mask` holds one [new, new] block per request, row sees column; without it the new
    positions are causal.
    """
    _refuse(logit_cap, is_cross, window, sinks)
    mask_at = 0
    for request, length, num_new, start in zip(
        *(x.tolist() for x in (requests_R, lengths_R, new_lengths_R, starts_R)), strict=True
    ):
        slots_T = req_to_token[request, :length].long()
        is_seen_PT = torch.ones(num_new, length, dtype=torch.bool)
        if tree_mask is not None:
            block = tree_mask.flatten()[mask_at : mask_at + num_new**2]
            is_seen_PT[:, length - num_new :] = block.view(num_new, num_new)
            mask_at += num_new**2
        elif is_causal:
            is_seen_PT = is_seen_PT.tril(length - num_new)
        rows = slice(start, start + num_new)
        out_PNH[rows] = _attend(
            query_PNH[rows], key_buffer_SKH[slots_T], value_buffer_SKH[slots_T], is_seen_PT, scale
        )


_TAIL = "float scale, float cap, bool cross, int window, Tensor? encoder_lens, Tensor? sinks"
_SCHEMAS = {
    decode_attention_cpu: (
        "(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, Tensor(c!) out,"
        " Tensor? k, Tensor? v, Tensor slots, Tensor attn_logits, Tensor req_to_token, Tensor requests,"
        f" Tensor lengths, {_TAIL}) -> ()"
    ),
    extend_attention_cpu: (
        "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_buffer, Tensor v_buffer, float k_scale,"
        " float v_scale, Tensor req_to_token, Tensor requests, Tensor lengths, Tensor new_lengths, Tensor starts,"
        f" int max_new, {_TAIL}, Tensor? tree_mask, bool causal) -> ()"
    ),
}
for _function, _schema in _SCHEMAS.items():
    _library.define(_function.__name__ + _schema)
    _library.impl(_function.__name__, _function, "CPU")
