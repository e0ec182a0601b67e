"""The embedded engine's CUDA path on a machine without a GPU: everything stays on its device,
captured passes read nothing back, and the tokens are those of the CPU. What a real GPU adds is in
tests/gpu.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.slow_draft import copy_drafter, make_draft_model, make_sequence
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    alive_caches,
    cache_bytes,
    checksum,
    engine_over,
    load_from,
    make_drafter,
    make_prompts,
    speculate,
    stop_at,
    tokens_of,
)
from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.acceptance import Replay
from tlt_megatron.drafter.drafter_loss import draft_loss, make_objective
from tlt_megatron.drafter.drafter_trainer import interruptible
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.engines.embedded import generation
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.graph_pool import GraphPool
from tlt_megatron.engines.embedded.request import PrefillChunk
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.matrix import Matrix
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import Device, has_triton
from tlt_megatron.types import Rollout, SamplingParams
from tools.gpu.pretend_cuda import CUDA, PretendDevice, pretend_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")
SIZES = {"max_batch_size": 4, "num_samples": 2, "max_new_tokens": 32}
PARAMS = SamplingParams(num_samples=2, max_new_tokens=12, stop_token_ids=(5,), seed=5)
CUT = SamplingParams(num_samples=2, max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=9, seed=5)
GREEDY = SamplingParams(num_samples=2, max_new_tokens=12, temperature=0.0, seed=5)
PROMPTS = make_prompts(4, 9, 70)


@pytest.fixture(scope="module")
def deep_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with enough layers for an EAGLE-3 drafter."""
    path = tmp_path_factory.mktemp("deep")
    return make_tiny_hf(path, "qwen3", num_layers=4, vocab_size=48)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """A pretended GPU without Triton. A CUDA build of torch has Triton, which cannot compile for a
    pretended GPU.
    """
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton.cache_clear()
    device = pretend_device()
    with device.gpu:
        yield device
    has_triton.cache_clear()


def make_engine(
    path: Path, device: Device | None, strategy: str, architecture: str = "eagle", **settings: int
) -> EmbeddedEngine:
    taps = default_aux_layer_ids(4) if architecture == "eagle3" else ()
    engine = engine_over(path, device=device, tap_layers=taps, **(SIZES | settings))
    if strategy != "off":
        speculate(engine, strategy, drafter=make_drafter(engine, architecture))
    return engine


def run(engine: EmbeddedEngine, params: SamplingParams = PARAMS) -> list[list[int]]:
    return tokens_of(engine.generate(PROMPTS, params, policy_version=1))


@pytest.mark.parametrize(
    ("strategy", "architecture", "params"),
    [
        *((strategy, "eagle", PARAMS) for strategy in ("off", "3_2_6", "4_1_4", "ngram_4")),
        *(("3_2_6", "eagle3", params) for params in (CUT, GREEDY)),
    ],
    ids=["plain", "tree", "chain", "ngram", "cut", "greedy"],
)
def test_responses_are_those_of_the_cpu(
    deep_path: Path,
    device: PretendDevice,
    strategy: str,
    architecture: str,
    params: SamplingParams,
) -> None:
    def answer(engine: EmbeddedEngine) -> list[tuple[Rollout, Tensor]]:
        """All responses with their features."""
        found: list[tuple[Rollout, Tensor]] = []

        def keep(rollout: Rollout, features: Tensor) -> None:
            found.append((rollout, features.cpu()))

        engine.generate(PROMPTS, params, policy_version=1, on_features=keep)
        return sorted(found, key=lambda each: (each[0].draw_index, each[0].sample_index))

    engine = make_engine(deep_path, device, strategy, architecture)
    expected = answer(make_engine(deep_path, None, "off", architecture))
    for (ours, features), (theirs, their_features) in zip(answer(engine), expected, strict=True):
        torch.testing.assert_close(features, their_features)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        torch.testing.assert_close(ours.logprobs, theirs.logprobs)
        torch.testing.assert_close(ours.policy_logprobs, theirs.policy_logprobs)
        assert (ours.kept is None) == (theirs.kept is None) == (params is not CUT)
        if ours.kept is not None and theirs.kept is not None:
            assert torch.equal(ours.kept.token_ids, theirs.kept.token_ids)
            assert torch.equal(ours.kept.counts, theirs.kept.counts)
    assert device.gpu.num_captures > 0
    assert engine.stats().num_graph_replays > 5 * engine.stats().num_eager_passes


@pytest.mark.parametrize("strategy", ["off", "3_2_6"])
def test_every_batch_that_has_lanes_is_captured(
    tiny_path: Path, device: PretendDevice, strategy: str
) -> None:
    """9 rows are in the bucket of 16, and memory has 12 lanes."""
    sizes = {"max_batch_size": 16, "num_samples": 3, "kv_cache_tokens": 64 * 2 * 12}
    engine = make_engine(tiny_path, device, strategy, max_prompt_tokens=70, **sizes)
    limits = (2, 4, 10, 2, 6, 8, 2, 2, 12)
    prompts = [
        replace(PROMPTS[row // 3], first_sample=row % 3, max_new_tokens=limit)
        for row, limit in enumerate(limits)
    ]
    engine.generate(prompts, SamplingParams(max_new_tokens=12, seed=5), policy_version=1)
    stats = engine.stats()
    assert stats.num_graph_replays > 0
    assert not [reason for reason in stats.eager_passes if reason.startswith("target")]


def test_rows_in_pages_that_are_preempted(tiny_path: Path, device: PretendDevice) -> None:
    little = {"kv_cache_tokens": 64 * 5, "max_new_tokens": 68, "graphs": "off"}
    long = SamplingParams(num_samples=2, max_new_tokens=68, seed=5)
    engine = make_engine(tiny_path, device, "off", **little)
    assert run(engine, long) == run(make_engine(tiny_path, None, "off", **little), long)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_dtype_runs(tiny_path: Path, device: PretendDevice, dtype: str) -> None:
    assert all(run(make_engine(tiny_path, device, "3_2_6", dtype=dtype)))


@pytest.mark.parametrize(
    ("strategy", "cut", "most"),
    [
        ("off", {}, 10),
        ("off", {"top_p": 0.9, "top_k": 9}, 10),
        ("6_1_6", {}, 13),
        ("6_1_6", {"top_p": 0.9, "top_k": 9}, 13),
        ("6_4_16", {"top_p": 0.9}, 13),
        ("ngram_4", {}, 15),
    ],
)
def test_a_step_is_few_launches_and_one_read_back(
    tiny_path: Path,
    device: PretendDevice,
    strategy: str,
    cut: dict[str, float],
    most: int,
) -> None:
    """Launches of the host, for which a graph is one. A draft by n-grams reads the new tokens once
    more.
    """
    engine, gpu = make_engine(tiny_path, device, strategy), device.gpu
    stop = stop_at("€€€b")  # which does not come
    params = SamplingParams(num_samples=2, max_new_tokens=20, stop=stop, seed=5, **cut)
    counts: list[tuple[int, int]] = []

    def count() -> bool:
        counts.append((gpu.num_launches, gpu.read_backs.total()))
        return False

    engine.generate(PROMPTS[:1], params, policy_version=1)  # allocates, captures
    engine.generate(PROMPTS[:1], params, policy_version=1, should_stop=count)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(counts)]
    assert engine.stats().eager_passes == {}
    reads = 2 if strategy == "ngram_4" else 1
    usual = steps[1:4]  # rows join before the first step and leave later
    assert {read_backs for _, read_backs in usual} == {reads}
    assert max(launches for launches, _ in usual) <= most


def test_a_response_of_16k_tokens_in_a_batch_of_64_stays_in_graphs_and_speculates(
    tmp_path: Path, device: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that has 16,000 tokens goes on beside 63 short ones, in lanes that grow: lanes of
    its length for all rows would take 30 times the KV that is planned. Its KV is random numbers, as
    computing it would take minutes here.
    """
    path = make_tiny_hf(
        tmp_path / "m", "qwen3", num_layers=1, vocab_size=48, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    real_prefill = generation.prefill

    def prefill(model: Transformer, cache: KvCache, chunks: Sequence[PrefillChunk]) -> int:
        (long,) = [c for c in chunks if c.end - c.start > 1_000] or [None]
        if long is not None:
            slots_S = cache.slots(long.owner.pages, long.start, long.end)
            shape = cache.layers[0][:, : long.end - long.start].shape
            keys = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            cache.layers[0].index_copy_(1, slots_S, keys.to(cache.device))
            cache.mark_written(slots_S)
            long.owner.last_hidden_D = model.embedding[5].clone()
        return real_prefill(model, cache, [c for c in chunks if c is not long])

    monkeypatch.setattr(generation, "prefill", prefill)
    # The drafter does not read the prompt either. It proposes the least likely tokens, so that few
    # rows end early.
    monkeypatch.setattr(GraphPool, "catch_up", lambda *_: None)
    first, *others = make_prompts(16_000, *[3] * 63)
    prompts = [replace(first, first_position=15_990), *others]
    settings = {"max_batch_size": 64, "num_samples": 1, "max_new_tokens": 3, "dtype": "float32"}
    settings |= {"max_prompt_tokens": 16_000, "prefill_chunk_tokens": 16_384}
    before = alive_caches()
    engine = engine_over(path, device=device, kv_cache_tokens=1 << 15, **settings)
    speculate(engine, "6_1_6", drafter=make_drafter(engine, is_wrong=True))
    params = SamplingParams(num_samples=1, max_new_tokens=3, temperature=0.0)
    found = tokens_of(engine.generate(prompts, params, policy_version=1))
    plain = engine_over(path, **settings | {"kv_cache_tokens": 1 << 15})
    assert found == tokens_of(plain.generate(prompts, params, policy_version=1))
    stats, plan = engine.stats(), engine.memory_plan()
    passes = engine.take_passes()
    assert {p.strategy for p in passes} == {"6_1_6"}
    assert passes[0].batch_size == 64
    assert stats.eager_passes == {}
    assert stats.num_graph_replays == 2 * len(passes)
    assert stats.num_unspeculated_passes == stats.num_preemptions == 0
    caches = [cache() for cache in alive_caches() if cache not in before]
    assert plan.kv_bytes in [cache_bytes(cache) for cache in caches if cache is not None]
    assert 64 * plan.graphs.max_length > 30 * plan.kv_tokens


def test_a_rollout_takes_as_many_launches_in_long_lanes_as_in_short_ones(
    tiny_path: Path, device: PretendDevice
) -> None:
    counts = []
    for max_new_tokens in (32, 960):  # lanes of 17 and of 31 pages
        engine = make_engine(tiny_path, device, "off", max_new_tokens=max_new_tokens)
        run(engine)
        before = device.gpu.num_launches
        run(engine)
        counts.append(device.gpu.num_launches - before)
        assert engine.stats().eager_passes == {}
    assert counts[0] == counts[1]


def test_a_sleeping_engine_keeps_the_tensors_that_a_drafter_borrows_and_no_kv(
    tiny_path: Path, device: PretendDevice, tensors_of
) -> None:
    before = alive_caches()
    engine = make_engine(tiny_path, device, "3_2_6")
    expected = run(engine)
    assert device.gpu.num_captures > 0  # passes that read the KV
    (kv,) = [cache for cache in alive_caches() if cache not in before]
    embedding, head = engine.target_tensors()
    sizes = [tensor.untyped_storage().nbytes() for tensor in (embedding, head)]
    for _ in range(2):
        engine.sleep()
        assert kv() is None
        assert [t.untyped_storage().nbytes() for t in (embedding, head)] == [0, 0]
    engine.wake()
    assert engine.target_tensors() == (embedding, head)
    assert [tensor.untyped_storage().nbytes() for tensor in (embedding, head)] == sizes
    with pytest.raises(RuntimeError, match="the engine holds None"):
        run(engine)
    load_from(tiny_path, engine)
    assert run(engine) == expected
    other = [(name, tensor * 1.5) for name, tensor in tensors_of("float64")]
    engine.load_weights(other, version=1, checksum=lambda: checksum(other))
    assert head.cpu().equal(dict(other)["lm_head.weight"])


@pytest.mark.parametrize("strategy, graphs", [("3_2_6", "keep"), ("off", "free")])
def test_graphs_that_are_kept_replay_with_the_weights_of_an_update(
    tiny_path: Path, device: PretendDevice, tensors_of, strategy: str, graphs: str
) -> None:
    other = [(name, tensor * 1.5) for name, tensor in tensors_of("float64")]
    there = make_engine(tiny_path, None, "off")
    there.load_weights(other, version=1, checksum=lambda: checksum(other))
    engine = make_engine(tiny_path, device, strategy, graphs=graphs)
    first = run(engine)
    num_captures = device.gpu.num_captures
    engine.free_kv()
    engine.sleep()
    engine.wake()
    engine.load_weights(other, version=1, checksum=lambda: checksum(other))
    assert first != run(engine) == run(there)
    assert (device.gpu.num_captures == num_captures) is (graphs == "keep")


@pytest.mark.parametrize("algorithm", ["hass", "eagle3"])
@torch.no_grad()
def test_a_drafter_is_judged(device: PretendDevice, algorithm: str) -> None:
    """The loss with its unrolled attention, and the passes that an engine would need. The backward
    pass is left out: there torch asks for more of a GPU than is pretended.
    """
    twin = make_draft_model("eagle3" if algorithm == "eagle3" else "eagle")
    sequences = [make_sequence(twin, n, seed=n, request=(n, 0, 0)) for n in (9, 40)]
    batch, objective = pack_batch(sequences), make_objective(DrafterSection(algorithm=algorithm))
    strategies = [SpeculationStrategy.parse(text) for text in ("4_1_4", "3_2_6")]
    losses, starts = [], []
    for where in (torch.device("cpu"), CUDA):
        model = copy_drafter(twin, where)
        loss = draft_loss(model, batch.to(where), objective)
        losses.append([float(loss.loss_sum), *loss.agreed_K.tolist(), *loss.accepted_K.tolist()])
        starts.append(Replay(sequences, SamplingParams(), where).starts(model, strategies))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))


def test_the_host_is_at_most_two_matrices_ahead_of_a_pass(device: PretendDevice) -> None:
    """A pass that is given up must be over soon. A host that queued a whole pass would wait for up
    to a second.
    """
    gpu = device.gpu
    twin = make_draft_model("eagle", dtype=torch.float32)
    model = copy_drafter(twin, CUDA)
    batch = pack_batch([make_sequence(twin, 40)]).to(CUDA)
    objective = make_objective(DrafterSection(algorithm="hass"))
    positions: list[int] = []

    def ask() -> bool:
        if len(positions) > 1:
            assert gpu.num_done >= positions[-1], "the host did not wait for the one before"
        positions.append(gpu.num_launches)
        return False

    with torch.no_grad(), interruptible(model, ask) as between_chunks:
        draft_loss(model, batch, objective, head_chunk_tokens=8, between_chunks=between_chunks)
    stretches = [b - a for a, b in itertools.pairwise(positions)]
    num_launches = positions[-1] - positions[0]
    assert len(positions) == 8 * objective.num_steps + 5  # matrices, and chunks of the head
    assert gpu.max_ahead <= 2 * max(stretches) < num_launches / 3


# ---- what the pretended GPU refuses


def test_tensors_of_two_devices_do_not_meet(device: PretendDevice) -> None:
    here, there = torch.ones(3, device=CUDA), torch.ones(3)
    assert (here + 1.0).device == CUDA
    for wrong in (
        lambda: here + there,
        lambda: torch.cat((here, there)),
        lambda: here.index_select(0, torch.tensor([0])),
        lambda: torch.nn.functional.linear(there, here.view(1, 3)),
    ):
        with pytest.raises(AssertionError, match="on the CPU"):
            wrong()
    with pytest.raises(AssertionError, match="CPUs alone"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(torch.ones(1, 1, 4, 4, device=CUDA),) * 3
        )


def test_a_packed_matrix_is_not_for_gpus(device: PretendDevice) -> None:
    matrix = Matrix(torch.ones(1024, 1024, device=CUDA))
    assert matrix(torch.ones(16, 1024, device=CUDA)).device == CUDA


@pytest.mark.parametrize("name", ["tolist", "item", "cpu", "host", "mask"])
def test_a_captured_pass_does_not_meet_the_host(device: PretendDevice, name: str) -> None:
    x = torch.ones(1, device=CUDA)
    works = {
        "tolist": lambda: x.tolist(),
        "item": lambda: float(x),
        "cpu": lambda: x.cpu(),
        "host": lambda: torch.tensor([1.0], device=CUDA),
        "mask": lambda: x.nonzero(),
    }
    works[name]()
    with pytest.raises(AssertionError, match="captured pass"):
        device.gpu.capture(works[name])
