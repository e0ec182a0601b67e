"""The config.json of models that tests plan memory and layouts for."""

QWEN_7B = {
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
}
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "intermediate_size": 27648,
}
