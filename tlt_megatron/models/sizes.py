"""Parameter counts of a policy, from its config alone. Used by the memory plans."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Counts of parameters and of KV elements."""

    hidden: int  # D
    vocab: int  # V
    ffn: int  # F
    query: int  # N * H
    num_layers: int  # L
    matrices: int  # of one layer, without norms and biases
    layer: int  # all of one layer
    kv: int  # keys and values of one position in one layer
    num_tables: int  # embedding and LM head: 1 if tied, else 2

    @staticmethod
    def of(model: ModelConfig) -> ModelSizes:
        """Return the sizes of a model, biases and head norms included."""
        c = model
        num_fused = c.num_heads + 2 * c.num_kv_heads
        matrices = c.hidden_size * (num_fused + c.num_heads) * c.head_dim
        matrices += 3 * c.hidden_size * c.ffn_size
        layer = matrices + 2 * c.hidden_size
        layer += num_fused * c.head_dim * c.has_qkv_bias
        layer += 2 * c.head_dim * c.has_qk_norm
        return ModelSizes(
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            ffn=c.ffn_size,
            query=c.num_heads * c.head_dim,
            num_layers=c.num_layers,
            matrices=matrices,
            layer=layer,
            kv=2 * c.num_kv_heads * c.head_dim,
            num_tables=1 if c.tie_word_embeddings else 2,
        )

    @property
    def table(self) -> int:
        """Return V * D, the size of the embedding or the LM head."""
        return self.vocab * self.hidden

    @property
    def total(self) -> int:
        """Return the number of all parameters."""
        return self.num_layers * self.layer + self.num_tables * self.table + self.hidden
