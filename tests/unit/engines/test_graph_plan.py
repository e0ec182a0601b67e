"""The capture plan: what it covers, what it merges, and its bytes against a dry run of the real
pass.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt_megatron.config.draft_folder import SIZES
from tlt_megatron.config.schema import SpeculationSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import EagerReason, GraphKey, GraphPlan
from tlt_megatron.engines.embedded.lane_steps import LaneSteps, Rows
from tlt_megatron.models.arithmetic import Arithmetic
from tlt_megatron.models.attention.sums import part_keys
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftConfig, DraftModel
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.layers import RmsNorm
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.types import SamplingParams
from tools.gpu.shapes import QWEN_2_5_7B as QWEN_7B

TINY = dataclasses.replace(
    QWEN_7B, hidden_size=128, ffn_size=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32
)
SMALLER = {
    "hidden_size": 512,
    "ffn_size": 2048,
    "num_heads": 8,
    "num_kv_heads": 2,
    "vocab_size": 64,
}
QUICKSTART = tuple(SpeculationSection().strategies)
PAPER_CODE = ("8_4_47", "8_4_31", "8_4_15", "8_4_8")  # its defaults, the root not counted
MIXED = ("8_4_48", "6_4_16", "4_2_8", "6_1_6", "ngram_8")


def make_plan(
    strategies: Sequence[str],
    *,
    model: ModelConfig = QWEN_7B,
    max_batch_size: int = 64,
    max_length: int = 1600,
) -> GraphPlan:
    return GraphPlan(
        model,
        [SpeculationStrategy.parse(text) for text in strategies],
        max_batch_size=max_batch_size,
        max_length=max_length,
        item_bytes=2,
    )


def largest_batch(plan: GraphPlan, strategy: SpeculationStrategy) -> int:
    """The largest batch that verifies `strategy` in a graph."""
    found = {size: plan.find(None, strategy.num_rows, size, 1) for size in plan.batch_sizes}
    return max(size for size, key in found.items() if isinstance(key, GraphKey))


@pytest.mark.parametrize("max_batch_size", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("strategies", [QUICKSTART, PAPER_CODE, MIXED, ("off",)])
def test_every_pass_of_a_usable_strategy_has_a_capture_that_holds_it(
    strategies: Sequence[str], max_batch_size: int
) -> None:
    plan = make_plan(strategies, max_batch_size=max_batch_size)
    for batch_size in range(1, max_batch_size + 1):
        wanted = [(1, 0, None)]
        for strategy in plan.strategies:
            if batch_size > largest_batch(plan, strategy):
                continue
            wanted.append((strategy.num_rows, strategy.depth, None))
            if strategy.is_learned:
                wanted.append((strategy.depth + 1, 0, strategy))
        for num_rows, depth, strategy in wanted:
            key = plan.find(strategy, num_rows, batch_size, 700)
            assert key in plan.keys
            assert key.num_rows >= num_rows
            assert key.depth >= depth
            assert key.batch_size >= batch_size
            assert key.length == (1024 if strategy is None else 1600)
            assert key.num_tokens <= 640 or key.batch_size == 1


def test_what_is_larger_than_planned_has_a_reason() -> None:
    plan = make_plan(QUICKSTART)

    chain = SpeculationStrategy.parse("6_1_6")
    assert plan.find(None, 1, 65, 10) is EagerReason.BATCH
    assert plan.find(None, 17, 41, 10) is EagerReason.ROWS
    assert plan.find(chain, 64, 1, 10) is EagerReason.ROWS
    tree = max(plan.strategies, key=lambda s: s.num_rows)
    assert plan.find(tree, 1, 64, 10) is EagerReason.ROWS
    assert plan.find(None, 17, 16, 1601) is EagerReason.LENGTH
    assert plan.find(chain, 1, 1, 1601) is EagerReason.LENGTH
    assert isinstance(plan.find(None, 17, 16, 1600), GraphKey)


@pytest.mark.parametrize("text", ["6_1_6", "4_2_8"])
def test_a_long_response_of_a_full_batch_is_drafted_and_verified_in_graphs(text: str) -> None:
    strategy = SpeculationStrategy.parse(text)
    plan = make_plan((text,), max_length=18_432)
    for num_rows, drafts in ((1, None), (strategy.num_rows, None), (1, strategy)):
        key = plan.find(drafts, num_rows, 64, 16_500)
        assert isinstance(key, GraphKey)
        assert (key.batch_size, key.length) == (64, 18_432)
        assert key.is_chain is (num_rows == 7)


def test_few_rows_are_cut_into_more_parts_of_keys() -> None:
    """4 kv heads of 7 queries each, as a 7B has: at batch 1, 2,048 keys occupy 128 programs."""
    assert part_keys((1, 4, 7), 2048) == 64
    assert part_keys((1, 4, 7), 4096) == 128
    assert part_keys((1, 4, 7), 18_432) == part_keys((64, 4, 7), 2048) == 512
    assert part_keys((1, 4, 7 * 512), 4096) == 512  # queries of a prompt


def test_large_trees_are_planned_for_small_batches_alone() -> None:
    plan = make_plan(PAPER_CODE)
    sizes = [largest_batch(plan, strategy) for strategy in plan.strategies]
    assert sizes == [8, 16, 40, 64]


def test_equal_shapes_are_captured_once() -> None:
    plan = make_plan(QUICKSTART)
    assert len(set(plan.keys)) == len(plan.keys)
    # One verify width for each batch size besides plain decoding, and one for each strategy whose
    # verify pass has more than 320 rows.
    for size in plan.batch_sizes:
        widths = {k.num_rows for k in plan.keys if k.strategy is None and k.batch_size == size}
        shared = max(s.num_rows for s in plan.strategies if size * s.num_rows <= 320)
        wide = {s.num_rows for s in plan.strategies if 320 < size * s.num_rows <= 640}
        assert widths == {1, shared} | wide
    # Another strategy that is no wider verifies in the captures that are there.
    more = make_plan((*QUICKSTART, "5_4_16", "6_2_8", "off"))
    assert {key.strategy for key in set(more.keys) - set(plan.keys)} == set(more.strategies[-2:])
    assert more.shared_bytes() == plan.shared_bytes()
    assert set(make_plan(tuple(reversed(QUICKSTART))).keys) == set(plan.keys)


def test_a_policy_without_a_drafter_captures_no_draft_pass() -> None:
    assert {key.strategy for key in make_plan(("ngram_8", "off")).keys} == {None}
    plain = make_plan(())
    assert {key.num_rows for key in plain.keys} == {1}
    assert plain.bytes_pool() == bytes_naive(plain) == bytes_single(plain)


def bytes_naive(plan: GraphPlan) -> int:
    """Bytes if each strategy of the plan, and plain decoding, were captured alone."""
    return sum(_bytes_alone(plan, strategy) for strategy in (OFF, *plan.strategies))


def bytes_single(plan: GraphPlan) -> int:
    """Bytes of plain decoding and the widest strategy of the plan, captured alone."""
    widest = max(plan.strategies, key=lambda s: s.num_rows, default=OFF)
    return sum(_bytes_alone(plan, each) for each in {OFF, widest})


def _bytes_alone(plan: GraphPlan, strategy: SpeculationStrategy) -> int:
    """Bytes if drafting and verifying are captured together at every batch size, in memory of
    their own.
    """
    rows = {"num_rows": strategy.num_rows, "depth": strategy.depth, "is_chain": strategy.is_chain}
    keys = [
        GraphKey(batch_size=size, length=length, **rows)
        for size in plan.batch_sizes
        for length in plan.lengths
    ]
    if strategy.is_learned:
        pairs = strategy.depth + 1
        drafts = {"num_rows": pairs, "depth": 0, "strategy": strategy}
        keys += [dataclasses.replace(key, **drafts) for key in keys]
    return plan.graph_bytes(keys) + max(plan.cost(k).activation_bytes for k in keys)


@pytest.mark.parametrize("model", [QWEN_7B, TINY], ids=["7b", "tiny"])
@pytest.mark.parametrize("strategies", [QUICKSTART, PAPER_CODE, MIXED])
@pytest.mark.parametrize("max_length", [1600, 33792])
def test_pool_is_2_8_times_smaller_than_naive_capture(
    model: ModelConfig, strategies: Sequence[str], max_length: int
) -> None:
    plan = make_plan(strategies, model=model, max_length=max_length)
    assert bytes_naive(plan) >= 2.8 * plan.bytes_pool()
    assert bytes_single(plan) <= bytes_naive(plan)


# ---- the estimate against the real pass, run on tensors without memory


class Tally(TorchDispatchMode):
    """Counts calls that are no views, and the bytes of what they make while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = self.live_bytes = self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        given = {
            id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)]
        made = [storage for storage in storages if id(storage) not in given]
        if made or func._schema.is_mutable:
            self.num_calls += 1
        for storage in made:
            self._alive.add(id(storage))
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _freed(self, storage: int, num_bytes: int) -> None:
        if storage in self._alive:
            self._alive.remove(storage)
            self.live_bytes -= num_bytes


@pytest.mark.parametrize("has_qk_norm", [False, True])
@pytest.mark.parametrize(
    "num_rows, batch_size, length", [(1, 64, 512), (5, 64, 512), (17, 8, 16384), (49, 1, 512)]
)
@pytest.mark.parametrize("vocab_size", [64, 151_936])
@pytest.mark.parametrize("is_chain", [False, True])
def test_estimate_is_what_a_dry_run_takes(
    is_chain: bool, num_rows: int, batch_size: int, length: int, has_qk_norm: bool, vocab_size: int
) -> None:
    model_config = dataclasses.replace(
        QWEN_7B, num_layers=3, has_qk_norm=has_qk_norm, vocab_size=vocab_size
    )
    depth = num_rows - 1 if is_chain else min(num_rows - 1, 6)
    shape = {"num_rows": num_rows, "batch_size": batch_size, "length": length}
    key = GraphKey(depth=depth, is_chain=is_chain, **shape)
    check_estimate(model_config, key)


@pytest.mark.parametrize("vocab_size", [64, 151_936])
@pytest.mark.parametrize(
    "strategy, batch_size, length", [("3_4_8", 8, 8192), ("6_1_6", 64, 512), ("6_4_16", 16, 512)]
)
def test_estimate_is_what_a_dry_run_of_the_drafter_takes(
    strategy: str, batch_size: int, length: int, vocab_size: int
) -> None:
    sizes = SMALLER | {"vocab_size": vocab_size}
    model_config = dataclasses.replace(QWEN_7B, num_layers=3, **sizes)
    draft_config = DraftConfig(
        architecture="eagle3",
        rope=model_config.rope,
        **{name: getattr(model_config, name) for name in SIZES},
        aux_layer_ids=(0, 1, 2),
    )
    shape = model_config.vocab_size, model_config.hidden_size
    head = torch.zeros(shape, dtype=torch.bfloat16, device="meta")
    drafter = DraftModel(
        draft_config, embedding_VD=head, lm_head_VD=head, seed=0, dtype=torch.bfloat16
    )
    parsed = SpeculationStrategy.parse(strategy)
    key = GraphKey(
        num_rows=parsed.depth + 1,
        batch_size=batch_size,
        length=length,
        strategy=parsed,
    )
    check_estimate(model_config, key, DraftInference(drafter, arithmetic=DRY))


class DryNorm(RmsNorm):
    """As the fused kernel: it makes one tensor."""

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return torch.empty_like(x)

    def after(
        self, layer: Callable[..., Tensor], inputs: Tensor, residual_PD: Tensor, weight: object
    ) -> tuple[Tensor, Tensor]:
        x_PD = layer(inputs, None)
        return x_PD, self(x_PD)


DRY = Arithmetic(
    norm=DryNorm,
    rotate=lambda heads_PAH, *_: torch.empty_like(heads_PAH),
    gate=lambda gate_PF, _: gate_PF.new_empty(gate_PF.shape),
)


def check_estimate(
    model_config: ModelConfig, key: GraphKey, draft: DraftInference | None = None
) -> None:
    meta, dtype = torch.device("meta"), torch.bfloat16
    model = Transformer(model_config, dtype, meta, DRY)
    for rotary in (model.rotary, *([draft.rotary] if draft else [])):
        rotary.reserve(key.length)
    cache = KvCache(
        model_config,
        num_pages=key.batch_size * key.length // 64,
        page_size=64,
        dtype=dtype,
        device=meta,
        num_draft_layers=1,
        tap_layers=() if draft is None else draft.config.aux_layer_ids,
    )
    greedy = SamplingParams(num_samples=1, max_new_tokens=9, temperature=0.0)
    steps = LaneSteps(model, cache, key.length, draft, greedy)
    num_nodes = key.num_rows - 1 if key.strategy is None else 0
    given = (
        torch.zeros(len(Rows._fields), key.batch_size, dtype=torch.int64, device=meta),
        torch.zeros(3, key.batch_size, num_nodes, dtype=torch.int64, device=meta),
    )
    with torch.no_grad():
        steps.run(key, *given)
        with Tally() as tally:
            steps.run(key, *given)
    plan = GraphPlan(
        model_config, [], max_batch_size=1, max_length=key.length, item_bytes=dtype.itemsize
    )
    cost = plan.cost(key)
    assert cost.num_kernels == pytest.approx(tally.num_calls, rel=0.15)
    assert cost.activation_bytes == pytest.approx(tally.peak_bytes, rel=0.1)
