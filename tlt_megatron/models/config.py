"""The shape of a policy, as the engines, the drafter and the Megatron builder know it; read in `config/model_shape.py`,
which needs no torch, so that an unsupported model is refused before torch is imported."""

from tlt_megatron.config.model_shape import (
    SUPPORTED_MODEL_TYPES,
    ModelConfig,
    RopeConfig,
    load_model_config,
)

__all__ = ["SUPPORTED_MODEL_TYPES", "ModelConfig", "RopeConfig", "load_model_config"]
