"""Speculation changes nothing but time: in float64 every token is equal, whatever drafts, whichever
strategies alternate, and whether passes run one by one or as captured graphs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tests.recorded_graphs import recording_device
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    MakeEngine,
    SwitchingSelector,
    accept_lengths,
    by_turns,
    checksum,
    engine_over,
    make_drafter,
    make_prompts,
    speculate,
    tokens_of,
)
from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.runtime.device import Device
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import Prompt, Rollout, SamplingParams

STRATEGIES = [
    SpeculationStrategy.parse(s) for s in ("1_1_1", "4_1_4", "3_2_6", "4_4_16", "2_8_20", "ngram_4")
]
PARAMS = SamplingParams(
    num_samples=3, max_new_tokens=40, temperature=1.0, stop_token_ids=(5,), seed=5
)

DEVICES = [None, recording_device()]


@pytest.fixture(params=DEVICES, ids=["eager", "graphs"])
def make_engine(request: pytest.FixtureRequest, tiny_path: Path) -> MakeEngine:
    """`make_engine(**rollout settings)` in float64 with weights of version 1 loaded."""
    sizes = {"max_batch_size": 16, "max_new_tokens": 64}  # what is captured first is the largest
    return partial(engine_over, tiny_path, device=request.param, **sizes)


def prompts(count: int = 4) -> list[Prompt]:
    return make_prompts(*range(3, 3 + 5 * count, 5))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_tree_gives_the_tokens_of_plain_decoding(
    make_engine, tiny_path, strategy: SpeculationStrategy
) -> None:
    engine = make_engine()
    plain = engine.generate(prompts(), PARAMS, policy_version=1)
    speculate(engine, STRATEGIES, selector=FixedSelector(strategy))
    speculative = engine.generate(prompts(), PARAMS, policy_version=1)
    assert tokens_of(speculative) == tokens_of(plain)
    assert max(accept_lengths(speculative)) > 1
    for mine, theirs in zip(speculative, plain, strict=True):
        for a, b in zip(mine.rollouts, theirs.rollouts, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
            torch.testing.assert_close(a.policy_logprobs, b.policy_logprobs, atol=1e-5, rtol=0)
            assert a.finish_reason == b.finish_reason
            assert 1 + sum(a.accept_lengths) == a.token_ids.numel()


def test_a_searched_vocabulary_gives_the_tokens_of_the_whole_noise(tmp_path) -> None:
    """Plain and retrieved passes search a large vocabulary; learned trees make its noise."""
    path = make_tiny_hf(tmp_path / "wide", "qwen3", num_layers=1, vocab_size=24_000)
    engine = engine_over(path, max_batch_size=16, max_new_tokens=64)
    params = dataclasses.replace(PARAMS, max_new_tokens=12)
    plain = engine.generate(prompts(2), params, policy_version=1)
    speculate(engine, STRATEGIES, selector=by_turns(STRATEGIES[1:]))
    assert tokens_of(engine.generate(prompts(2), params, policy_version=1)) == tokens_of(plain)
    speculate(engine, "ngram_4")
    assert tokens_of(engine.generate(prompts(2), params, policy_version=1)) == tokens_of(plain)
    # A pass that makes no noise ahead moves the rows past what an earlier pass made.
    names = ("6_1_6", "2_1_2", *["ngram_4"] * 4, "2_1_2")
    mixed = [SpeculationStrategy.parse(name) for name in names]
    speculate(engine, mixed, selector=by_turns(mixed))
    assert tokens_of(engine.generate(prompts(2), params, policy_version=1)) == tokens_of(plain)


def test_rows_speculate_while_others_wait_and_newcomers_join_them(make_engine, tiny_path) -> None:
    engine = make_engine(max_batch_size=3, num_samples=3)
    plain = engine.generate(prompts(6), PARAMS, policy_version=1)
    speculate(engine, STRATEGIES, selector=by_turns(STRATEGIES))
    engine.take_passes()
    assert tokens_of(engine.generate(prompts(6), PARAMS, policy_version=1)) == tokens_of(plain)
    passes = engine.take_passes()
    assert engine.stats().num_unspeculated_passes == 0
    assert all(record.strategy != "off" for record in passes)
    num_tokens = sum(r.token_ids.numel() for g in plain for r in g.rollouts)
    # prefilling brings the first token of each response
    assert sum(record.num_committed for record in passes) == num_tokens - 18
    assert engine.take_passes() == []


@pytest.mark.parametrize("kv_cache_tokens", [256, 288])
def test_without_room_for_lanes_rows_decode_plainly_and_it_is_counted(
    make_engine, tiny_path, kv_cache_tokens: int
) -> None:
    engine = make_engine(max_batch_size=8, kv_cache_tokens=kv_cache_tokens)
    plain = engine.generate(prompts(6), PARAMS, policy_version=1)
    speculate(engine, STRATEGIES, selector=by_turns(STRATEGIES))
    assert tokens_of(engine.generate(prompts(6), PARAMS, policy_version=1)) == tokens_of(plain)
    passes = engine.take_passes()
    assert engine.stats().num_unspeculated_passes > 0
    assert {record.strategy != "off" for record in passes} == {True, False}


def test_ngrams_alone_need_no_learned_drafter_and_know_a_prompt_that_comes_back(
    make_engine,
) -> None:
    engine = make_engine(max_batch_size=5, kv_cache_tokens=2048)
    plain = tokens_of(engine.generate(prompts(), PARAMS, policy_version=1))
    strategies = [SpeculationStrategy.parse("ngram_6")]
    with pytest.raises(ValueError, match="strategy=1_1_1 needs a learned drafter"):
        Speculation(None, FixedSelector(STRATEGIES[1]), STRATEGIES)
    assert engine.memory_plan(strategies).kv_bytes == engine.memory_plan(()).kv_bytes
    engine.set_speculation(Speculation(None, FixedSelector(strategies[0]), strategies))
    accepted = []
    for _ in range(2):
        assert tokens_of(engine.generate(prompts(), PARAMS, policy_version=1)) == plain
        passes = engine.take_passes()
        accepted.append(sum(r.num_committed for r in passes) / sum(r.batch_size for r in passes))
    assert accepted[1] > 3.0 > accepted[0]


def test_a_drafter_may_be_replaced_between_two_passes(make_engine, tiny_path) -> None:
    engine = make_engine()
    plain = engine.generate(prompts(), PARAMS, policy_version=1)
    speculate(engine, STRATEGIES, selector=by_turns(STRATEGIES))
    weights = make_drafter(engine, seed=7).state_dict()

    def swap(rollout: Rollout) -> None:
        engine.load_drafter_weights(weights, version=1, checksum=checksum(weights.items()))

    assert tokens_of(
        engine.generate(prompts(), PARAMS, policy_version=1, on_finish=swap)
    ) == tokens_of(plain)
    with pytest.raises(RuntimeError, match="drafter version 2 has checksum"):
        engine.load_drafter_weights(weights, version=2, checksum=1)


@pytest.mark.parametrize("device", DEVICES, ids=["eager", "graphs"])
def test_features_and_taps_are_the_targets_and_an_eagle3_drafter_reads_them(
    tmp_path: Path, device: Device | None
) -> None:
    """The features that a verify pass leaves behind are checked too, after they are moved and
    committed.
    """
    path = make_tiny_hf(tmp_path, "llama", num_layers=5, vocab_size=48)
    plain = tokens_of(engine_over(path).generate(prompts(), PARAMS, policy_version=1))
    taps = default_aux_layer_ids(5)
    engine = engine_over(path, tap_layers=taps, device=device, max_batch_size=5, max_new_tokens=64)
    selector = by_turns([*STRATEGIES, OFF])
    drafter = make_drafter(engine, "eagle3")
    speculate(engine, STRATEGIES, selector=selector, drafter=drafter)
    kept: list[tuple[Rollout, torch.Tensor]] = []
    groups = engine.generate(
        prompts(), PARAMS, policy_version=1, on_features=lambda r, f: kept.append((r, f))
    )
    assert tokens_of(groups) == plain
    model = transformers.AutoModelForCausalLM.from_pretrained(path).double().eval()
    for rollout, mine in kept:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.token_ids])[None, :-1]
        with torch.no_grad():
            states = model.model(ids, output_hidden_states=True).hidden_states
        # hidden_states[0] is the embedding, so [i + 1] stands after layer i; the last is normed.
        theirs = torch.cat([states[-1], *(states[i + 1] for i in taps)], -1)
        torch.testing.assert_close(mine, theirs[0], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="aux_layer_ids"):
        speculate(engine, STRATEGIES, selector=selector)


def test_the_drafters_cache_after_rejections_equals_a_fresh_one(make_engine, tiny_path) -> None:
    """A drafter that has drafted, been rejected and switched proposes the same as one that starts
    now: from the same place on, as many tokens are accepted.
    """
    strategy = STRATEGIES[3]
    engine = make_engine(max_batch_size=1)
    alone = dataclasses.replace(PARAMS, num_samples=1)
    one = prompts(1)
    speculate(engine, STRATEGIES, selector=FixedSelector(strategy))
    steady = engine.generate(one, alone, policy_version=1)[0].rollouts[0].accept_lengths
    for num_steps in range(1, len(steady) - 1, 2):
        num_plain = sum(steady[:num_steps])
        late = SwitchingSelector(iter([OFF] * num_plain + [strategy] * 100))
        speculate(engine, STRATEGIES, selector=late)
        resumed = engine.generate(one, alone, policy_version=1)[0].rollouts[0].accept_lengths
        assert resumed == steady[num_steps:]


@pytest.mark.parametrize("num_pages", [20, 16])  # 12 of lanes, and room for two prompts or one
def test_continued_responses_wait_for_room_beside_the_lanes(
    tiny_path: Path, num_pages: int
) -> None:
    """Eight continued responses, each with a long prompt of its own, and four siblings that share a
    short one.
    """
    prompts = [
        dataclasses.replace(
            prompt,
            first_position=len(prompt.token_ids) - 20,
            num_samples=1 if len(prompt.token_ids) == 200 else 4,
            max_new_tokens=2,
        )
        for prompt in make_prompts(*[200] * 8, 20)
    ]
    params = SamplingParams(max_new_tokens=256, seed=2)
    expected = engine_over(tiny_path).generate(prompts, params, policy_version=1)
    engine = engine_over(tiny_path, max_batch_size=3, kv_cache_tokens=num_pages * 64)
    strategy = SpeculationStrategy.parse("ngram_2")
    engine.set_speculation(Speculation(None, FixedSelector(strategy), [strategy]))
    found = engine.generate(prompts, params, policy_version=1)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.stats().num_unspeculated_passes == 0
