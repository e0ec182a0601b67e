"""Shapes of models: from their config.json on the Hub, and small ones that take the same paths."""

from __future__ import annotations

from pathlib import Path

from tlt_megatron.models.config import load_model_config

MODEL_CONFIGS = Path(__file__).with_name("model_configs")
QWEN_2_5_7B = load_model_config(MODEL_CONFIGS / "qwen2.5-7b")
TINY = load_model_config(MODEL_CONFIGS / "tiny")
