"""Parameter counts of a policy, from its config alone. Used by the memory plans."""

from __future__ import annotations

from collections.abc import Collection

from tlt_megatron.models.config import ModelConfig


class ModelSizes:
    """Counts of parameters and of KV elements, biases and head norms included."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = c = model
        num_fused = c.num_heads + 2 * c.num_kv_heads
        self.hidden, self.ffn = c.hidden_size, c.ffn_size
        self.query = c.num_heads * c.head_dim
        self.num_layers = c.num_layers
        self.kv = 2 * c.num_kv_heads * c.head_dim  # keys and values of one position in one layer
        attention = (num_fused + c.num_heads) * c.head_dim * self.hidden
        # What a layer has beside its matrices: norms and biases.
        rest = 2 * self.hidden
        rest += num_fused * c.head_dim * c.has_qkv_bias + 2 * c.head_dim * c.has_qk_norm
        dense = attention + 3 * self.hidden * self.ffn
        self.layer = dense + rest
        # A mixture has layers with experts: the sizes of all their experts, and of the rest.
        self.sparse_layers = frozenset(c.experts.layers if c.experts else ())
        self.experts = rest_of_mlp = self.num_routed = 0
        self.active_ffn = self.ffn  # the most that one token uses in a layer
        if c.experts:
            self.num_routed = c.experts.num_per_token
            sparse_ffn = self.num_routed * c.experts.ffn_size + c.experts.shared_ffn_size
            is_mixed = len(self.sparse_layers) < self.num_layers
            self.active_ffn = max(sparse_ffn, self.ffn) if is_mixed else sparse_ffn
            self.experts = 3 * c.experts.num_experts * self.hidden * c.experts.ffn_size
            # router and shared experts
            rest_of_mlp = c.experts.num_experts * (self.hidden + c.experts.is_sigmoid)
            rest_of_mlp += 3 * self.hidden * c.experts.shared_ffn_size
        self.sparse_layer = attention + rest + rest_of_mlp
        num_sparse = len(self.sparse_layers)
        num_dense = self.num_layers - num_sparse
        # The matrices of all layers, without norms and biases.
        self.matrices = num_dense * dense + num_sparse * (attention + rest_of_mlp + self.experts)
        self.table = c.vocab_size * self.hidden  # the embedding or the LM head
        self.total = self.matrices + self.num_layers * rest
        self.total += self.num_tables * self.table + self.hidden

    def adapters(
        self, layers: Collection[int], targets: Collection[str], rank: int, tp: int = 1
    ) -> tuple[int, int]:
        """Return the parameters of LoRA in `layers`: on one of `tp` tensor-parallel ranks, and of
        the routed experts, on all ranks.

        Column-parallel projections have a part of B on a rank, row-parallel ones a part of A.
        """
        sizes = {"q_proj": self.query, "o_proj": self.query}
        sizes |= {"k_proj": self.kv // 2, "v_proj": self.kv // 2}
        attention = sum(self.hidden + n // tp for name, n in sizes.items() if name in targets)
        num_mlp = len({"gate_proj", "up_proj", "down_proj"}.intersection(targets))
        num_sparse = len(self.sparse_layers.intersection(layers))
        dense = (len(layers) - num_sparse) * num_mlp * (self.hidden + self.ffn // tp)
        experts, mixture = 0, self.model.experts
        if mixture:
            experts = num_sparse * mixture.num_experts * num_mlp * (self.hidden + mixture.ffn_size)
        if mixture and mixture.shared_ffn_size:
            dense += num_sparse * num_mlp * (self.hidden + mixture.shared_ffn_size // tp)
        return rank * (len(layers) * attention + dense), rank * experts

    @property
    def num_tables(self) -> int:
        return 1 if self.model.tie_word_embeddings else 2

    @property
    def vocab(self) -> int:
        return self.table // self.hidden
