"""Plain decoding: SGLang's numbers are transformers', its tokens the embedded engine's; weights; a scheduler that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.continuation import check_continued
from tests.sglang.rollouts import (
    CUT,
    GREEDY,
    SAMPLED,
    VERSION,
    answers,
    checksum,
    engine_processes,
    kept_sets,
    make_prompts,
    start_embedded,
    start_sglang,
    tensors_of,
    token_lists,
)
from tlt_megatron.engines.base import GenerationStopped, LaterPrompts
from tlt_megatron.engines.sglang.connection import TARGET
from tlt_megatron.engines.sglang.sglang_engine import MEMORY_TAGS, SglangEngine
from tlt_megatron.types import FinishReason, Prompt, Rollout, RolloutGroup, SamplingParams

PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "cut": CUT}


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
    tensors = tensors_of(policy_folder)
    engines[0].wake()
    engines[0].load_weights(tensors, version=VERSION, checksum=lambda: checksum(tensors))
    return engines[0]


def test_logprobs_are_those_of_transformers(engine: SglangEngine, policy_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    for params in PARAMS.values():
        for rollout in answers(engine, params):
            token_ids = torch.cat((torch.tensor(rollout.prompt_ids), rollout.token_ids))
            with torch.no_grad():
                logits = model(token_ids.unsqueeze(0)).logits[0, len(rollout.prompt_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, rollout.token_ids.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(rollout.policy_logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_and_logprobs_are_those_of_the_embedded_engine(
    engine: SglangEngine, policy_folder: Path, name: str
) -> None:
    expected = answers(start_embedded(policy_folder), PARAMS[name])
    found = answers(engine, PARAMS[name])
    assert token_lists(found) == token_lists(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.finish_reason == theirs.finish_reason
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.policy_logprobs, theirs.policy_logprobs, rtol=0, atol=1e-4)
        assert kept_sets(ours) == kept_sets(theirs)
    if name != "greedy":
        assert {r.finish_reason for r in found} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("name", PARAMS)
def test_cut_and_continued_responses_are_those_of_one_go(engine: SglangEngine, name: str) -> None:
    def generate(prompts: Sequence[Prompt], params: SamplingParams) -> list[RolloutGroup]:
        return engine.generate(prompts, params, policy_version=VERSION)

    check_continued(generate, make_prompts(), PARAMS[name], cut=6, atol=1e-4)


def test_later_turns_in_the_same_call_are_those_of_a_call_of_their_own(
    engine: SglangEngine, policy_folder: Path
) -> None:
    """Each first turn comes back with an observation of two tokens."""
    firsts = {p.draw_index: replace(p, max_new_tokens=8) for p in make_prompts()}

    def following(turn: Rollout) -> Prompt:
        return replace(
            firsts[turn.draw_index],
            token_ids=(*turn.prompt_ids, *turn.token_ids.tolist(), 9, 10),
            first_sample=turn.sample_index,
            first_position=turn.token_ids.numel() + 2,
            num_samples=1,
            max_new_tokens=20,
        )

    ready: list[Prompt] = []
    num_sent = 0

    def take_turn(turn: Rollout) -> None:
        if turn.prompt_ids == firsts[turn.draw_index].token_ids:
            ready.append(following(turn))

    def more_prompts() -> LaterPrompts | None:
        nonlocal num_sent
        if num_sent == 18:
            return None
        found = [ready.pop() for _ in range(len(ready))]
        num_sent += len(found)
        return LaterPrompts(found)

    calls = {"policy_version": VERSION, "on_finish": take_turn, "more_prompts": more_prompts}
    groups = engine.generate(list(firsts.values()), SAMPLED, **calls)
    embedded = start_embedded(policy_folder)
    turns = embedded.generate(list(firsts.values()), SAMPLED, policy_version=VERSION)
    later = [following(turn) for group in turns for turn in group.rollouts]
    expected = turns + embedded.generate(later, SAMPLED, policy_version=VERSION)

    def by_turn(groups: Sequence[RolloutGroup]) -> dict[tuple, list[int]]:
        return {
            (r.draw_index, r.sample_index, r.prompt_ids): r.token_ids.tolist()
            for group in groups
            for r in group.rollouts
        }

    assert by_turn(groups) == by_turn(expected)
    assert len(by_turn(groups)) == 36


def test_responses_are_reported_as_they_finish(engine: SglangEngine) -> None:
    finished: list[Rollout] = []
    groups = engine.generate(
        make_prompts(), SAMPLED, policy_version=VERSION, on_finish=finished.append
    )
    assert {(r.draw_index, r.sample_index) for r in finished} == {
        (r.draw_index, r.sample_index) for group in groups for r in group.rollouts
    }
    assert len(finished) == 18
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(r.token_ids.numel() for r in finished)
    assert 40 <= stats.num_decode_passes <= stats.num_generated_tokens
    assert 0 < stats.peak_kv_tokens <= stats.kv_capacity_tokens


def test_an_update_replaces_the_weights_and_a_restored_policy_repeats_its_tokens(
    engine: SglangEngine, policy_folder: Path
) -> None:
    before = token_lists(answers(engine, SAMPLED))
    original = tensors_of(policy_folder)
    shifted = [(n, t.roll(1, 0) if "lm_head" in n else t) for n, t in original]
    engine.load_weights(shifted, version=2, checksum=lambda: checksum(shifted))
    assert engine.checksum(TARGET) == checksum(shifted)
    assert token_lists(answers(engine, SAMPLED, version=2)) != before
    engine.load_weights(original, version=3, checksum=lambda: checksum(original))
    assert token_lists(answers(engine, SAMPLED, version=3)) == before


def test_weights_that_arrive_otherwise_than_sent_are_refused(
    engine: SglangEngine, policy_folder: Path
) -> None:
    tensors = tensors_of(policy_folder)
    with pytest.raises(RuntimeError, match="policy_version=5 have checksum"):
        engine.load_weights(tensors, version=5, checksum=lambda: checksum(tensors) + 1)
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


def test_a_sleeping_engine_must_be_woken(engine: SglangEngine) -> None:
    before = token_lists(answers(engine, GREEDY))
    engine.sleep()
    with pytest.raises(RuntimeError, match="call wake"):
        answers(engine, GREEDY)
    engine.wake()
    assert token_lists(answers(engine, GREEDY)) == before


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
