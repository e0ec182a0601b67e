"""The drafter written from its definition: one sequence, one position at a time, every key computed
anew.

The models of the drafter's tests, and what they are compared with. Follows SGLang's
LlamaForCausalLMEagle and LlamaForCausalLMEagle3 by hand, from a state_dict under SGLang's names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import tiny_config
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.types import DraftSequence

TARGET = tiny_config()
VOCAB_SIZE, HIDDEN_SIZE = TARGET.vocab_size, TARGET.hidden_size


def make_draft_model(
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    target: ModelConfig = TARGET,
    **config: Any,
) -> DraftModel:
    """A random drafter with its target's embedding and head; norms and bias are random too."""
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    embedding, lm_head = embedding.to(dtype), lm_head.to(dtype)
    made = dataclasses.replace(make_draft_config(target, architecture, embedding), **config)
    model = DraftModel(
        made, embedding_VD=embedding, lm_head_VD=lm_head, seed=seed, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise)
    return model.to(dtype)


def copy_drafter(model: DraftModel, device: torch.device) -> DraftModel:
    """The same drafter, target and all, on another device."""
    copied = DraftModel(
        model.config,
        embedding_VD=model.embedding_VD.to(device),
        lm_head_VD=model.lm_head_VD.to(device),
        dtype=model.fc.weight.dtype,
    )
    copied.load_state_dict(model.state_dict())
    return copied


def make_sequence(
    model: DraftModel, num_tokens: int, *, seed: int = 0, **fields: Any
) -> DraftSequence:
    """Random tokens and states."""
    generator = torch.Generator().manual_seed(1000 + seed)
    dtype = model.fc.weight.dtype
    shape = (num_tokens, model.config.feature_size)
    features = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    return DraftSequence(
        token_ids=torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator),
        features=features,
        final_hidden=hidden.to(dtype) if model.config.is_eagle3 else None,
        **fields,
    )


def slow_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm of one vector."""
    return x_D / math.sqrt(float((x_D * x_D).sum()) / x_D.numel() + eps) * weight_D


def slow_rotate(head_H: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head: channel i turns with channel i + H/2."""
    half = head_H.numel() // 2
    out = head_H.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / head_H.numel())
        a, b = head_H[i], head_H[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def slow_outputs(
    model: DraftModel,
    tokens: Sequence[int],
    hidden: Sequence[Tensor],
    weights: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden for the next step, head input) of the last of the pairs (tokens[i], hidden[i]) at
    positions 0, 1, ...
    """
    c, w = model.config, weights or dict(model.state_dict())
    prefix = "midlayer." if c.is_eagle3 else "layers.0."
    eps, theta = c.rms_norm_eps, c.rope.theta
    queries, keys, values, residuals = [], [], [], []
    for position, (token, feature) in enumerate(zip(tokens, hidden, strict=True)):
        embedded = model.embedding_VD[token]
        if c.is_eagle3:
            residual = feature
            left = slow_norm(embedded, w[prefix + "input_layernorm.weight"], eps)
            right = slow_norm(feature, w[prefix + "hidden_norm.weight"], eps)
            x = torch.cat((left, right))
            if c.norm_before_residual:
                residual = right
        elif c.is_mtp:
            if c.form.has_zero_first and position == 0:
                embedded = torch.zeros_like(embedded)
            left = slow_norm(embedded, w["enorm.weight"], eps)
            right = slow_norm(feature, w["hnorm.weight"], eps)
            residual = w["fc.weight"] @ torch.cat((left, right))
            x = slow_norm(residual, w[prefix + "input_layernorm.weight"], eps)
        else:
            residual = x = w["fc.weight"] @ torch.cat((embedded, feature)) + w["fc.bias"]
        parts = [w[f"{prefix}self_attn.{name}_proj.weight"] @ x for name in "qkv"]
        if c.form.has_qkv_bias:
            names = [f"{prefix}self_attn.{name}_proj.bias" for name in "qkv"]
            parts = [part + w[name] for part, name in zip(parts, names, strict=True)]
        q, k, v = (part.view(-1, c.head_dim) for part in parts)
        queries.append([slow_rotate(head, position, theta) for head in q])
        keys.append([slow_rotate(head, position, theta) for head in k])
        values.append(list(v))
        residuals.append(residual)
    heads = []
    for n in range(c.num_heads):
        kv_head = n // (c.num_heads // c.num_kv_heads)
        scores = torch.stack([queries[-1][n] @ key[kv_head] for key in keys])
        shares = (scores / math.sqrt(c.head_dim)).softmax(dim=0)
        heads.append(
            sum(share * value[kv_head] for share, value in zip(shares, values, strict=True))
        )
    x = residuals[-1] + w[prefix + "self_attn.o_proj.weight"] @ torch.cat(heads)
    normed = slow_norm(x, w[prefix + "post_attention_layernorm.weight"], eps)
    gate = w[prefix + "mlp.gate_proj.weight"] @ normed
    up = w[prefix + "mlp.up_proj.weight"] @ normed
    output = x + w[prefix + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    if c.is_mtp:
        output = slow_norm(output, w["norm.weight"], eps)
    return output, slow_norm(output, w["norm.weight"], eps) if c.is_eagle3 else output


def slow_draft(
    model: DraftModel,
    sequence: DraftSequence,
    position: int,
    num_steps: int,
    weights: dict[str, Tensor] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """What the engine does after it has verified the tokens up to `position` + 1. It drafts along
    the tokens of the sequence, with true features up to `position` and own ones after it.
    """
    hidden = [model.fc.weight @ f if model.config.is_eagle3 else f for f in sequence.features]
    hidden = hidden[: position + 1]
    results = []
    for step in range(num_steps):
        tokens = sequence.token_ids[1 : position + step + 2].tolist()
        results.append(slow_outputs(model, tokens, hidden, weights))
        hidden = [*hidden, results[-1][0]]
    return results
