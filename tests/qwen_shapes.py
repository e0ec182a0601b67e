"""The config.json of models that tests plan memory and layouts for."""

from __future__ import annotations

import json

from tools.gpu.shapes import MODEL_CONFIGS

_CONFIG_7B = MODEL_CONFIGS / "qwen2.5-7b" / "config.json"
QWEN_7B = json.loads(_CONFIG_7B.read_text(encoding="utf-8")) | {"eos_token_id": 1}
QWEN_1_7B = {
    "model_type": "qwen3",
    "rope_theta": 1e6,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "rope_theta": 1e6,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "eos_token_id": 1,
}
QWEN_235B_A22B = QWEN_30B_A3B | {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "intermediate_size": 27648,
}
