"""Plain decoding: SGLang's tokens and log-probs are the embedded engine's, whose are transformers';
weights; a scheduler that dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.continuation import check_continued
from tests.sglang.rollouts import (
    GREEDY,
    PARAMS,
    SAMPLED,
    VERSION,
    answers,
    check_same,
    engine_processes,
    load,
    make_prompts,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.engines.sglang.connection import TARGET
from tlt_megatron.engines.sglang.sglang_engine import MEMORY_TAGS, SglangEngine
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.stop_strings import StopStrings
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams


@pytest.fixture(scope="module")
def engines() -> Iterator[list[SglangEngine]]:
    """The engine that all tests share, and another one after the test that kills it."""
    engines: list[SglangEngine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(engines: list[SglangEngine], policy_folder: Path) -> SglangEngine:
    """Awake, with the policy of version 1."""
    if not engines:
        before = dict(os.environ)
        engines.append(start_sglang(policy_folder))
        assert dict(os.environ) == before, "the start of an engine changes the environment"
    engines[0].wake()
    load(engines[0], tensors_of(policy_folder))
    return engines[0]


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_and_logprobs_are_those_of_the_embedded_engine(
    engine: SglangEngine, policy_folder: Path, name: str
) -> None:
    found = answers(engine, PARAMS[name])
    check_same(found, answers(start_embedded(policy_folder), PARAMS[name]))
    if name != "greedy":
        assert {r.finish_reason for r in found} == {FinishReason.STOP, FinishReason.LENGTH}


def test_responses_end_at_stop_strings_as_in_the_embedded_engine(
    engine: SglangEngine, policy_folder: Path
) -> None:
    """Four tokens share a letter. SGLang does not know the strings: its answers are cut."""
    stop = StopStrings(("bc", "k", "dba"), lambda token_id: bytes([97 + token_id // 4]))
    params = replace(PARAMS["cut"], stop=stop)
    found = answers(engine, params)
    check_same(found, answers(start_embedded(policy_folder), params))
    whole = answers(engine, PARAMS["cut"])
    pairs = list(zip(found, whole, strict=True))
    assert sum(len(one.token_ids) < len(other.token_ids) for one, other in pairs) > len(pairs) / 4


@pytest.mark.parametrize("name", PARAMS)
def test_cut_and_continued_responses_are_those_of_one_go(engine: SglangEngine, name: str) -> None:
    def generate(prompts: Sequence[Prompt], params: SamplingParams) -> list[RolloutGroup]:
        return engine.generate(prompts, params, policy_version=VERSION)

    check_continued(generate, make_prompts(), PARAMS[name], cut=6, atol=1e-4)


def test_an_update_replaces_the_weights_and_a_restored_policy_repeats_its_tokens(
    engine: SglangEngine, policy_folder: Path
) -> None:
    before = token_lists(answers(engine, SAMPLED))
    original = tensors_of(policy_folder)
    shifted = [(n, t.roll(1, 0) if "lm_head" in n else t) for n, t in original]
    load(engine, shifted, version=2)
    assert engine.checksum(TARGET) == checksum_tensors(shifted)
    assert token_lists(answers(engine, SAMPLED, version=2)) != before
    load(engine, original, version=3)
    assert token_lists(answers(engine, SAMPLED, version=3)) == before


def test_weights_that_arrive_otherwise_than_sent_are_refused(
    engine: SglangEngine, policy_folder: Path
) -> None:
    tensors = tensors_of(policy_folder)
    with pytest.raises(RuntimeError, match="policy_version=5 have checksum"):
        engine.load_weights(tensors, version=5, checksum=lambda: 1)
    with pytest.raises(RuntimeError, match="holds no weights"):
        answers(engine, GREEDY, version=5)


def test_what_the_engine_cannot_answer_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(RuntimeError, match="policy_version=2: the engine holds 1 weights"):
        answers(engine, GREEDY, version=2)
    prompt = Prompt(prompt_id="long", draw_index=0, token_ids=tuple(range(8, 40)))
    with pytest.raises(ValueError, match="'long' with 32 tokens"):
        engine.generate([prompt], GREEDY, policy_version=VERSION)
    with pytest.raises(RuntimeError, match="drafter version 1: the engine was given none"):
        engine.load_drafter_weights({}, version=1, checksum=0)


def test_generation_that_is_asked_to_stop_gives_up_all_requests_and_the_engine_goes_on(
    engine: SglangEngine,
) -> None:
    before = token_lists(answers(engine, SAMPLED))
    finished: list[Rollout] = []
    # Eight run, the others wait in the scheduler or are on their way to it.
    prompts = [Prompt(prompt_id=str(n), draw_index=n, token_ids=(8 + n % 8, 9)) for n in range(300)]
    with pytest.raises(GenerationStopped, match="of 300 responses were given up"):
        engine.generate(
            prompts,
            SamplingParams(num_samples=1, max_new_tokens=40),
            policy_version=VERSION,
            on_finish=finished.append,
            should_stop=lambda: len(finished) >= 3,
        )
    assert 3 <= len(finished) < 300
    num_finished = len(finished)
    assert token_lists(answers(engine, SAMPLED)) == before
    assert len(finished) == num_finished
    engine.sleep()  # SGLang refuses while it holds requests
    with pytest.raises(RuntimeError, match="call wake"):
        answers(engine, GREEDY)
    engine.wake()


def test_an_error_of_one_request_ends_the_others(engine: SglangEngine) -> None:
    def fail(rollout: Rollout) -> None:
        raise ValueError("its reward failed")

    prompts = [Prompt(prompt_id=str(n), draw_index=n, token_ids=(8 + n % 8, 9)) for n in range(100)]
    with pytest.raises(ValueError, match="its reward failed"):
        engine.generate(prompts, GREEDY, policy_version=VERSION, on_finish=fail)
    engine.sleep()
    engine.wake()


def test_all_memory_that_sglang_can_give_back_is_named(engine: SglangEngine) -> None:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    assert sorted(MEMORY_TAGS) == sorted(GPU_MEMORY_ALL_TYPES)


def test_a_killed_scheduler_is_reported_and_nothing_is_left_behind(
    engines: list[SglangEngine], engine: SglangEngine
) -> None:
    engines.remove(engine)
    scheduler = next(process for process in engine_processes() if "schedul" in process.name())
    endless = SamplingParams(num_samples=1, max_new_tokens=40, temperature=1.0)

    def kill(rollout: Rollout) -> None:
        if scheduler.is_running():
            os.kill(scheduler.pid, signal.SIGKILL)

    prompts = [Prompt(prompt_id=str(n), draw_index=n, token_ids=(8 + n % 8, 9)) for n in range(200)]
    try:
        with pytest.raises(RuntimeError, match=f"process {scheduler.pid} has died"):
            engine.generate(prompts, endless, policy_version=VERSION, on_finish=kill)
    finally:
        engine.close()
    assert engine_processes() == []
    with pytest.raises(RuntimeError, match="closed"):
        answers(engine, GREEDY)
