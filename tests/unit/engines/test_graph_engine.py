"""Captured graphs in the embedded engine, on a CPU with `RecordedGraphs`: every pass in lanes is a
replay, other passes are counted with their reason, and graphs live as long as what they read stays
in place.

That graphs change no token is tested in test_speculative_engine.py, which runs with graphs too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import Tensor

from tests.recorded_graphs import RecordingDevice, recording_device
from tests.unit.engines.conftest import (
    alive_caches,
    at_random,
    cache_bytes,
    engine_over,
    make_prompts,
    speculate,
    tokens_of,
)
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.base import EngineStats
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.memory_plan import plan_memory
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.runtime.device import Device
from tlt_megatron.types import SamplingParams

PARAMS = SamplingParams(num_samples=2, max_new_tokens=30, temperature=1.0, seed=2)
OFF = "target: graphs are off"
SIZES = {"max_batch_size": 8, "num_samples": 2, "max_new_tokens": 40}
MAX_PROMPT_TOKENS = 300


@pytest.fixture
def device() -> RecordingDevice:
    return recording_device()


def make_engine(path: Path, device: Device | None, **settings: int) -> EmbeddedEngine:
    settings = SIZES | settings
    return engine_over(path, device=device, max_prompt_tokens=MAX_PROMPT_TOKENS, **settings)


def run(
    engine: EmbeddedEngine, *lengths: int, params: SamplingParams = PARAMS
) -> tuple[list[list[int]], EngineStats]:
    groups = engine.generate(make_prompts(*lengths), params, policy_version=1)
    return tokens_of(groups), engine.stats()


@pytest.mark.parametrize(
    "strategy, num_passes, lengths",
    [
        ("off", 1, (5, 40, 90, 11, 7, 64)),
        ("3_2_6", 2, (2, 3, 4)),
        ("4_1_4", 2, (2, 3, 4)),
        ("ngram_4", 1, (2, 3, 4)),
    ],
)
def test_every_pass_in_lanes_is_a_replay(
    tiny_path: Path,
    device: RecordingDevice,
    strategy: str,
    num_passes: int,
    lengths: tuple[int, ...],
) -> None:
    """This holds while requests wait too. With a drafter, prompts are no longer than what a step
    commits.
    """
    found = []
    for where in (None, device):
        engine = make_engine(tiny_path, where)
        if strategy != "off":
            speculate(engine, strategy)
        found.append(run(engine, *lengths))
    (expected, plain), (tokens, stats) = found
    assert tokens == expected
    assert plain.num_graph_replays == 0
    assert plain.num_eager_passes == stats.num_graph_replays
    assert stats.num_graph_replays == num_passes * len(engine.take_passes())
    assert stats.eager_passes == {}


def test_what_cannot_be_replayed_is_counted_with_its_reason(
    tiny_path: Path, device: RecordingDevice
) -> None:
    def reasons(*lengths: int, strategy: str = "", **settings: int) -> dict[str, int]:
        engine = make_engine(tiny_path, device, **settings)
        if strategy:
            speculate(engine, strategy)
        tokens, stats = run(engine, *lengths)
        assert tokens == run(make_engine(tiny_path, None), *lengths)[0]
        return stats.eager_passes

    assert reasons(5, 40, 90, kv_cache_tokens=64 * 9).keys() == set()  # lanes that grow
    assert reasons(5, 40, 90, kv_cache_tokens=64 * 5).keys() == {
        "target: sequences lie in pages, not in lanes"
    }
    assert reasons(9, strategy="3_1_3") == {"draft: more rows than planned for this batch size": 1}
    # Two siblings join the others, one after the other, each with 90 positions in passes of 64.
    late = reasons(3, 3, 3, 90, strategy="3_1_3", max_batch_size=6)
    assert late == {"draft: rows that the drafter brings up to date apart from the others": 4}
    wide = reasons(*[5] * 8, strategy="6_8_40", max_batch_size=16)
    assert wide["target: more rows than planned for this batch size"] > 0


def test_lanes_as_planned_where_they_fit_so_that_graphs_stay(
    tiny_path: Path, device: RecordingDevice
) -> None:
    engine = make_engine(tiny_path, device)
    speculate(engine, "3_2_6 2_1_2")
    run(engine, 30, 31, 32)
    run(engine, 30, 31, 5)  # longest sequences differ, lanes do not
    run(engine, 290, 29, 7)  # beyond 256, where rotary tables grow
    assert device.num_alive == len(device.graphs) > 0
    # A response longer than planned needs longer lanes.
    longer = SamplingParams(num_samples=1, max_new_tokens=150, seed=2)
    tokens, stats = run(engine, 290, params=longer)
    assert tokens == run(make_engine(tiny_path, None), 290, params=longer)[0]
    assert stats.eager_passes["target: sequences longer than planned"] > 0
    assert stats.num_graph_replays > 0


def test_lanes_as_needed_where_those_planned_do_not_fit(
    tiny_path: Path, device: RecordingDevice
) -> None:
    engine = make_engine(tiny_path, device, kv_cache_tokens=64 * 8)
    tokens, stats = run(engine, 5, 9)
    assert tokens == run(make_engine(tiny_path, None), 5, 9)[0]
    assert stats.num_graph_replays == len(engine.take_passes())


@pytest.mark.parametrize(
    "strategies, num_pages", [("3_2_6 2_1_2 off", 10), ("4_1_4 ngram_4 off", 14)]
)
def test_lanes_that_grow_change_no_token(
    tiny_path: Path, device: RecordingDevice, strategies: str, num_pages: int
) -> None:
    """Rows join, outgrow their lanes, are preempted for others and leave, while strategies
    switch.
    """
    params = dataclasses.replace(PARAMS, max_new_tokens=80, stop_token_ids=(5,))
    lengths = (5, 130, 11, 64, 3)
    sizes = {"max_new_tokens": 80, "max_batch_size": 5, "kv_cache_tokens": 64 * num_pages}
    engine = make_engine(tiny_path, device, **sizes)
    parsed = [SpeculationStrategy.parse(text) for text in strategies.split()]
    speculate(engine, parsed, selector=at_random(parsed, num_pages))
    tokens, stats = run(engine, *lengths, params=params)
    plain = make_engine(tiny_path, None, max_new_tokens=80)
    assert tokens == run(plain, *lengths, params=params)[0]
    assert not any("target" in reason for reason in stats.eager_passes)
    assert stats.num_unspeculated_passes == 0
    assert stats.num_preemptions > 0


def test_a_row_that_joins_lanes_that_grow_moves_no_other(
    tiny_path: Path, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, limits, moved = (90, 5, 40, 90, 90, 30), (60, 2, 60, 2, 60, 2), []
    relocate = KvCache.relocate

    def count(cache: KvCache, source_S: Tensor, target_S: Tensor) -> None:
        moved.append(source_S.numel())
        relocate(cache, source_S, target_S)

    monkeypatch.setattr(KvCache, "relocate", count)
    prompts = [
        dataclasses.replace(prompt, max_new_tokens=limit)
        for prompt, limit in zip(make_prompts(*lengths), limits, strict=True)
    ]
    params = dataclasses.replace(PARAMS, num_samples=1, max_new_tokens=60)
    sizes = {"max_batch_size": 4, "max_new_tokens": 60}
    engine = make_engine(tiny_path, device, kv_cache_tokens=64 * 13, **sizes)
    plain = make_engine(tiny_path, None, **sizes)
    tokens = tokens_of(engine.generate(prompts, params, policy_version=1))
    assert engine.stats().eager_passes == {}
    assert moved == list(lengths)  # each row once, into its lane
    assert tokens == tokens_of(plain.generate(prompts, params, policy_version=1))


def test_a_narrow_tree_at_the_end_of_a_length_is_verified_where_the_widest_one_fits(
    tiny_path: Path, device: RecordingDevice
) -> None:
    """All strategies share one verify capture, and its rows after a narrow tree need positions
    too.
    """
    found = []
    for where in (None, device):
        engine = engine_over(tiny_path, device=where, **SIZES)
        speculate(engine, "2_1_2 4_4_16")
        found.append(run(engine, 490)[0])
    assert found[0] == found[1]
    assert engine.stats().num_graph_replays > 20


def test_sleeping_or_another_speculation_gives_graphs_back(
    tiny_path: Path, device: RecordingDevice
) -> None:
    engine = make_engine(tiny_path, device)
    expected = run(engine, 5, 9)[0]
    assert device.num_alive > 0
    engine.sleep()
    assert device.num_alive == 0
    engine.wake()
    assert run(engine, 5, 9)[0] == expected
    assert device.num_alive > 0
    speculate(engine, "2_1_2")
    assert device.num_alive == 0
    assert run(engine, 5, 9)[0] == expected
    engine.close()
    assert device.num_alive == 0


def test_another_way_to_sample_captures_graphs_anew(
    tiny_path: Path, device: RecordingDevice
) -> None:
    """A graph holds temperature, cuts and stop tokens as constants."""
    engine, plain = make_engine(tiny_path, device), make_engine(tiny_path, None)
    for change in (
        {},
        {"temperature": 0.3},
        {"top_p": 0.5},
        {"top_k": 2},
        {"stop_token_ids": (7,)},
    ):
        params = dataclasses.replace(PARAMS, **change)
        tokens, stats = run(engine, 5, 9, params=params)
        assert tokens == run(plain, 5, 9, params=params)[0]
        assert stats.num_graph_replays > 0
    num_captures, captured_s = len(device.graphs), engine._graphs.capture_s
    run(engine, 5, 9, params=params)
    assert len(device.graphs) == num_captures
    assert engine._graphs.capture_s == captured_s > 0.0


def test_graphs_can_be_switched_off(tiny_path: Path, device: RecordingDevice) -> None:
    engine = make_engine(tiny_path, device, graphs="off")
    plain = make_engine(tiny_path, None)
    assert not engine.has_graphs
    assert run(engine, 5, 9)[0] == run(plain, 5, 9)[0]
    assert engine.stats().eager_passes.keys() == {OFF}
    assert engine.memory_plan() == plain.memory_plan()
    assert not device.graphs


def test_planned_memory_has_lanes_for_all_and_a_scratch_page(
    tiny_path: Path, device: RecordingDevice
) -> None:
    config, section = load_model_config(tiny_path), RolloutSection(dtype="float64", **SIZES)
    engine = make_engine(tiny_path, device)
    speculate(engine, "3_2_6")
    plan = engine.memory_plan()
    strategies = [SpeculationStrategy.parse("3_2_6")]
    settings = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "has_graphs": True}
    assert plan == plan_memory(config, section, strategies, device=device, **settings)
    assert plan.draft_slots == 8
    lane = 384  # 300 + 40 + 8 in pages of 64
    assert plan.kv_tokens == 8 * lane + (8 // 2 + 1) * 320
    before = alive_caches()
    run(engine, 5)
    (cache,) = [found() for found in alive_caches() if found not in before]
    assert cache is not None
    assert plan.kv_bytes == cache_bytes(cache)
    assert cache.scratch_slot == plan.kv_tokens == cache.bias_T.numel() - 64
    assert engine.memory_plan(()).graphs.max_length == lane
