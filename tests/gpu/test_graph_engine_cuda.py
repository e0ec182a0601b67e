"""The embedded engine on a GPU: captured graphs, switches in the middle of a rollout and sleep
change no token. Captured graphs take the bytes that were planned and give them back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.gpu.cuda_ranks import needs_gpus
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    at_random,
    engine_over,
    load_from,
    make_prompts,
    speculate,
    tokens_of,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.base import EngineStats
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.hf_io import HfReader, checksum_tensors
from tlt_megatron.runtime.device import select_device
from tlt_megatron.types import Prompt, SamplingParams

pytestmark = needs_gpus()
STRATEGIES = ("off", "4_1_4", "3_2_6", "ngram_4")
PARAMS = SamplingParams(num_samples=3, max_new_tokens=60, stop_token_ids=(5,), seed=5)
ONE = dataclasses.replace(PARAMS, num_samples=1, max_new_tokens=12)
# What the allocator takes from the driver at once for small tensors: every memory pool of its own
# has at least one.
SEGMENT_BYTES = 2 << 20
PROMPTS = make_prompts(4, 9, 31, 70)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", num_layers=2, vocab_size=48)


def make_engine(path: Path, *strategies: str, **settings: object) -> EmbeddedEngine:
    """An engine that speculates with any of `strategies` in each pass."""
    sizes = {"max_batch_size": 8, "max_new_tokens": 64, "num_samples": 3}
    engine = engine_over(path, device=select_device("cuda"), **(sizes | settings))
    parsed = [SpeculationStrategy.parse(text) for text in strategies]
    if any(not strategy.is_off for strategy in parsed):
        speculate(engine, parsed, selector=at_random(parsed, seed=0))
    return engine


def copies(count: int) -> list[Prompt]:
    """One prompt, drawn `count` times."""
    return [dataclasses.replace(PROMPTS[1], draw_index=draw) for draw in range(count)]


def run(engine: EmbeddedEngine) -> tuple[list[list[int]], EngineStats]:
    groups = engine.generate(PROMPTS, PARAMS, policy_version=1)
    return tokens_of(groups), engine.stats()


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Tokens of eager plain decoding on this GPU, in float64."""
    tokens, stats = run(make_engine(path, "off", graphs="off"))
    assert stats.num_graph_replays == 0
    return tokens


def test_the_gpu_draws_what_the_cpu_draws(path: Path, expected: list[list[int]]) -> None:
    engine = engine_over(path, max_batch_size=8, max_new_tokens=64, num_samples=3)
    assert run(engine)[0] == expected


@pytest.mark.parametrize("strategies", [*zip(STRATEGIES), STRATEGIES], ids=" ".join)
def test_graphs_and_switches_between_them_change_no_token(
    path: Path, strategies: tuple[str, ...], expected: list[list[int]]
) -> None:
    engine = make_engine(path, *strategies)
    # After a switch the drafter may have more to read than a graph computes.
    least_replays = 10 if len(strategies) == 1 else 0
    for _ in range(2):  # captures, then replays what was captured
        tokens, stats = run(engine)
        assert tokens == expected
        assert stats.num_graph_replays > least_replays * stats.num_eager_passes
        assert all(reason.startswith("draft: ") for reason in stats.eager_passes)
    assert {record.strategy for record in engine.take_passes()} == {*strategies}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_eager_passes_agree_but_for_rounding(path: Path, dtype: str) -> None:
    """Rounding can swap two candidates that are closer than its error, about once in a thousand
    tokens in bfloat16. What follows is then another text.
    """
    eager, _ = run(make_engine(path, "off", dtype=dtype, graphs="off"))
    tokens, _ = run(make_engine(path, "off", dtype=dtype))
    num_equal = sum(a == b for a, b in zip(eager, tokens, strict=True))
    assert num_equal >= 0.7 * len(eager)


def test_batch_invariant_tokens_are_the_same_in_bfloat16(path: Path) -> None:
    """Requests run one by one, in one batch, in captured graphs, and with a new strategy in each
    pass.
    """
    options: dict[str, object] = {"dtype": "bfloat16", "batch_invariant": True}
    expected, _ = run(make_engine(path, "off", graphs="off", **options))
    assert run(make_engine(path, "off", max_batch_size=1, **options))[0] == expected
    assert run(make_engine(path, *STRATEGIES, **options))[0] == expected


def test_a_sleeping_engine_gives_all_back_and_wakes_with_the_same_tensors(
    path: Path, expected: list[list[int]]
) -> None:
    engine = make_engine(path, "3_2_6")
    assert run(engine)[0] == expected
    borrowed = engine.target_tensors()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    engine.sleep()
    freed = held - torch.cuda.memory_allocated()
    assert freed >= engine.memory_plan().weights_bytes + engine.memory_plan().kv_bytes
    engine.wake()
    assert engine.target_tensors() == borrowed
    load_from(path, engine)
    tokens, stats = run(engine)
    assert tokens == expected
    assert stats.num_graph_replays > 0


@pytest.mark.parametrize("graphs", ["free", "keep"])
def test_a_woken_engine_replays_with_the_weights_of_an_update(path: Path, graphs: str) -> None:
    engine = make_engine(path, "3_2_6", graphs=graphs)
    before, _ = run(engine)
    engine.sleep()
    torch.full((64 << 20,), torch.nan, device="cuda")  # an update uses the memory meanwhile
    engine.wake()
    other = [(name, tensor.double() * 1.5) for name, tensor in HfReader(path).items()]
    eager = make_engine(path, "off", graphs="off")
    for each in (engine, eager):
        each.load_weights(other, version=1, checksum=lambda: checksum_tensors(other))
    tokens, stats = run(engine)
    assert tokens == run(eager)[0] != before
    assert stats.num_graph_replays > 0


@pytest.mark.parametrize("strategy", ["off", "3_2_6"])
def test_every_batch_size_has_a_graph(path: Path, strategy: str) -> None:
    engine = make_engine(path, strategy)
    eager = make_engine(path, "off", graphs="off")
    for batch_size in range(1, 9):
        groups, expected = (
            each.generate(copies(batch_size), ONE, policy_version=1) for each in (engine, eager)
        )
        for ours, theirs in zip(groups, expected, strict=True):
            assert ours.rollouts[0].token_ids.equal(theirs.rollouts[0].token_ids)
        assert all(reason.startswith("draft: ") for reason in engine.stats().eager_passes)
        assert engine.stats().num_graph_replays > 0


def reserved_bytes() -> int:
    """What the allocator holds for tensors that live, and for captured graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_captures_after_the_largest_lie_in_its_memory(path: Path) -> None:
    engine = make_engine(path, "3_2_6", dtype="bfloat16")

    def count_captures(batch_size: int) -> int:
        engine.generate(copies(batch_size), ONE, policy_version=1)
        return engine._graphs.num_captures

    count_captures(1)  # with the largest of all
    reserved = reserved_bytes()
    num_later = sum(map(count_captures, range(2, 9)))
    assert num_later > 3
    assert reserved_bytes() - reserved < num_later * SEGMENT_BYTES / 2


def test_dropped_graphs_give_their_memory_back(path: Path) -> None:
    engine = make_engine(path, "3_2_6", dtype="bfloat16")
    run(engine)  # the workspace of cuBLAS stays, once for all captures
    engine.free_kv()
    reserved = reserved_bytes()
    for _ in range(3):
        run(engine)
        assert reserved_bytes() > reserved
        engine.free_kv()
        assert reserved_bytes() <= reserved


def test_capturing_between_other_work_on_the_device_changes_neither(
    path: Path, expected: list[list[int]]
) -> None:
    engine = make_engine(path, "off")
    a = torch.randn(8192, 8192, device="cuda")
    product = a @ a  # still running when the first pass begins
    assert run(engine)[0] == expected
    torch.testing.assert_close(product, a @ a)


def test_graphs_take_the_bytes_that_were_planned(tmp_path: Path) -> None:
    """Activations and static tensors, which torch's allocator counts. What the driver keeps for the
    graphs themselves differs between its versions."""
    path = make_tiny_hf(
        tmp_path, "qwen3", num_layers=2, vocab_size=512, hidden_size=1024, intermediate_size=4096
    )
    settings = {"dtype": "bfloat16", "max_batch_size": 32, "max_new_tokens": 512}
    engine = make_engine(path, "6_1_6", **settings)
    eager = make_engine(path, "6_1_6", graphs="off", **settings)
    sizes = []
    for each in (eager, engine):
        before = reserved_bytes()
        each.generate(copies(32), ONE, policy_version=1)
        sizes.append(reserved_bytes() - before - each.memory_plan().kv_bytes)
    taken = sizes[1] - sizes[0]
    planned = engine.memory_plan().graphs.shared_bytes()
    assert 0.3 * planned <= taken <= 1.5 * planned + (64 << 20)  # a workspace of cuBLAS, segments
