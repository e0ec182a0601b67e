"""The shape of Qwen2.5-7B, from its config.json, and a tiny one that takes the same paths."""

from __future__ import annotations

import dataclasses

from tlt_megatron.models.config import ModelConfig, RopeConfig

QWEN_2_5_7B = ModelConfig(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    ffn_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    has_qkv_bias=True,
    has_qk_norm=False,
)
TINY = dataclasses.replace(
    QWEN_2_5_7B,
    vocab_size=96,
    hidden_size=64,
    ffn_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
