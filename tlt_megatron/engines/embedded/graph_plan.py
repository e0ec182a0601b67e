"""Plans which passes are captured into CUDA graphs, and estimates their memory from sizes.

This is the bucketed graph pool of TLT (arXiv 2511.16665): bucketed batch sizes, separate target and
drafter captures, one capture per shape, one memory pool. A strategy is planned for batches whose
verify pass has at most _VERIFY_TOKENS rows. Strategies of a batch bucket whose passes have at most
_SHARED_TOKENS rows share one verify capture, as wide as the widest of them: a pass of so many rows
costs about as much as one row. Every wider one has a capture of its own width. Each strategy has
its own draft capture, of all depths of its trees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.models.attention.sums import part_keys
from tlt_megatron.models.config import ModelConfig

# Most rows of a verify pass that strategies share. Batch 20 with 16 rows is the largest product
# among the thresholds in the paper's code. An H100 does ~295 bfloat16 multiply-adds in the time of
# reading one weight.
_SHARED_TOKENS = 320
_VERIFY_TOKENS = 640  # most rows of a verify pass: 64 sequences with 8 drafted tokens each
_BATCH_STEP = 8  # distance of batch buckets above 4
_MIN_LENGTH = 512  # shortest length bucket; each next one is twice as long
# Driver memory per captured kernel: 63-66 KB measured with empty kernels on CUDA 11.2
# (forums.developer.nvidia.com/t/244901).
_KERNEL_BYTES = 64 << 10
# Kernels of a decoder layer. TARGET adds some outside its layers, and more if it verifies. DRAFT
# adds some outside its depths, some for a depth beside its layer, and more for a tree. They were
# counted from a bfloat16 model: torch calls that are not views, and fused kernels.
_LAYER_KERNELS = 11
_TARGET_KERNELS, _VERIFY_KERNELS, _PATH_KERNELS = 60, 11, 32
_DRAFT_KERNELS, _DEPTH_KERNELS, _TREE_KERNELS = 20, 20, 15
_WIDE_BYTES = 4  # bytes per element of softmax's dtype


class Role(StrEnum):
    """Which model runs the pass. Target and drafter have separate captures."""

    TARGET = "target"  # plain decoding: one row per request; verifying: more rows
    DRAFT = "draft"  # what the last step committed, then all depths of a tree


class EagerReason(StrEnum):
    """Why a pass runs without a graph."""

    OFF = "graphs are off"
    BATCH = "batch larger than planned"
    ROWS = "more rows than planned for this batch size"
    LENGTH = "sequences longer than planned"
    PAGES = "sequences lie in pages, not in lanes"
    SAMPLING = "rows that sample differently"
    LAGGING = "rows that the drafter brings up to date apart from the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """One captured shape. Example: num_rows 17, depth 6 verifies up to 16 drafted tokens in 6
    levels.
    """

    num_rows: int  # R, query tokens of each sequence; for DRAFT, pairs that are new to the drafter
    batch_size: int  # B
    length: int  # S, positions read
    depth: int = 0  # depth of the trees that TARGET verifies
    is_chain: bool = False  # whether TARGET verifies chains alone, which nothing has to move
    strategy: SpeculationStrategy | None = None  # for DRAFT alone

    @property
    def num_tokens(self) -> int:
        """Return B * R."""
        return self.batch_size * self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCost:
    """Resources of a captured pass. All captures can share the memory of activations."""

    num_kernels: int
    activation_bytes: int  # most alive at once; inputs and outputs are small


class GraphPlan:
    """The captures of one engine.

    Example: `GraphPlan(c, strategies, max_batch_size=64, max_length=1600,
    item_bytes=2).describe()`.
    """

    def __init__(
        self,
        model: ModelConfig,
        strategies: Iterable[SpeculationStrategy],
        *,
        max_batch_size: int,
        max_length: int,
        item_bytes: int,
    ) -> None:
        """`max_length` is the longest lane."""
        self.strategies = tuple(dict.fromkeys(s for s in strategies if not s.is_off))
        self._model = model
        self._item_bytes = item_bytes
        self.max_length = max_length
        self.batch_sizes = _batch_buckets(max_batch_size)
        self.lengths = _length_buckets(max_length)
        self._keys = {size: self._keys_of(size) for size in self.batch_sizes}
        self.keys = tuple(key for keys in self._keys.values() for key in keys)

    def find(
        self, strategy: SpeculationStrategy | None, num_rows: int, batch_size: int, longest: int
    ) -> GraphKey | EagerReason:
        """Return the smallest capture for a step that reads `longest` positions, or why none fits.
        A key of DRAFT has a strategy; a key of TARGET has None.
        """
        at_size = bisect_left(self.batch_sizes, batch_size)
        if at_size == len(self.batch_sizes):
            return EagerReason.BATCH
        wide = [
            key
            for key in self._keys[self.batch_sizes[at_size]]
            if key.strategy == strategy and key.num_rows >= num_rows
        ]
        if strategy is None:  # rows of padding have positions too
            long = (key for key in wide if key.length >= longest + key.num_rows - num_rows)
        else:
            long = (key for key in wide if key.length >= longest)
        return next(long, EagerReason.LENGTH if wide else EagerReason.ROWS)

    def _keys_of(self, batch_size: int) -> list[GraphKey]:
        """Return the captures for a batch bucket, narrow ones first, then short ones."""
        usable = [
            s
            for s in self.strategies
            if batch_size == 1 or batch_size * s.num_rows <= _VERIFY_TOKENS
        ]
        depth = max((s.depth for s in usable), default=0)
        shared = [
            s.num_rows
            for s in usable
            if batch_size == 1 or batch_size * s.num_rows <= _SHARED_TOKENS
        ]
        own = {s.num_rows for s in usable} - set(shared)
        make = partial(GraphKey, batch_size=batch_size)
        targets = [make(num_rows=1, length=length) for length in self.lengths]
        for num_rows in sorted({max(shared, default=1), *own} - {1}):
            held = [s for s in usable if s.num_rows <= num_rows]  # `find` may give any of them this
            tree = make(
                num_rows=num_rows,
                depth=max(s.depth for s in held),
                is_chain=all(s.is_chain for s in held),
                length=0,
            )
            targets += [replace(tree, length=length) for length in self.lengths]
        # After a step of a strategy, at most depth + 1 pairs are new to the drafter. One layer
        # skips the keys after a sequence so fast that it needs no buckets of lengths.
        drafts = [
            make(num_rows=depth + 1, length=self.max_length, strategy=strategy)
            for strategy in usable
            if strategy.is_learned
        ]
        return targets + drafts

    # ---- bytes

    def cost(self, key: GraphKey) -> CaptureCost:
        """Estimate a step on CUDA that samples at temperature 1 from all tokens. A draft step is a
        layer for each depth.
        """
        c, item_bytes, num_tokens, s = self._model, self._item_bytes, key.num_tokens, key.strategy
        num_sampled = num_tokens
        num_kernels = c.num_layers * _LAYER_KERNELS + _TARGET_KERNELS
        if key.num_rows > 1:
            num_kernels += _VERIFY_KERNELS + _PATH_KERNELS * (not key.is_chain)
        if s is not None:
            num_sampled = key.batch_size * s.topk
            num_tokens = max(num_tokens, num_sampled)
            of_depth = _LAYER_KERNELS + _DEPTH_KERNELS + _TREE_KERNELS * (not s.is_chain)
            num_kernels = _DRAFT_KERNELS + s.num_steps * of_depth
        num_fused = c.num_heads + 2 * c.num_kv_heads
        # Alive all the time, or left from the previous layer: states and heads.
        per_token = 2 * c.hidden_size + (num_fused + c.num_heads + 2) * c.head_dim
        # Attention: a copy of the queries, outputs, and outputs and lse of the parts of the keys.
        repeat = c.num_heads // c.num_kv_heads
        shape_BKR = key.batch_size, c.num_kv_heads, key.num_rows * repeat
        num_parts = -(-key.length // part_keys(shape_BKR, key.length))
        part_bytes = (c.head_dim + 1) * max(item_bytes, _WIDE_BYTES)
        attention = (
            num_tokens * c.num_heads * (2 * c.head_dim * item_bytes + num_parts * part_bytes)
        )
        mlp = num_tokens * (3 if s is None else 4) * c.ffn_size * item_bytes
        bias = num_tokens * key.length * (item_bytes + 1)  # and the mask that it is made of
        # Logits, wide logits and their log-probabilities. A draft also has the logits of the roots.
        head = num_sampled * c.vocab_size * (item_bytes + 2 * max(item_bytes, _WIDE_BYTES))
        head += 0 if s is None else key.batch_size * c.vocab_size * item_bytes
        return CaptureCost(
            num_kernels=num_kernels,
            activation_bytes=num_tokens * per_token * item_bytes + bias + max(attention, mlp, head),
        )

    def bytes_pool(self) -> int:
        """Return the bytes of this plan: all kernels, and the tensors that captures share."""
        return self.graph_bytes(self.keys) + self.shared_bytes()

    def shared_bytes(self) -> int:
        """Return the bytes of the largest activations."""
        return max(self.cost(key).activation_bytes for key in self.keys)

    def graph_bytes(self, keys: Iterable[GraphKey]) -> int:
        """Return the driver's memory for these graphs, without their tensors."""
        return sum(self.cost(key).num_kernels for key in keys) * _KERNEL_BYTES

    def describe(self) -> str:
        """Return the number of captures and their memory."""
        pool, shared = (f"{n / 2**20:,.0f} MiB" for n in (self.bytes_pool(), self.shared_bytes()))
        return f"{len(self.keys)} captures, {pool}, of which {shared} are tensors that all share"


def _batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, ... and `max_batch_size` itself.

    Steps are of 8, and from 128 on of an eighth of the last power of two: few buckets for a large
    batch, and at most an eighth of the rows of a pass are padding.
    """
    sizes = [1, 2, 4]
    size = _BATCH_STEP
    while size < max_batch_size:
        sizes.append(size)
        size += max(_BATCH_STEP, (1 << size.bit_length()) // 16)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


def _length_buckets(max_length: int) -> tuple[int, ...]:
    """Return 512, 1024, 2048, ... and `max_length` itself."""
    lengths = (_MIN_LENGTH << doublings for doublings in range(max_length.bit_length()))
    return (*(length for length in lengths if length < max_length), max_length)
