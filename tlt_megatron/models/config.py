"""The policy's model config, re-exported from `config/model_shape.py`.

That file needs no torch, so an unsupported model is refused before torch is imported."""

from tlt_megatron.config.experts_shape import ExpertsConfig
from tlt_megatron.config.model_shape import ModelConfig, RopeConfig, load_model_config

__all__ = ["ExpertsConfig", "ModelConfig", "RopeConfig", "load_model_config"]
