"""The policy's forward pass in pure torch: all families of `FAMILIES`, inference only.

Tokens of all sequences are packed, [P], with explicit positions. The `Attention` object decides
which keys a query sees: prefill, decoding and verification differ in it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_megatron.config.model_shape import ROUTER_BIAS, tensor_shapes
from tlt_megatron.models.arithmetic import PLAIN, Arithmetic
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.attention.sums import wide_dtype
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import dtype_of
from tlt_megatron.models.layers import DenseLayer, RotaryTable
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.mlp import DenseMlp, ExpertsMlp, Mlp

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer. A = N + 2K fused heads; gate and up are fused, gate first."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [A*H, D]
    qkv_bias: Tensor | None  # [A*H]
    qk_norm: Tensor | None  # [N+K, H], the query norm repeated N times, then the key norm K times
    output: Tensor  # [D, N*H]
    post_norm: Tensor  # [D]
    router: Tensor | None  # [E, D]; None: a dense layer
    gate_up: Tensor  # [2F, D], in a mixture one expert after the other
    down: Tensor  # [D, F], likewise
    router_bias: Tensor | None  # [E] in at least float32, for a router of sigmoids
    shared_gate_up: Tensor | None  # [2F, D], for the experts that every token goes to
    shared_down: Tensor | None  # [D, F]


class Transformer:
    """Weights and the forward pass. Weights are undefined until `load_hf` sets them.

    Example: `for name, tensor in HfReader(path).items(): model.load_hf(name, tensor)`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic = PLAIN,
    ) -> None:
        if config.experts is not None and device.type != "cpu":
            raise ValueError(
                f"rollout.engine=embedded: computes a {config.model_type} on a CPU alone;"
                " set rollout.engine=sglang"
            )
        self.config = config
        self.arithmetic = arithmetic
        self.dtype = dtype
        self.device = device
        self._shapes = tensor_shapes(config)
        self._views: dict[str, Tensor] = {}  # every Hugging Face tensor, in the weights below
        self.embedding = self._allocate("model.embed_tokens.weight")
        self.final_norm = self._allocate("model.norm.weight")
        is_tied = config.tie_word_embeddings
        self.lm_head = self.embedding if is_tied else self._allocate("lm_head.weight")
        self.layers = [self._allocate_layer(number) for number in range(config.num_layers)]
        # qkv, output and MLP of each layer. The first pass after a load makes them.
        self._matrices: list[tuple[Matrix, Matrix, Mlp]] = []
        self._loop: Any = None  # see `Arithmetic.layers`
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype, device)
        self._norm = arithmetic.norm(config.rms_norm_eps, dtype, device)

    def _allocate(self, *names: str) -> Tensor:
        """Return an empty tensor that holds the named Hugging Face tensors along dim 0."""
        shapes = [self._shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        if names[0].endswith(_HEAD_NORMS):  # repeated, so that one multiply serves all heads
            shapes, rows = [(0, *shapes[0])], [self.config.num_heads, self.config.num_kv_heads]
        dtype = dtype_of(names[0], self.dtype)
        fused = torch.empty(sum(rows), *shapes[0][1:], dtype=dtype, device=self.device)
        self._views |= zip(names, fused.split(rows), strict=True)
        return fused

    def _allocate_layer(self, number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."

        def allocate(*names: str) -> Tensor:
            return self._allocate(*(prefix + name for name in names))

        def find(*names: str) -> Tensor | None:
            """Allocate what a layer may lack."""
            return allocate(*names) if prefix + names[0] in self._shapes else None

        experts = self.config.experts if self.config.has_experts_in(number) else None
        names, shared = ["mlp"], "mlp.shared_experts"
        if experts is not None:
            names = [f"mlp.experts.{i}" for i in range(experts.num_experts)]
        gate_up = [f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")]
        return LayerWeights(
            input_norm=allocate("input_layernorm.weight"),
            qkv=allocate(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
            qkv_bias=find(*(f"self_attn.{part}_proj.bias" for part in "qkv")),
            qk_norm=find(*(f"self_attn.{part}_norm.weight" for part in "qk")),
            output=allocate("self_attn.o_proj.weight"),
            post_norm=allocate("post_attention_layernorm.weight"),
            router=find("mlp.gate.weight"),
            router_bias=find(f"mlp.gate.{ROUTER_BIAS}"),
            shared_gate_up=find(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
            shared_down=find(f"{shared}.down_proj.weight"),
            gate_up=allocate(*gate_up),
            down=allocate(*(f"{name}.down_proj.weight" for name in names)),
        )

    def hf_names(self) -> frozenset[str]:
        """Return the names that `load_hf` must load before the first forward pass."""
        return frozenset(self._views)

    def load_hf(self, name: str, tensor: Tensor) -> None:
        """Load a tensor, cast to the model's dtype. ValueError for a wrong name or shape."""
        view = self._views.get(name)
        if view is None:
            known = "tied to model.embed_tokens.weight" if name == "lm_head.weight" else "unknown"
            raise ValueError(f"tensor {name!r} is {known} in this {self.config.model_type} model")
        expected = self._shapes[name]
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {expected}")
        self._matrices, self._loop = [], None  # frees the packed copies before there are others
        view.copy_(tensor)

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as views under their Hugging Face names, without a tied lm_head."""
        for name, view in self._views.items():
            yield name, view[0] if name.endswith(_HEAD_NORMS) else view

    def tensors_read(self) -> list[Tensor]:
        """Return what a pass reads besides inputs and KV; captured graphs need fixed addresses."""
        return [*self._views.values(), self.rotary.table_SH2, self._norm.eps]

    def pack(self) -> None:
        """Prepare the matrices now instead of in the first pass."""
        make = self.arithmetic.matrix
        self._matrices = [
            (make(layer.qkv, layer.qkv_bias), make(layer.output, None), self._make_mlp(layer))
            for layer in self.layers
        ]
        self._head = make(self.lm_head, None)
        if self.arithmetic.layers is not None and self.config.experts is None:
            first_norm, dense = self.layers[0].input_norm, self._dense_layers()
            self._loop = self.arithmetic.layers(
                self.config, dense, self._norm, self.rotary, first_norm
            )

    def _next_norms(self) -> list[Tensor]:
        return [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]

    def _dense_layers(self) -> list[DenseLayer]:
        found = []
        norms = zip(self.layers, self._next_norms(), strict=True)
        for (qkv, output, mlp), (layer, next_norm) in zip(self._matrices, norms, strict=True):
            assert isinstance(mlp, DenseMlp)
            attention = qkv, layer.qk_norm, output
            found.append(DenseLayer(*attention, layer.post_norm, mlp.gate_up, mlp.down, next_norm))
        return found

    def _make_mlp(self, layer: LayerWeights) -> Mlp:
        make, experts = self.arithmetic.matrix, self.config.experts

        def dense(gate_up: Tensor, down: Tensor) -> DenseMlp:
            return DenseMlp(make(gate_up, None), make(down, None), self.arithmetic.gate)

        if layer.router is None or experts is None:
            return dense(layer.gate_up, layer.down)
        weights = (whole.chunk(experts.num_experts) for whole in (layer.gate_up, layer.down))
        shared = None
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            shared = dense(layer.shared_gate_up, layer.shared_down)
        return ExpertsMlp(
            config=experts,
            router=make(layer.router.to(wide_dtype(self.dtype)), None),
            bias_E=layer.router_bias,
            parts=[dense(*pair) for pair in zip(*weights, strict=True)],
            shared=shared,
        )

    def forward(
        self,
        token_ids_P: Tensor,
        position_ids_P: Tensor,
        attention: Attention,
        tap_layers: Collection[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return [P, D] after the final norm, and it beside the residual stream after each of
        `tap_layers`, [P, D * (1 + number of taps)].

        `rotary.reserve` must cover the positions.
        """
        if not self._matrices:
            self.pack()
        c, norm = self.config, self._norm
        num_rotated = c.num_heads + c.num_kv_heads
        shape = token_ids_P.shape[0], num_rotated + c.num_kv_heads, c.head_dim
        x_PD = F.embedding(token_ids_P, self.embedding)
        if self._loop is not None and self._loop.takes(attention):
            states = self._loop(x_PD, position_ids_P, attention, tap_layers=tap_layers)
            return states[0], torch.cat(states, dim=-1) if tap_layers else states[0]
        angles = self.rotary.lookup(position_ids_P)
        normed_PD = norm(x_PD, self.layers[0].input_norm)
        taps = []
        pairs = zip(self.layers, self._next_norms(), strict=True)
        for index, (layer, next_norm) in enumerate(pairs):
            qkv, output, mlp = self._matrices[index]
            heads_PAH = self.arithmetic.rotate(
                qkv(normed_PD).view(shape), num_rotated, angles, norm, layer.qk_norm
            )
            context_PN = attention.attend(
                index, heads_PAH[:, : c.num_heads], heads_PAH[:, c.num_heads :]
            )
            x_PD, normed_PD = norm.after(output, context_PN, x_PD, layer.post_norm)
            x_PD, normed_PD = norm.after(mlp, normed_PD, x_PD, next_norm)
            if index in tap_layers:
                taps.append(x_PD)
        hidden_PD = normed_PD
        return hidden_PD, torch.cat((hidden_PD, *taps), dim=-1) if taps else hidden_PD

    def routes(self) -> Tensor:
        """Return the experts of each token of the newest pass, [P, L * K] int16: K of each layer
        with experts.
        """
        mlps = (mlp for *_, mlp in self._matrices if isinstance(mlp, ExpertsMlp))
        return torch.cat([mlp.chosen_PK for mlp in mlps], dim=1).short()

    def logits(self, hidden_PD: Tensor) -> Tensor:
        """Return [P, V] logits from the states after the final norm."""
        if not self._matrices:
            self.pack()
        return self._head(hidden_PD)
