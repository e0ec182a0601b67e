"""The policy's forward pass in pure torch: Llama, Qwen2/2.5, Qwen3 (dense), inference only.

Called by the embedded engine; the draft model uses its embedding and head. Tokens of all sequences are packed, [P], with
explicit positions. The `Attention` object decides which keys a query sees. So prefill, decoding and verifying a draft tree
run the same forward pass with different attentions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.models.arithmetic import PLAIN, Arithmetic
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.layers import RotaryTable
from tlt_megatron.models.matrix import packs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer. A = N + 2K fused heads; gate and up are fused, gate first."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [A*H, D]
    qkv_bias: Tensor | None  # [A*H]
    qk_norm: Tensor | None  # [N+K, H], the query norm repeated N times, then the key norm K times
    output: Tensor  # [D, N*H]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]


class _Matrices:
    """The matrices of one layer as `Arithmetic.matrix` objects."""

    def __init__(self, layer: LayerWeights, arithmetic: Arithmetic) -> None:
        self.qkv = arithmetic.matrix(layer.qkv, layer.qkv_bias)
        self.output = arithmetic.matrix(layer.output, None)
        self.gate_up = arithmetic.matrix(layer.gate_up, None)
        self.down = arithmetic.matrix(layer.down, None)


class Transformer:
    """Weights in one dtype on one device, and the forward pass. Weights are undefined until `load_hf` sets them.

    Example: `for name, tensor in HfReader(path).items(): model.load_hf(name, tensor)`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic = PLAIN,
    ) -> None:
        self.config = config
        self.arithmetic = arithmetic
        self.dtype = dtype
        self.device = device
        c = config

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        num_fused = c.num_heads + 2 * c.num_kv_heads
        self.embedding = empty(c.vocab_size, c.hidden_size)
        self.final_norm = empty(c.hidden_size)
        self.lm_head = (
            self.embedding if c.tie_word_embeddings else empty(c.vocab_size, c.hidden_size)
        )
        self.layers = [
            LayerWeights(
                input_norm=empty(c.hidden_size),
                qkv=empty(num_fused * c.head_dim, c.hidden_size),
                qkv_bias=empty(num_fused * c.head_dim) if c.has_qkv_bias else None,
                qk_norm=empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.has_qk_norm else None,
                output=empty(c.hidden_size, c.num_heads * c.head_dim),
                post_norm=empty(c.hidden_size),
                gate_up=empty(2 * c.ffn_size, c.hidden_size),
                down=empty(c.hidden_size, c.ffn_size),
            )
            for _ in range(c.num_layers)
        ]
        self._views = self._hf_views()
        self._matrices: list[_Matrices] = []  # made by the first pass after weights are loaded
        self.rotary = RotaryTable(c.rope, c.head_dim, dtype, device)
        self._norm = arithmetic.norm(c.rms_norm_eps, dtype, device)

    def _hf_views(self) -> dict[str, Tensor]:
        """Return every Hugging Face name with its view of the fused storage."""
        c = self.config
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not c.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        q_end = c.num_heads * c.head_dim
        k_end = q_end + c.num_kv_heads * c.head_dim
        rows = {"q": slice(0, q_end), "k": slice(q_end, k_end), "v": slice(k_end, None)}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            views[prefix + "input_layernorm.weight"] = layer.input_norm
            for part, part_rows in rows.items():
                views[f"{prefix}self_attn.{part}_proj.weight"] = layer.qkv[part_rows]
                if layer.qkv_bias is not None:
                    views[f"{prefix}self_attn.{part}_proj.bias"] = layer.qkv_bias[part_rows]
            if layer.qk_norm is not None:
                views[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[: c.num_heads]
                views[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[c.num_heads :]
            views[prefix + "self_attn.o_proj.weight"] = layer.output
            views[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            views[prefix + "mlp.gate_proj.weight"] = layer.gate_up[: c.ffn_size]
            views[prefix + "mlp.up_proj.weight"] = layer.gate_up[c.ffn_size :]
            views[prefix + "mlp.down_proj.weight"] = layer.down
        return views

    @staticmethod
    def _is_head_norm(name: str) -> bool:
        return name.endswith((".q_norm.weight", ".k_norm.weight"))

    def hf_names(self) -> frozenset[str]:
        """Return the names that `load_hf` must load before the first forward pass."""
        return frozenset(self._views)

    def load_hf(self, name: str, tensor: Tensor) -> None:
        """Load one tensor, cast to the model's dtype. ValueError for an unknown name or a wrong shape."""
        view = self._views.get(name)
        if view is None:
            known = "tied to model.embed_tokens.weight" if name == "lm_head.weight" else "unknown"
            raise ValueError(f"tensor {name!r} is {known} in this {self.config.model_type} model")
        expected = view.shape[1:] if self._is_head_norm(name) else view.shape
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {tuple(expected)}")
        self._matrices = []
        view.copy_(
            tensor
        )  # a head norm is repeated per head, so that one multiply serves all heads

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as views under their Hugging Face names, without a tied lm_head."""
        for name, view in self._views.items():
            yield name, view[0] if self._is_head_norm(name) else view

    def num_bytes(self) -> int:
        """Return the bytes of the weights and of the packed copies that the first pass makes."""
        held = sum(view.nbytes for view in self._views.values())
        if packs(self.dtype, self.device):
            held += sum(
                matrix.nbytes
                for layer in self.layers
                for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
            )
            held += self.lm_head.nbytes
        return held

    def tensors_read(self) -> list[Tensor]:
        """Return all tensors that a forward pass reads besides its inputs and the KV. Captured graphs need fixed addresses."""
        return [*self._views.values(), self.rotary.table_SH2, self._norm.eps]

    def pack(self) -> None:
        """Prepare the matrices now instead of in the first pass."""
        self._matrices = [_Matrices(layer, self.arithmetic) for layer in self.layers]
        self._head = self.arithmetic.matrix(self.lm_head, None)

    def forward(self, token_ids_P: Tensor, position_ids_P: Tensor, attention: Attention) -> Tensor:
        """Return [P, D] after the final norm. `rotary.reserve` must cover the positions."""
        return self.forward_tapped(token_ids_P, position_ids_P, attention, ())[0]

    def forward_tapped(
        self,
        token_ids_P: Tensor,
        position_ids_P: Tensor,
        attention: Attention,
        tap_layers: Collection[int],
    ) -> tuple[Tensor, Tensor]:
        """Return `forward`'s output, and its concatenation with the residual stream after each of `tap_layers`.

        The second result is [P, D * (1 + number of taps)].
        """
        if not self._matrices:
            self.pack()
        c = self.config
        num_tokens = token_ids_P.shape[0]
        num_rotated = c.num_heads + c.num_kv_heads
        num_fused = num_rotated + c.num_kv_heads
        norm, rotate_, gate = self._norm, self.arithmetic.rotate_, self.arithmetic.gate
        cos_P1H, sin_P1H = self.rotary.lookup(position_ids_P)
        x_PD = F.embedding(token_ids_P, self.embedding)
        taps: list[Tensor] = []
        for index, (layer, matrices) in enumerate(zip(self.layers, self._matrices, strict=True)):
            fused = matrices.qkv(norm(x_PD, layer.input_norm))
            heads_PAH = fused.view(num_tokens, num_fused, c.head_dim)
            rotated = heads_PAH[:, :num_rotated]
            if layer.qk_norm is not None:
                rotated.copy_(norm(rotated, layer.qk_norm))
            rotate_(rotated, cos_P1H, sin_P1H)
            context_PN = attention.attend(
                index, heads_PAH[:, : c.num_heads], heads_PAH[:, c.num_heads :]
            )
            x_PD = matrices.output(context_PN, x_PD)
            gate_PF, up_PF = matrices.gate_up(norm(x_PD, layer.post_norm)).chunk(2, dim=-1)
            x_PD = matrices.down(gate(gate_PF, up_PF), x_PD)
            if index in tap_layers:
                taps.append(x_PD)
        hidden_PD = norm(x_PD, self.final_norm)
        return hidden_PD, torch.cat((hidden_PD, *taps), dim=-1) if taps else hidden_PD

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """Return [P, V] logits from the output of `forward`."""
        if not self._matrices:
            self.pack()
        return self._head(hidden_PD)
