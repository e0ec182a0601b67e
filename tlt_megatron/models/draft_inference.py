"""The drafter as the engines run it: the arithmetic of `DraftModel` in few torch calls, on fused weights.

A decode pass runs this layer num_steps times on a handful of rows, where a torch call costs more than its arithmetic. What
to know: what depends on the token alone (EAGLE: its half of fc and q, k, v; EAGLE-3: the same without fc) is tabulated for
the whole vocabulary where that fits, and norm weights are folded into the matrices that follow. Results equal `DraftModel`
up to rounding, which is all a drafter needs: what it says can cost time, never change a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.layers import RotaryTable, apply_rope_
from tlt_megatron.models.transformer import Attention


class DraftInference:
    """Fused copies of a drafter's weights in the engine's dtype; never part of autograd.

    `refresh` after the drafter or the target's embedding changed; it writes in place, so captured graphs stay valid.
    Example of a chain: `hidden, head = draft.step(tokens, draft.fuse(features), draft.rotation(positions), attention)`.
    """

    def __init__(
        self, model: DraftModel, dtype: torch.dtype, *, max_table_bytes: int = 256 << 20
    ) -> None:
        self._model = model
        c = self.config = model.config
        self.dtype = dtype
        device = model.embedding_VD.device

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        hidden_size = c.hidden_size
        self._num_rotated = c.num_heads + c.num_kv_heads
        self._head_start = 0 if c.is_eagle3 else hidden_size  # EAGLE: the fused row begins with fc
        width = self._head_start + (self._num_rotated + c.num_kv_heads) * c.head_dim
        # Stored [in, out], as mm takes them.
        self._from_hidden = empty(hidden_size, width)
        self._has_table = c.vocab_size * width * dtype.itemsize <= max_table_bytes
        if self._has_table:
            self._table = empty(c.vocab_size, width)
        else:
            self._from_token, self._token_bias = empty(hidden_size, width), empty(width)
        self._output = empty(c.num_heads * c.head_dim, hidden_size)
        self._gate_up = empty(hidden_size, 2 * c.ffn_size)
        self._down = empty(c.ffn_size, hidden_size)
        if c.is_eagle3:
            self._fuse = empty(c.feature_size, hidden_size)
            self._norm = empty(hidden_size)
        self.rotary = RotaryTable(c.rope, c.head_dim, dtype, device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what the drafter and the target's embedding hold now."""
        model, layer = self._model, self._model.layer
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection.weight for projection in projections])
        hidden_size = self.config.hidden_size
        bias = None
        if self.config.is_eagle3:
            from_token = qkv[:, :hidden_size] * layer.input_layernorm.weight
            from_hidden = qkv[:, hidden_size:] * layer.hidden_norm.weight
            self._fuse.copy_(model.fc.weight.t())
            self._norm.copy_(model.norm.weight)
        else:
            # Nothing stands between fc and q, k, v, so both are one matrix.
            fused = torch.cat((model.fc.weight, qkv @ model.fc.weight))
            from_token, from_hidden = fused[:, :hidden_size], fused[:, hidden_size:]
            bias = torch.cat((model.fc.bias, qkv @ model.fc.bias))
        self._from_hidden.copy_(from_hidden.t())
        if self._has_table:
            rows = self._token_input(model.embedding_VD.to(from_token.dtype))
            self._table.copy_(F.linear(rows, from_token, bias))
        else:
            self._from_token.copy_(from_token.t())
            self._token_bias.copy_(bias) if bias is not None else self._token_bias.zero_()
        self._output.copy_(attention.o_proj.weight.t())
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        self._gate_up.copy_((gate_up * layer.post_attention_layernorm.weight).t())
        self._down.copy_(mlp.down_proj.weight.t())

    def _token_input(self, embedded: Tensor) -> Tensor:
        return self._rms(embedded) if self.config.is_eagle3 else embedded

    def _rms(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), None, self.config.rms_norm_eps)

    def num_bytes(self) -> int:
        """Bytes of the fused copies, the table included."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def rotation(self, position_ids_P: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) for `step`; look the positions of all depths up at once. `rotary.reserve` must cover them."""
        return self.rotary.lookup(position_ids_P)

    def fuse(self, features_PF: Tensor) -> Tensor:
        """See `DraftModel.fuse`."""
        return features_PF @ self._fuse if self.config.is_eagle3 else features_PF

    def step(
        self,
        token_ids_P: Tensor,
        hidden_PD: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """See `DraftModel.forward`: (hidden for the following step, input of the LM head)."""
        c = self.config
        if self._has_table:
            from_token = self._table.index_select(0, token_ids_P)
        else:
            embedded = F.embedding(token_ids_P, self._model.embedding_VD).to(self.dtype)
            from_token = self._token_input(embedded).matmul(self._from_token).add_(self._token_bias)
        normed_PD = self._rms(hidden_PD) if c.is_eagle3 else hidden_PD
        fused = torch.addmm(from_token, normed_PD, self._from_hidden)
        start = self._head_start
        residual_PD = fused[:, :start] if start else hidden_PD
        heads_PAH = fused[:, start:].unflatten(1, (-1, c.head_dim))
        apply_rope_(heads_PAH[:, : self._num_rotated], *rotation)
        context = attention.attend(0, heads_PAH[:, : c.num_heads], heads_PAH[:, c.num_heads :])
        residual_PD = torch.addmm(residual_PD, context, self._output)
        gate_up = torch.mm(self._rms(residual_PD), self._gate_up)
        gated = F.silu(gate_up[:, : c.ffn_size]).mul_(gate_up[:, c.ffn_size :])
        output_PD = torch.addmm(residual_PD, gated, self._down)
        if not c.is_eagle3:
            return output_PD, output_PD
        return output_PD, F.rms_norm(output_PD, (c.hidden_size,), self._norm, c.rms_norm_eps)

    def logits(self, head_input_PD: Tensor) -> Tensor:
        """[P, V] through the target's head."""
        return F.linear(head_input_PD, self._model.lm_head_VD)
