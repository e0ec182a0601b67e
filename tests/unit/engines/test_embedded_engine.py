"""The embedded engine: the same tokens whatever shares the batch or is preempted, exact logprobs,
and its refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests.unit.engines.conftest import (
    MakeEngine,
    alive_caches,
    cache_bytes,
    checksum,
    make_prompts,
    tokens_of,
    weight_bytes,
)
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.base import GenerationStopped
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.memory_plan import plan_memory
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import select_device
from tlt_megatron.types import FinishReason, Rollout, SamplingParams

PARAMS = SamplingParams(num_samples=3, max_new_tokens=70, stop_token_ids=(5,), seed=3)


PROMPTS = make_prompts(4, 30, 90, 11)
LONG = SamplingParams(num_samples=3, max_new_tokens=150, seed=3)


@pytest.fixture
def expected(make_engine: MakeEngine) -> list[list[int]]:
    """Of PROMPTS with PARAMS, everything at once."""
    return tokens_of(make_engine().generate(PROMPTS, PARAMS, policy_version=1))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 1},
        {"max_batch_size": 5},
        {"prefill_chunk_tokens": 7},
        {"prefill_chunk_tokens": 50, "max_batch_size": 2},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_batching(
    make_engine: MakeEngine, expected: list[list[int]], settings: dict[str, int]
) -> None:
    engine = make_engine(**settings)
    assert tokens_of(engine.generate(PROMPTS, PARAMS, policy_version=1)) == expected
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_prefilled_tokens == 4 + 30 + 90 + 11
    assert min(map(len, expected)) < 30 < 65 < max(map(len, expected))  # some stop early, some late


def test_tokens_do_not_depend_on_company_or_order(
    make_engine: MakeEngine, expected: list[list[int]]
) -> None:
    engine = make_engine()
    for index in (2, 0):
        alone = tokens_of(engine.generate([PROMPTS[index]], PARAMS, policy_version=1))
        assert alone == expected[3 * index : 3 * index + 3]
    backwards = engine.generate(PROMPTS[::-1], PARAMS, policy_version=1)
    assert tokens_of(backwards[::-1]) == expected
    assert [group.prompt for group in backwards] == PROMPTS[::-1]


@pytest.mark.parametrize("kv_cache_tokens", [320, 384, 640])
def test_preemption_loses_nothing_and_stays_in_budget(
    make_engine: MakeEngine, kv_cache_tokens: int
) -> None:
    """320 is what the longest prompt with one response needs."""
    calm = make_engine().generate(PROMPTS, LONG, policy_version=1)
    engine = make_engine(kv_cache_tokens=kv_cache_tokens, prefill_chunk_tokens=64)
    finished: list[Rollout] = []
    tight = engine.generate(PROMPTS, LONG, policy_version=1, on_finish=finished.append)
    assert tokens_of(tight) == tokens_of(calm)
    for one, other in zip(calm, tight, strict=True):
        for calm_rollout, tight_rollout in zip(one.rollouts, other.rollouts, strict=True):
            torch.testing.assert_close(
                calm_rollout.logprobs, tight_rollout.logprobs, atol=1e-6, rtol=1e-6
            )
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefilled_tokens > 4 + 30 + 90 + 11
    assert engine.memory_plan().kv_tokens == kv_cache_tokens
    assert len(finished) == 12


def test_pages_that_move_together_in_the_middle_change_nothing(make_engine: MakeEngine) -> None:
    """20 short responses leave holes of 40 pages, and the 4 that go on move to the front."""
    params = SamplingParams(num_samples=2, max_new_tokens=130, seed=3)
    prompts = make_prompts(*[9] * 14)
    limited = [replace(prompt, max_new_tokens=70) for prompt in prompts[:10]] + prompts[10:]
    found = make_engine(max_batch_size=24).generate(limited, params, policy_version=1)
    alone = make_engine(max_batch_size=2).generate(prompts[10:], params, policy_version=1)
    assert tokens_of(found[10:]) == tokens_of(alone)
    assert [len(tokens) for tokens in tokens_of(found)] == [70] * 20 + [130] * 8


@pytest.mark.parametrize(
    "temperature, top_p, top_k", [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.2, 0.8, 0), (0.9, 0.9, 12)]
)
def test_logprobs_equal_transformers(
    make_engine: MakeEngine, tiny_path: Path, temperature: float, top_p: float, top_k: int
) -> None:
    params = SamplingParams(
        num_samples=2, max_new_tokens=70, temperature=temperature, top_p=top_p, top_k=top_k
    )
    engine = make_engine(dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    warpers = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(temperature)]
        + ([transformers.TopKLogitsWarper(top_k)] if top_k else [])
        + ([transformers.TopPLogitsWarper(top_p)] if top_p < 1 else [])
    )
    for group in engine.generate(PROMPTS, params, policy_version=1):
        for rollout in group.rollouts:
            ids = torch.tensor(rollout.prompt_ids + tuple(rollout.token_ids.tolist()))
            with torch.inference_mode():
                logits = model(ids.unsqueeze(0)).logits[0, len(rollout.prompt_ids) - 1 : -1]
            index = rollout.token_ids.unsqueeze(1)
            policy = logits.log_softmax(-1).gather(1, index).squeeze(1)
            cut = warpers(ids.unsqueeze(0), logits)
            sampled = cut.log_softmax(-1).gather(1, index).squeeze(1)
            if rollout.kept is None:
                assert cut.isfinite().all()
            else:
                assert rollout.kept.token_ids.tolist() == cut.isfinite().nonzero()[:, 1].tolist()
                assert rollout.kept.counts.tolist() == cut.isfinite().sum(1).tolist()
            torch.testing.assert_close(rollout.policy_logprobs, policy, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(rollout.logprobs, sampled, atol=1e-4, rtol=1e-4)


def test_responses_end_at_the_first_stop_token_or_at_the_limit(make_engine: MakeEngine) -> None:
    params = SamplingParams(num_samples=8, max_new_tokens=25, stop_token_ids=(5, 17, 40), seed=1)
    groups = make_engine().generate(PROMPTS, params, policy_version=1)
    reasons = set()
    for rollout in [rollout for group in groups for rollout in group.rollouts]:
        tokens = rollout.token_ids.tolist()
        reasons.add(rollout.finish_reason)
        assert not {5, 17, 40} & set(tokens[:-1])
        if rollout.finish_reason is FinishReason.STOP:
            assert tokens[-1] in (5, 17, 40)
        else:
            assert len(tokens) == 25
            assert tokens[-1] not in (5, 17, 40)
        assert rollout.logprobs.dtype == rollout.policy_logprobs.dtype == torch.float32
        assert rollout.logprobs.shape == rollout.token_ids.shape
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_each_response_is_streamed_once_and_early(make_engine: MakeEngine) -> None:
    finished: list[Rollout] = []
    engine = make_engine(max_batch_size=4)
    groups = engine.generate(PROMPTS, PARAMS, policy_version=1, on_finish=finished.append)
    everything = [rollout for group in groups for rollout in group.rollouts]
    assert {id(rollout) for rollout in finished} == {id(rollout) for rollout in everything}
    assert len(finished) == len(everything) == 12
    assert [id(rollout) for rollout in finished] != [id(rollout) for rollout in everything]
    for group in groups:
        assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 2]
        assert {rollout.prompt_ids for rollout in group.rollouts} == {group.prompt.token_ids}


def test_a_stop_drops_what_runs_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: list[list[int]]
) -> None:
    engine, finished = make_engine(max_batch_size=4), []
    with pytest.raises(GenerationStopped):
        engine.generate(
            PROMPTS,
            PARAMS,
            policy_version=1,
            on_finish=finished.append,
            should_stop=lambda: len(finished) >= 3,
        )
    assert 3 <= len(finished) < 12
    assert tokens_of(engine.generate(PROMPTS, PARAMS, policy_version=1)) == expected


def test_the_seed_the_draw_and_the_sibling_choose_the_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def first(seed: int, draw: int) -> list[list[int]]:
        params = SamplingParams(num_samples=2, max_new_tokens=12, seed=seed)
        prompts = make_prompts(9, first_draw=draw)
        return tokens_of(engine.generate(prompts, params, policy_version=1))

    assert first(1, 0) == first(1, 0)
    assert len({tuple(tokens) for tokens in first(1, 0) + first(2, 0) + first(1, 1)}) == 6


def test_no_prompts_give_no_groups(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.generate([], PARAMS, policy_version=1) == []
    assert engine.stats().num_generated_tokens == 0


# ---- weights, memory, refusals


def test_generating_with_another_version_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(RuntimeError, match="policy_version=2 is asked for, the engine holds 1"):
        make_engine().generate(PROMPTS, PARAMS, policy_version=2)


def test_weights_that_do_not_match_their_checksum_are_refused(
    make_engine: MakeEngine, tensors_of
) -> None:
    engine = make_engine(dtype="bfloat16")
    tensors = tensors_of("bfloat16")
    with pytest.raises(RuntimeError, match=r"policy_version=2 have checksum \d+ in bfloat16"):
        engine.load_weights(tensors, version=2, checksum=lambda: checksum(tensors) + 1)
    for version in (1, 2):
        with pytest.raises(RuntimeError, match="the engine holds None"):
            engine.generate(PROMPTS, PARAMS, policy_version=version)
    engine.load_weights(tensors_of("float32"), version=2, checksum=lambda: checksum(tensors))
    engine.generate(PROMPTS[:1], PARAMS, policy_version=2)


def test_missing_weights_are_refused(make_engine: MakeEngine, tensors_of) -> None:
    tensors = tensors_of("float64")
    name = tensors[3][0]
    with pytest.raises(RuntimeError, match=f"lack 1 tensors, {name} among them"):
        make_engine().load_weights(
            tensors[:3] + tensors[4:], version=2, checksum=lambda: checksum(tensors)
        )


def test_new_weights_change_the_tokens_and_old_ones_bring_them_back(
    make_engine: MakeEngine, expected: list[list[int]], tensors_of
) -> None:
    engine = make_engine()
    tensors = tensors_of("float64")
    other = [(name, tensor * 1.5) for name, tensor in tensors]
    engine.load_weights(other, version=2, checksum=lambda: checksum(other))
    assert tokens_of(engine.generate(PROMPTS, PARAMS, policy_version=2)) != expected
    engine.load_weights(tensors, version=3, checksum=lambda: checksum(tensors))
    groups = engine.generate(PROMPTS, PARAMS, policy_version=3)
    assert tokens_of(groups) == expected
    assert groups[0].rollouts[0].policy_version == 3


def test_a_request_that_cannot_fit_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_tokens=192)
    message = (
        r"prompt 'p2' of 90 tokens with max_new_tokens=70 needs 4 KV pages of 64: the engine has 3"
    )
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, PARAMS, policy_version=1)
    with pytest.raises(ValueError, match="prompt 'p0' is empty"):
        engine.generate(make_prompts(0), PARAMS, policy_version=1)
    with pytest.raises(ValueError, match="kv_cache_tokens=100: must be 0 or at least 128"):
        make_engine(kv_cache_tokens=100)


@pytest.mark.parametrize("leave", [EmbeddedEngine.free_kv, EmbeddedEngine.sleep])
def test_an_idle_or_sleeping_engine_holds_no_kv_and_goes_on_when_it_is_woken(
    make_engine: MakeEngine, expected: list[list[int]], leave: Callable[[EmbeddedEngine], None]
) -> None:
    before = alive_caches()
    engine = make_engine()
    engine.generate(PROMPTS, PARAMS, policy_version=1)
    (kv,) = [cache for cache in alive_caches() if cache not in before]
    leave(engine)
    assert kv() is None
    if leave is EmbeddedEngine.sleep:
        with pytest.raises(RuntimeError, match="asleep: call wake"):
            engine.generate(PROMPTS, PARAMS, policy_version=1)
    engine.wake()
    assert tokens_of(engine.generate(PROMPTS, PARAMS, policy_version=1)) == expected
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS, PARAMS, policy_version=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_plan_is_what_is_allocated(tiny_path: Path, dtype: str) -> None:
    config = load_model_config(tiny_path)
    section = RolloutSection(dtype=dtype, max_batch_size=4, num_samples=2, max_new_tokens=100)
    plan = EmbeddedEngine(config, section, select_device("cpu")).memory_plan()
    assert plan == plan_memory(config, section, device=select_device("cpu"))
    assert plan.kv_tokens == 64 * (4 * 2 + 3 * 16)
    for unshared in ({"environment": "any.py:answer"}, {"partial_rollout_tokens": 10}):
        alone = plan_memory(config, replace(section, **unshared), device=select_device("cpu"))
        assert alone.kv_tokens == 64 * (4 * 18 + 3 * 16)  # whole sequences
    device, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    assert plan.weights_bytes == weight_bytes(Transformer(config, torch_dtype, device))
    cache = KvCache(
        config, num_pages=plan.kv_tokens // 64, page_size=64, dtype=torch_dtype, device=device
    )
    assert plan.kv_bytes == cache_bytes(cache)
    assert plan.activations_bytes > 0
