"""Shapes of models, from their config.json on the Hub, and a tiny one that takes the same paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tlt_megatron.models.config import load_model_config

MODEL_CONFIGS = Path(__file__).with_name("model_configs")
QWEN_2_5_7B = load_model_config(MODEL_CONFIGS / "qwen2.5-7b")
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
