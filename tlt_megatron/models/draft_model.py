"""The learned drafter: a decoder layer over [embedding(x_{t+1}); hidden(h_t)]: EAGLE, EAGLE-3, or
the checkpoint's own layer (MTP).

`drafter/` trains it and the engines run it. The pair (x_{t+1}, h_t) has position t and predicts
x_{t+2}. Parameter names and computation match SGLang's LlamaForCausalLMEagle and
LlamaForCausalLMEagle3, so SGLang can load the state_dict. Embedding and LM head belong to the
target; the drafter never trains or saves them. Sources: EAGLE (Li et al. 2024, arXiv 2401.15077),
EAGLE-3 (Li et al. 2025, arXiv 2503.01840), MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_megatron.config.draft_folder import (
    ARCHITECTURES,
    MTP,
    NUM_AUX_LAYERS,
    SIZES,
    default_aux_layer_ids,
)
from tlt_megatron.models.attention import Attention
from tlt_megatron.models.config import ExpertsConfig, ModelConfig, RopeConfig
from tlt_megatron.models.layers import RotaryTable
from tlt_megatron.models.mlp import route

# Two targets count as the same if at most this many of the 256 bits of their embedding hashes
# differ. Unrelated targets differ in 128 +- 8 bits; RL changes a few bits.
_MAX_DIFFERING_BITS = 64
_HASH_SIDE = 16
_HASH_ROWS = 256


class LayerForm(NamedTuple):
    """What the checkpoint's own layer has. Fields are named as in ModelConfig."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    experts: ExpertsConfig | None = None  # `DraftConfig.ffn_size` is then that of shared experts
    has_zero_first: bool = False  # the embedding at position 0 counts as 0


PLAIN = LayerForm()  # a drafter of EAGLE's kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Sizes of a drafter, and its target. Fields are named as in ModelConfig."""

    # eagle, mtp: features after the target's final norm | eagle3: features of three layers
    architecture: str
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...] = ()  # eagle3: features are the residual stream after these
    norm_before_residual: bool = False  # eagle3: the residual stream begins after hidden_norm
    target: str | None = None  # `fingerprint_target`; None: a foreign checkpoint without it
    form: LayerForm = PLAIN

    def __post_init__(self) -> None:
        known = (*ARCHITECTURES, MTP)
        if self.architecture not in known:
            raise ValueError(
                f"architecture={self.architecture!r}: must be one of {', '.join(known)}"
            )
        needed = NUM_AUX_LAYERS if self.is_eagle3 else 0
        ids = self.aux_layer_ids
        if len(ids) != needed or list(ids) != sorted(set(ids)) or any(i < 0 for i in ids):
            raise ValueError(
                f"aux_layer_ids={ids}: must be {needed} rising layer numbers"
                f" for {self.architecture}"
            )

    @property
    def is_eagle3(self) -> bool:
        """Return whether the features of three layers are fused."""
        return self.architecture == "eagle3"

    @property
    def head_start(self) -> int:
        """Return the columns of fc, which the first matrix computes before the heads."""
        return 0 if self.is_eagle3 else self.hidden_size

    @property
    def is_mtp(self) -> bool:
        """Return whether it is the checkpoint's own layer."""
        return self.architecture == MTP

    @property
    def rotary_dim(self) -> int:
        """Return the channels of a head that turn with the position."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def feature_size(self) -> int:
        """Return the width of the target's features per position."""
        return self.hidden_size * (NUM_AUX_LAYERS if self.is_eagle3 else 1)


def make_draft_config(
    target: ModelConfig,
    architecture: str,
    embedding_VD: Tensor,
    aux_layer_ids: tuple[int, ...] = (),
) -> DraftConfig:
    """Return a config with the target's sizes. No `aux_layer_ids`: eagle3 takes the default."""
    if architecture == "eagle3" and not aux_layer_ids:
        aux_layer_ids = default_aux_layer_ids(target.num_layers)
    if any(i > target.num_layers - 2 for i in aux_layer_ids):
        raise ValueError(
            f"aux_layer_ids={aux_layer_ids}: the target has {target.num_layers} layers,"
            f" so at most {target.num_layers - 2}"
        )
    return DraftConfig(
        architecture=architecture,
        rope=replace(target.rope, partial_rotary_factor=1.0),
        aux_layer_ids=aux_layer_ids,
        target=fingerprint_target(embedding_VD),
        **{name: getattr(target, name) for name in SIZES},
    )


def fingerprint_target(embedding_VD: Tensor) -> str:
    """Return the fingerprint of the target with this embedding, 64 hex digits. RL updates of a
    policy keep (almost) the same one.

    Its 256 bits are the signs of random projections of some rows (Charikar 2002, SimHash), so small
    changes of the embedding flip few. An exact checksum would change after one update, or in
    another dtype.
    """
    vocab_size, hidden_size = embedding_VD.shape
    num_rows = min(_HASH_ROWS, vocab_size)
    rows = torch.linspace(0, vocab_size - 1, num_rows, dtype=torch.float64).long()
    sample = embedding_VD.detach()[rows.to(embedding_VD.device)].to("cpu", torch.float64)
    left = _random_signs(_HASH_SIDE, num_rows, seed=1)
    right = _random_signs(hidden_size, _HASH_SIDE, seed=2)
    bits = (left @ sample @ right).flatten() > 0
    value = sum(1 << index for index, bit in enumerate(bits.tolist()) if bit)
    return f"{value:0{_HASH_SIDE * _HASH_SIDE // 4}x}"


def _random_signs(num_rows: int, num_columns: int, seed: int) -> Tensor:
    """Return +1 or -1 from an integer hash of the index, the same with any torch version."""
    mixed = torch.arange(num_rows * num_columns, dtype=torch.int64) + seed * 0x9E3779B9
    for shift, factor in ((16, 0x45D9F3B), (15, 0x119DE1F3), (16, 0x2C1B3C6D)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return (((mixed >> 13) & 1) * 2 - 1).double().view(num_rows, num_columns)


def check_target(config: DraftConfig, embedding_VD: Tensor) -> None:
    """Raise ValueError with the reason if the drafter belongs to another target."""
    for name, actual in zip(("vocab_size", "hidden_size"), embedding_VD.shape, strict=True):
        own = getattr(config, name)
        if own != actual:
            raise ValueError(f"the drafter's {name}={own} is not the target's {actual}")
    if config.target is None:
        return
    found = fingerprint_target(embedding_VD)
    differing = (int(found, 16) ^ int(config.target, 16)).bit_count()
    if differing > _MAX_DIFFERING_BITS:
        raise ValueError(
            f"the drafter belongs to another target: {differing} of 256 bits of the"
            f" embedding's hash differ (at most {_MAX_DIFFERING_BITS}); drafter's target"
            f" {config.target[:16]}.., here {found[:16]}.."
        )


class DraftNorm(nn.RMSNorm):
    """RMS norm that casts its weight to the input's dtype, because autocast does not."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim; any leading dims."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    """Projections with rotary embedding. The `Attention` object decides which keys a query sees."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = config
        self._head_dim = c.head_dim
        input_size, bias = c.hidden_size * (2 if c.is_eagle3 else 1), c.form.has_qkv_bias
        self.q_proj = nn.Linear(input_size, c.num_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, c.num_kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, c.num_kv_heads * c.head_dim, bias=bias)
        if c.form.has_qk_norm:
            self.q_norm = DraftNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = DraftNorm(c.head_dim, c.rms_norm_eps)
        self._has_qk_norm = c.form.has_qk_norm
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(
        self, x_PI: Tensor, cos_P1H: Tensor, sin_P1H: Tensor, attention: Attention
    ) -> Tensor:
        """Return [P, D]. The input has width D, or 2D in EAGLE-3."""
        parts = (self.q_proj(x_PI), self.k_proj(x_PI), self.v_proj(x_PI))
        q_PNH, k_PKH, v_PKH = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        if self._has_qk_norm:
            q_PNH, k_PKH = self.q_norm(q_PNH), self.k_norm(k_PKH)
        q_PNH = _rotate(q_PNH, cos_P1H, sin_P1H)
        k_PKH = _rotate(k_PKH, cos_P1H, sin_P1H)
        return self.o_proj(attention.attend(0, q_PNH, torch.cat((k_PKH, v_PKH), dim=1)))


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x_PD: Tensor) -> Tensor:
        """Return [P, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_PD)) * self.up_proj(x_PD))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenExperts:
    """Router and routed experts of the checkpoint's own layer, in the target's dtype. They are
    neither trained nor saved.
    """

    config: ExpertsConfig
    router_ED: Tensor  # in at least float32; so is the bias
    bias_E: Tensor | None
    gate_up_EFD: Tensor  # [E, 2F, D], gate first
    down_EDF: Tensor


class DraftMixture(nn.Module):
    """The weighted sum of a token's frozen experts, + the shared experts."""

    def __init__(self, config: DraftConfig, frozen: FrozenExperts) -> None:
        super().__init__()
        self.shared_experts = DraftMlp(config)
        self.frozen = frozen

    def forward(self, x_PD: Tensor) -> Tensor:
        """Return [P, D]."""
        frozen = self.frozen
        with torch.autocast(x_PD.device.type, enabled=False):  # a rounded score chooses others
            scores_PE = F.linear(x_PD.to(frozen.router_ED.dtype), frozen.router_ED)
            weights_PK, chosen_PK = route(scores_PE, frozen.bias_E, frozen.config)
        rows_PD, sum_PD = x_PD.to(frozen.down_EDF.dtype), self.shared_experts(x_PD)
        for expert in chosen_PK.unique().tolist():
            tokens, places = (chosen_PK == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows_PD[tokens], frozen.gate_up_EFD[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, frozen.down_EDF[expert]).to(sum_PD.dtype)
            weights = weights_PK[tokens, places].unsqueeze(-1).to(sum_PD.dtype)
            sum_PD = sum_PD.index_add(0, tokens, out * weights)
        return sum_PD


class DraftLayer(nn.Module):
    """The decoder layer. EAGLE has no norm before attention; EAGLE-3 one for each input."""

    def __init__(self, config: DraftConfig, experts: FrozenExperts | None = None) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config) if experts is None else DraftMixture(config, experts)
        self.post_attention_layernorm = DraftNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_eagle3 or config.is_mtp:
            self.input_layernorm = DraftNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_eagle3:
            self.hidden_norm = DraftNorm(config.hidden_size, config.rms_norm_eps)


class DraftModel(nn.Module):
    """The trainable drafter, with the `state_dict` that SGLang reads; `DraftInference` is faster.

    `embedding_VD` and `lm_head_VD` are the target's tensors or views of them: any dtype, on the
    drafter's device. Policy updates may change them in place.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        embedding_VD: Tensor,
        lm_head_VD: Tensor,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        experts: FrozenExperts | None = None,
    ) -> None:
        super().__init__()
        assert (experts is None) == (config.form.experts is None)
        check_target(config, embedding_VD)
        if lm_head_VD.shape != embedding_VD.shape:
            raise ValueError(
                f"lm_head {tuple(lm_head_VD.shape)} must have the shape of the embedding"
                f" {tuple(embedding_VD.shape)}"
            )
        self.config = config
        # Detached, so that this module does not register a Parameter of the target.
        self.embedding_VD, self.lm_head_VD = embedding_VD.detach(), lm_head_VD.detach()
        hidden_size = config.hidden_size
        if config.is_eagle3:
            self.fc = nn.Linear(config.feature_size, hidden_size, bias=False)
            self.midlayer = DraftLayer(config)
            self.norm = DraftNorm(hidden_size, config.rms_norm_eps)
        elif config.is_mtp:
            self.enorm = DraftNorm(hidden_size, config.rms_norm_eps)
            self.hnorm = DraftNorm(hidden_size, config.rms_norm_eps)
            self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
            self.layers = nn.ModuleList([DraftLayer(config, experts)])
            self.norm = DraftNorm(hidden_size, config.rms_norm_eps)
        else:
            # SGLang always gives this layer a bias, even if a checkpoint has none.
            self.fc = nn.Linear(2 * hidden_size, hidden_size)
            self.layers = nn.ModuleList([DraftLayer(config)])
        self._initialize(seed)
        self.to(embedding_VD.device, dtype)
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype, embedding_VD.device)

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Initialize matrices that keep the variance, the same on all ranks for one seed."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)
            # Embeddings are far smaller than features, and EAGLE has no norm here. Without this
            # scale, training is slow to use the token.
            scale = self.embedding_VD.double().square().mean().sqrt().clamp(min=1e-6)
            self.fc.weight[:, : self.config.hidden_size] /= scale.to("cpu", torch.float32)

    @property
    def layer(self) -> DraftLayer:
        """Return the only layer, under either name."""
        layer = self.midlayer if self.config.is_eagle3 else self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def fuse(self, features_PF: Tensor) -> Tensor:
        """Return the first step's input [P, D]: the features, fused by fc in EAGLE-3."""
        features_PF = features_PF.to(self.fc.weight.dtype)
        return self.fc(features_PF) if self.config.is_eagle3 else features_PF

    def forward(
        self, token_ids_P: Tensor, hidden_PD: Tensor, position_ids_P: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Run a step over packed tokens; return hidden [P, D] and the LM head's input [P, D].

        `hidden_PD` comes from `fuse` or from the previous step. In EAGLE and MTP both outputs are
        the same tensor. `rotary.reserve` must cover the positions.
        """
        layer = self.layer
        cos_P1H, sin_P1H = self.rotary.lookup(position_ids_P)
        embedded_PD = F.embedding(token_ids_P, self.embedding_VD).to(self.fc.weight.dtype)
        if self.config.is_eagle3:
            normed = (layer.input_layernorm(embedded_PD), layer.hidden_norm(hidden_PD))
            residual_PD = normed[1] if self.config.norm_before_residual else hidden_PD
            input_PI = torch.cat(normed, dim=-1)
        elif self.config.is_mtp:
            if self.config.form.has_zero_first:
                embedded_PD = embedded_PD.masked_fill((position_ids_P == 0).unsqueeze(1), 0)
            normed = (self.enorm(embedded_PD), self.hnorm(hidden_PD))
            residual_PD = self.fc(torch.cat(normed, dim=-1))
            input_PI = layer.input_layernorm(residual_PD)
        else:
            residual_PD = input_PI = self.fc(torch.cat((embedded_PD, hidden_PD), dim=-1))
        residual_PD = residual_PD + layer.self_attn(input_PI, cos_P1H, sin_P1H, attention)
        output_PD = residual_PD + layer.mlp(layer.post_attention_layernorm(residual_PD))
        if self.config.is_mtp:
            output_PD = self.norm(output_PD)
        return output_PD, self.norm(output_PD) if self.config.is_eagle3 else output_PD

    def logits(self, head_input_PD: Tensor) -> Tensor:
        """Return [P, V] logits from the target's head, in its dtype."""
        return F.linear(head_input_PD.to(self.lm_head_VD.dtype), self.lm_head_VD)


def _rotate(heads_PNH: Tensor, cos_P1H: Tensor, sin_P1H: Tensor) -> Tensor:
    """Rotate as `layers.apply_rope_`, out of place for autograd."""
    size = cos_P1H.shape[-1]
    turned = heads_PNH[..., :size]
    turned = turned * cos_P1H + turned.roll(size // 2, -1) * sin_P1H
    return torch.cat((turned.to(heads_PNH.dtype), heads_PNH[..., size:]), dim=-1)
