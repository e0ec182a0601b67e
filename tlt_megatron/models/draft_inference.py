"""The drafter for inference: the computation of `DraftModel` in few torch calls, on fused weights.

A decode pass runs this layer num_steps times on a few rows, where the overhead of torch calls dominates. A table over the
whole vocabulary, if it fits, holds the products that depend on the token alone (EAGLE: its half of fc and q, k, v; EAGLE-3:
its half of q, k, v). Norm weights are folded into the next matrices. Results equal `DraftModel` up to rounding. Rounding may
cost speed but never changes a committed token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.attention import Attention
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.models.layers import RotaryTable, apply_rope_
from tlt_megatron.models.matrix import Matrix, packs


class DraftInference:
    """Fused copies of a drafter's weights in the engine's dtype, which must be that of the target's head.

    `fuse`, `forward` and `logits` match those of DraftModel but are not differentiable. Call `refresh` after the drafter or
    the target changes; on GPUs it writes in place, so captured graphs stay valid. To draft a chain or a tree, look up the
    rotation of all depths once and call `step`: `hidden, head = draft.step(tokens, hidden, rotation, attention)`.
    """

    def __init__(
        self, model: DraftModel, dtype: torch.dtype, *, max_table_bytes: int = 256 << 20
    ) -> None:
        if model.lm_head_VD.dtype != dtype:
            raise ValueError(
                f"dtype={dtype}: must be that of the target's head, {model.lm_head_VD.dtype}"
            )
        self._model = model
        self.is_stale = False  # whether the drafter or the target has changed since `refresh`
        c = self.config = model.config
        self.dtype = dtype
        device = model.embedding_VD.device
        self.rotary = RotaryTable(c.rope, c.head_dim, dtype, device)
        self._num_rotated = c.num_heads + c.num_kv_heads
        self._num_fused = self._num_rotated + c.num_kv_heads
        self._head_start = 0 if c.is_eagle3 else c.hidden_size  # EAGLE: a fused row begins with fc
        self._width = width = self._head_start + self._num_fused * c.head_dim
        row_bytes = c.vocab_size * dtype.itemsize
        self._has_table = row_bytes * width <= max_table_bytes
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._eps = torch.tensor(c.rms_norm_eps, dtype=self._wide, device=device)
        if self._has_table:
            self._table = torch.empty(c.vocab_size, width, dtype=dtype, device=device)
        else:
            self._token_bias = torch.empty(width, dtype=dtype, device=device)
        self._norm = torch.empty(c.hidden_size, dtype=dtype, device=device)

        def matrix(num_out: int, num_in: int) -> Matrix:
            return Matrix.empty(num_out, num_in, dtype, device)

        d = c.hidden_size
        if not self._has_table:
            self._from_token = matrix(width, d)
        self._from_hidden = matrix(width, d)
        self._output = matrix(d, c.num_heads * c.head_dim)
        self._gate_up = matrix(2 * c.ffn_size, d)
        self._down = matrix(d, c.ffn_size)
        if c.is_eagle3:
            self._fuse = matrix(d, model.fc.in_features)
        # A packed head is a copy. If that is too large, use the target's head in place.
        if packs(dtype, device) and row_bytes * d <= max_table_bytes:
            self._head = Matrix(model.lm_head_VD)
        else:
            self._head = None
        self.refresh()

    def weights(self) -> dict[str, Tensor]:
        """Return the drafter's own tensors, in the form that `load` takes."""
        return self._model.state_dict()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load a drafter's own tensors, named as in `DraftModel.state_dict`. Call `refresh` before the next use."""
        self._model.load_state_dict(dict(weights))
        self.is_stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the fused copies from the current drafter, target embedding and head."""
        self.is_stale = False
        model, layer = self._model, self._model.layer
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection.weight for projection in projections])
        size = self.config.hidden_size
        if self.config.is_eagle3:
            from_token = qkv[:, :size] * layer.input_layernorm.weight
            from_hidden = qkv[:, size:] * layer.hidden_norm.weight
            bias = qkv.new_zeros(self._width)
            self._fuse.set(model.fc.weight)
            self._norm.copy_(model.norm.weight)
        else:
            # No operation lies between fc and q, k, v, so one matrix computes both.
            fused = torch.cat((model.fc.weight, qkv @ model.fc.weight))
            from_token, from_hidden = fused[:, :size], fused[:, size:]
            bias = torch.cat((model.fc.bias, qkv @ model.fc.bias))
        self._from_hidden.set(from_hidden)
        if self._has_table:
            rows = self._token_input(model.embedding_VD.to(from_token.dtype))
            self._table.copy_(F.linear(rows, from_token, bias))
        else:
            self._from_token.set(from_token)
            self._token_bias.copy_(bias)
        self._output.set(attention.o_proj.weight)
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        self._gate_up.set(gate_up * layer.post_attention_layernorm.weight)
        self._down.set(mlp.down_proj.weight)
        if self._head is not None:
            self._head.refresh()

    def _token_input(self, embedded: Tensor) -> Tensor:
        return self._rms(embedded) if self.config.is_eagle3 else embedded

    def _rms(self, x: Tensor) -> Tensor:
        """Return the RMS norm of x without a weight, in fewer CPU kernels than F.rms_norm."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self._wide)
        scale = torch.addcmul(self._eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return x * (scale if scale.dtype == x.dtype else scale.to(x.dtype))

    def num_bytes(self) -> int:
        """Return the bytes of the fused copies, table included."""
        held = (self._norm, self._table if self._has_table else self._token_bias)
        matrices = (value for value in vars(self).values() if isinstance(value, Matrix))
        return sum(t.nbytes for t in held) + sum(matrix.num_bytes for matrix in matrices)

    def tensors_read(self) -> list[Tensor]:
        """Return all tensors that `forward` reads besides its inputs and the KV. Captured graphs need fixed addresses."""
        tokens = (self._table,) if self._has_table else (self._token_bias, self._model.embedding_VD)
        matrices = [v.weight for v in vars(self).values() if isinstance(v, Matrix)]
        return [*tokens, *matrices, self._norm, self._eps, self.rotary.table_SH2]

    def rotation(self, position_ids_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for `step`; slice both by depth. `rotary.reserve` must cover the positions."""
        return self.rotary.lookup(position_ids_P)

    def fuse(self, features_PF: Tensor) -> Tensor:
        """See `DraftModel.fuse`. The features must have the engine's dtype."""
        return self._fuse(features_PF) if self.config.is_eagle3 else features_PF

    def forward(
        self, token_ids_P: Tensor, hidden_PD: Tensor, position_ids_P: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """See `DraftModel.forward`."""
        return self.step(token_ids_P, hidden_PD, self.rotation(position_ids_P), attention)

    def step(
        self,
        token_ids_P: Tensor,
        hidden_PD: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` with the result of `rotation`."""
        c = self.config
        if self._has_table:
            from_token = self._table.index_select(0, token_ids_P)
        else:
            embedded = F.embedding(token_ids_P, self._model.embedding_VD).to(self.dtype)
            from_token = self._from_token(self._token_input(embedded)).add_(self._token_bias)
        normed_PD = self._rms(hidden_PD) if c.is_eagle3 else hidden_PD
        fused = self._from_hidden(normed_PD, from_token)
        start = self._head_start
        residual_PD = fused[:, :start] if start else hidden_PD
        heads = fused[:, start:] if start else fused
        heads_PAH = heads.view(-1, self._num_fused, c.head_dim)
        apply_rope_(heads_PAH[:, : self._num_rotated], *rotation)
        context = attention.attend(0, heads_PAH[:, : c.num_heads], heads_PAH[:, c.num_heads :])
        residual_PD = self._output(context, residual_PD)
        gate_PF, up_PF = self._gate_up(self._rms(residual_PD)).chunk(2, dim=-1)
        output_PD = self._down(F.silu(gate_PF).mul_(up_PF), residual_PD)
        if not c.is_eagle3:
            return output_PD, output_PD
        return output_PD, self._rms(output_PD).mul_(self._norm)

    def logits(self, head_input_PD: Tensor) -> Tensor:
        """Return [P, V] logits from the target's head."""
        if self._head is not None:
            return self._head(head_input_PD)
        return F.linear(head_input_PD, self._model.lm_head_VD)
