"""Parameter counts of a policy, from its config alone. Used by the memory plans."""

from __future__ import annotations

from tlt_megatron.models.config import ModelConfig


class ModelSizes:
    """Counts of parameters and of KV elements, biases and head norms included."""

    def __init__(self, model: ModelConfig) -> None:
        c = model
        num_fused = c.num_heads + 2 * c.num_kv_heads
        self.hidden, self.vocab, self.ffn = c.hidden_size, c.vocab_size, c.ffn_size
        self.query = c.num_heads * c.head_dim
        self.num_layers = c.num_layers
        self.kv = 2 * c.num_kv_heads * c.head_dim  # keys and values of one position in one layer
        # Of one layer, without norms and biases.
        self.matrices = (num_fused + c.num_heads) * c.head_dim * self.hidden
        self.matrices += 3 * self.hidden * self.ffn
        self.layer = self.matrices + 2 * self.hidden
        self.layer += num_fused * c.head_dim * c.has_qkv_bias + 2 * c.head_dim * c.has_qk_norm
        self.table = self.vocab * self.hidden  # the embedding or the LM head
        self.num_tables = 1 if c.tie_word_embeddings else 2
        self.total = self.num_layers * self.layer + self.num_tables * self.table + self.hidden
