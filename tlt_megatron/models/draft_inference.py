"""The drafter for inference: the computation of `DraftModel` in few torch calls, on fused weights.

A decode pass runs this layer num_steps times on a few rows, where the overhead of torch calls
dominates. Norm weights are folded into the next matrices. EAGLE has no operation between fc and q,
k, v, so one matrix computes both. Results equal `DraftModel` up to rounding, which may cost speed
but never changes a committed token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.arithmetic import Arithmetic, fastest_arithmetic
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.draft_model import DraftMixture, DraftModel, FrozenExperts
from tlt_megatron.models.layers import DenseLayer, RotaryTable
from tlt_megatron.models.matrix import Matrix, packs
from tlt_megatron.models.mlp import DenseMlp, ExpertsMlp

_MAX_PACKED_HEAD = 256 << 20  # bytes; a larger head is read in place, without a packed copy


class _Matrices(NamedTuple):
    """The drafter's fused matrices, in the engine's dtype."""

    inputs: Matrix  # EAGLE: fc, then q, k and v after it; EAGLE-3: q, k and v; MTP: fc
    output: Matrix
    gate_up: Matrix
    down: Matrix
    fuse: Matrix | None  # fc of EAGLE-3
    qkv: Matrix | None  # for MTP, which has a norm after fc
    head: Matrix | None  # None: the target's head is read in place


class _Norms(NamedTuple):
    """Norm weights that no matrix holds, in the engine's dtype."""

    final: Tensor
    hidden: Tensor  # hidden_norm of EAGLE-3
    qk: Tensor | None  # [N+K, H], as in `LayerWeights`
    post: Tensor | None  # post_attention_layernorm of a mixture


class DraftInference:
    """Fused copies of a drafter's weights in the engine's dtype, that of the target's head.

    `fuse`, `forward` and `logits` match those of DraftModel but are not differentiable. A draft
    begins with `fuse`, which refreshes the copies if the drafter or the target has changed. It
    writes in place, so captured graphs stay valid.
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        num_ids: int = 0,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """`num_ids`: draft only so many token ids, at first the lowest; 0 drafts all. `arithmetic`
        None is the fastest one.
        """
        self._model = model
        self.num_loads = 0
        c = self.config = model.config
        dtype, device = model.lm_head_VD.dtype, model.embedding_VD.device
        self.dtype = dtype
        self.rotary = RotaryTable(c.rope, c.rotary_dim, dtype, device)
        self._num_rotated = c.num_heads + c.num_kv_heads
        self._arithmetic = arithmetic or fastest_arithmetic(device)
        self._rms = self._arithmetic.norm(c.rms_norm_eps, dtype, device)
        empty = partial(torch.empty, dtype=dtype, device=device)
        is_mixture = isinstance(model.layer.mlp, DraftMixture)
        self._norms = _Norms(
            final=empty(c.hidden_size),
            hidden=empty(c.hidden_size),
            qk=empty(self._num_rotated, c.head_dim) if c.form.has_qk_norm else None,
            post=empty(c.hidden_size) if is_mixture else None,
        )
        make, d = self._arithmetic.matrix, c.hidden_size
        matrix = partial(make.empty, dtype=dtype, device=device)
        num_heads = (self._num_rotated + c.num_kv_heads) * c.head_dim
        width = d if c.is_mtp else c.head_start + num_heads
        # Token ids of the columns of `logits`, ascending; None: all V.
        self.ids_C: Tensor | None = None
        head = None
        if 0 < num_ids < c.vocab_size:
            # In BPE vocabularies the lowest ids are the most frequent.
            self.ids_C = torch.arange(num_ids, device=device)
            head = matrix(num_ids, d)
        elif packs(dtype, device) and model.lm_head_VD.nbytes <= _MAX_PACKED_HEAD:
            head = make(model.lm_head_VD)
        self._matrices = _Matrices(
            inputs=matrix(width, 2 * d, has_bias=c.architecture == "eagle"),
            output=matrix(d, c.num_heads * c.head_dim),
            gate_up=matrix(2 * c.ffn_size, d),
            down=matrix(d, c.ffn_size),
            fuse=matrix(d, model.fc.in_features) if c.is_eagle3 else None,
            qkv=matrix(num_heads, d, has_bias=c.form.has_qkv_bias) if c.is_mtp else None,
            head=head,
        )
        self._loop = None
        if self._arithmetic.layers is not None and not is_mixture:
            layer = [self._dense_layer()]
            self._loop = self._arithmetic.layers(c, layer, self._rms, self.rotary)
        # Drafts all nodes of chains at once, if this drafter and its arithmetic can.
        self.draft_chains = None
        is_plain = not c.is_mtp and not c.norm_before_residual and self._matrices.head is not None
        if self._loop is not None and self._arithmetic.chains is not None and is_plain:
            parts = self._loop, self._matrices.inputs, self._matrices.head, model.embedding_VD
            self.draft_chains = self._arithmetic.chains(c, *parts)
        self._mixture = None
        if isinstance(model.layer.mlp, DraftMixture):
            self._mixture = self._make_mixture(model.layer.mlp.frozen)
        self.refresh()

    def _dense_layer(self) -> DenseLayer:
        m = self._matrices
        next_norm = None if self.config.architecture == "eagle" else self._norms.final
        return DenseLayer(None, self._norms.qk, m.output, None, m.gate_up, m.down, next_norm)

    def _make_mixture(self, frozen: FrozenExperts) -> ExpertsMlp:
        """Return the checkpoint's experts, not copied, beside the trained shared experts."""
        make, gate, m = self._arithmetic.matrix, self._arithmetic.gate, self._matrices
        return ExpertsMlp(
            config=frozen.config,
            router=make(frozen.router_ED),
            bias_E=frozen.bias_E,
            parts=[
                DenseMlp(make(gate_up), make(down), gate)
                for gate_up, down in zip(frozen.gate_up_EFD, frozen.down_EDF, strict=True)
            ],
            shared=DenseMlp(m.gate_up, m.down, gate),
        )

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load a drafter's own tensors, named as in `DraftModel.state_dict`."""
        self._model.load_state_dict(dict(weights))
        self.num_loads += 1
        self._is_stale = True

    def mark_stale(self) -> None:
        """Note that the target has changed."""
        self._is_stale = True

    def draft_from(self, ids_C: Tensor) -> None:
        """Draft these token ids from now on: as many as `ids_C` has, ascending."""
        assert self.ids_C is not None, "this drafter proposes all token ids"
        if not torch.equal(ids_C, self.ids_C):
            self.ids_C.copy_(ids_C)
            self._is_stale = True

    def refresh_if_stale(self) -> bool:
        """Refresh if the drafter, the target or the token ids have changed. Returns whether it
        did.
        """
        was_stale = self._is_stale
        if was_stale:
            self.refresh()
        return was_stale

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the fused copies from the current drafter and target."""
        self._is_stale = False
        model, layer, matrices = self._model, self._model.layer, self._matrices
        attention, mlp, post_norm = (
            layer.self_attn,
            layer.mlp,
            layer.post_attention_layernorm.weight,
        )
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection.weight for projection in projections])
        if self.config.is_eagle3:
            norms = (layer.input_layernorm.weight, layer.hidden_norm.weight)
            matrices.inputs.set(qkv * torch.cat(norms))
            assert matrices.fuse is not None
            matrices.fuse.set(model.fc.weight)
            self._norms.final.copy_(model.norm.weight)
            self._norms.hidden.copy_(layer.hidden_norm.weight)
        elif matrices.qkv is not None:
            norms = (model.enorm.weight, model.hnorm.weight)
            matrices.inputs.set(model.fc.weight * torch.cat(norms))
            bias = None
            if self.config.form.has_qkv_bias:
                bias = torch.cat([projection.bias for projection in projections])
            matrices.qkv.set(qkv * layer.input_layernorm.weight, bias)
            self._norms.final.copy_(model.norm.weight)
            if self._norms.qk is not None:
                parts = self._norms.qk.split((self.config.num_heads, self.config.num_kv_heads))
                parts[0].copy_(attention.q_norm.weight)
                parts[1].copy_(attention.k_norm.weight)
        else:
            fc = model.fc
            bias = torch.cat((fc.bias, qkv @ fc.bias))
            matrices.inputs.set(torch.cat((fc.weight, qkv @ fc.weight)), bias)
        matrices.output.set(attention.o_proj.weight)
        if isinstance(mlp, DraftMixture):  # the frozen experts read the same normalized rows
            assert self._norms.post is not None
            self._norms.post.copy_(post_norm)
            mlp, post_norm = mlp.shared_experts, torch.ones_like(post_norm)
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        matrices.gate_up.set(gate_up * post_norm)
        matrices.down.set(mlp.down_proj.weight)
        if matrices.head is not None and self.ids_C is not None:
            matrices.head.set(model.lm_head_VD.index_select(0, self.ids_C))
        elif matrices.head is not None:
            matrices.head.refresh()

    def tensors_read(self) -> list[Tensor]:
        """Return what `forward` reads besides inputs and KV; graphs need fixed addresses."""
        own = [t for matrix in self._matrices if matrix for t in matrix.tensors()]
        norms = [norm for norm in self._norms if norm is not None]
        return [
            *own,
            *norms,
            self._model.embedding_VD,
            self._rms.eps,
            self.rotary.table_SH2,
        ]

    @property
    def lanes(self) -> Callable[..., Attention]:
        """Return the attention of `forward` over lanes: see `LaneTreeAttention`."""
        return self._arithmetic.lanes

    def fuse(self, features_PF: Tensor) -> Tensor:
        """See `DraftModel.fuse`. The features must have the engine's dtype."""
        self.refresh_if_stale()
        fuse = self._matrices.fuse
        return features_PF if fuse is None else fuse(features_PF)

    def forward(
        self, token_ids_P: Tensor, hidden_PD: Tensor, position_ids_P: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """See `DraftModel.forward`."""
        c, norm, start, m = self.config, self._rms, self.config.head_start, self._matrices
        embedded_PD = self._model.embedding_VD.index_select(0, token_ids_P).to(self.dtype)
        if c.form.has_zero_first:
            embedded_PD = embedded_PD.masked_fill((position_ids_P == 0).unsqueeze(1), 0)
        inputs_P2D = torch.stack((embedded_PD, hidden_PD), dim=1)
        if c.architecture != "eagle":
            inputs_P2D = norm(inputs_P2D)
        fused = m.inputs(inputs_P2D.flatten(1))
        residual_PD = fused[:, :start] if start else hidden_PD
        if c.norm_before_residual:
            residual_PD = inputs_P2D[:, 1] * self._norms.hidden
        heads = fused[:, start:] if start else fused
        if m.qkv is not None:
            heads = m.qkv(norm(residual_PD))
        if self._loop is not None and self._loop.takes(attention):
            x_PD = residual_PD.clone()
            (normed_PD,) = self._loop(x_PD, position_ids_P, attention, heads_PA=heads)
            if c.architecture == "eagle":
                return x_PD, x_PD
            return x_PD if c.is_eagle3 else normed_PD, normed_PD
        heads_PAH = self._arithmetic.rotate(
            heads.view(len(heads), -1, c.head_dim),
            self._num_rotated,
            self.rotary.lookup(position_ids_P),
            norm,
            self._norms.qk,
        )
        context = attention.attend(0, heads_PAH[:, : c.num_heads], heads_PAH[:, c.num_heads :])
        residual_PD, normed_PD = norm.after(m.output, context, residual_PD, self._norms.post)
        if self._mixture is not None:
            output_PD = norm.after(self._mixture, normed_PD, residual_PD, self._norms.final)[1]
            return output_PD, output_PD
        gated_PF = self._arithmetic.gate(*m.gate_up(normed_PD).chunk(2, dim=-1))
        if c.is_eagle3:
            return norm.after(m.down, gated_PF, residual_PD, self._norms.final)
        if c.is_mtp:
            output_PD = norm.after(m.down, gated_PF, residual_PD, self._norms.final)[1]
            return output_PD, output_PD
        output_PD = m.down(gated_PF, residual_PD)
        return output_PD, output_PD

    def logits(self, head_input_PD: Tensor) -> Tensor:
        """Return [P, V] logits from the target's head; [P, C] of `ids_C` if these are fewer."""
        head = self._matrices.head
        return (
            F.linear(head_input_PD, self._model.lm_head_VD) if head is None else head(head_input_PD)
        )
