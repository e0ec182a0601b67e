"""A thousand requests: whatever drafts and however strategies are chosen, the tokens are those of
plain decoding. In float64 every token is equal. In float32 log-probabilities agree, and differing
tokens are counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.continuation import check_continued
from tests.unit.engines.conftest import (
    VOCAB_SIZE,
    accept_lengths,
    at_random,
    engine_over,
    make_drafter,
    speculate,
    stop_at,
)
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import draft_sequence, pack_sequences
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tlt_megatron.types import DraftSequence, Prompt, Rollout, RolloutGroup, SamplingParams

HIDDEN_SIZE = 64
STRATEGIES = [
    SpeculationStrategy.parse(text)
    for text in ("1_1_1", "5_1_5", "3_2_6", "4_4_16", "2_8_20", "ngram_6")
]
CHAIN, TREE, NGRAMS = (SpeculationStrategy.parse(text) for text in ("4_1_4", "4_4_16", "ngram_4"))
DRAFTERS = ("trained", "random", "always_wrong", "always_right", "broken")
SELECTORS = ("fixed", "beg_mab", "cost_model", "restless")
STOPS = (None, None, stop_at(), stop_at("aab"), stop_at("€a", "bcab", "abab"))
NUM_COMPOSITIONS, NUM_REQUESTS = 2, 32  # for each drafter with each selector; 1,280 requests in all
# Noise all but decides what is drawn at this temperature, so a drafter that knows a little is
# nearly always right.
HOT = 10.0

Weights = dict[str, Tensor]


def draw_prompts(count: int, longest: int, draw: random.Random) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=str(i),
            draw_index=i,
            token_ids=tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, longest))),
        )
        for i in range(count)
    ]


def draw_composition(
    drafter: str, number: int, draw: random.Random
) -> tuple[list[Prompt], SamplingParams, dict[str, int]]:
    """What is asked of an engine: prompts with limits of their own, sampling parameters, and
    settings of RolloutSection.
    """
    num_samples = draw.choice((1, 2, 4, 8))
    temperature = draw.choice((0.0, 0.6, 1.0, 1.3))
    if drafter == "always_right":
        temperature = (1.0, HOT)[number % 2]  # by n-grams of an earlier epoch, and by noise
    limit = draw.choice((2, 9, 24))
    params = SamplingParams(
        num_samples=num_samples,
        max_new_tokens=limit,
        temperature=temperature,
        top_p=draw.choice((1.0, 0.9, 0.5)),
        top_k=draw.choice((0, 0, 3, 12)),
        stop_token_ids=draw.choice(((), (5,), (1, 7, 11, 30))),
        stop=draw.choice(STOPS),
        seed=draw.randrange(1000),
    )
    num_prompts = NUM_REQUESTS // num_samples
    prompts = [
        replace(prompt, max_new_tokens=draw.randint(1, limit), stop=draw.choice(STOPS))
        for prompt in draw_prompts(num_prompts, draw.choice((1, 12, 50)), draw)
    ]
    settings = {
        "max_batch_size": draw.choice((2, 5, 16, 64)),
        "kv_cache_tokens": draw.choice((0, 0, 256, 640)),
        "prefill_chunk_tokens": draw.choice((16, 2048)),
    }
    return prompts, params, settings


@pytest.fixture(scope="module")
def drafters(tiny_path: Path) -> dict[str, Weights]:
    """Weights by name: untrained ones, and some trained on what the model itself writes."""
    engine = engine_over(tiny_path)
    sequences: list[DraftSequence] = []

    def keep(rollout: Rollout, features_TF: Tensor) -> None:
        sequences.append(draft_sequence(rollout, features_TF.float(), HIDDEN_SIZE))

    prompts = draw_prompts(32, 20, random.Random(1))
    params = SamplingParams(num_samples=4, max_new_tokens=40, seed=1)
    engine.generate(prompts, params, policy_version=1, on_features=keep)
    model = make_drafter(engine_over(tiny_path, dtype="float32"))
    untrained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = DrafterTrainer(model, DrafterSection(algorithm="eagle", lr=5e-3))
    for _ in range(10):
        for batch in pack_sequences(sequences, 1024):
            trainer.step(batch)
    return {"random": untrained, "trained": model.state_dict()}


def draft_with(
    engine: EmbeddedEngine,
    drafters: dict[str, Weights],
    drafter: str,
    selector: StrategySelector,
) -> None:
    model = make_drafter(engine, is_wrong=drafter == "always_wrong")
    model.load_state_dict(drafters["random" if drafter == "random" else "trained"])
    if drafter == "broken":
        torch.nn.utils.vector_to_parameters(
            torch.full((sum(p.numel() for p in model.parameters()),), torch.nan), model.parameters()
        )
    strategies = [*STRATEGIES, CHAIN, TREE, NGRAMS]
    speculate(engine, strategies, selector=selector, drafter=model)


def usable_strategies(drafter: str, number: int) -> list[SpeculationStrategy]:
    """The strategies with which a drafter is what its name says."""
    if drafter != "always_right":
        return STRATEGIES
    return [s for s in STRATEGIES if (s.num_retrieved > 0 if number % 2 == 0 else s.is_learned)]


def make_selector(
    name: str, seed: int, strategies: Sequence[SpeculationStrategy]
) -> StrategySelector:
    if name == "fixed":
        return FixedSelector(strategies[seed % len(strategies)])
    if name == "beg_mab":
        return BegMabSelector([*strategies, OFF], max_batch_size=16, epsilon=0.3, seed=seed)
    if name == "cost_model":
        return CostModelSelector(strategies)
    return at_random([OFF, *strategies], seed)


def content_of(groups: Sequence[RolloutGroup]) -> list[tuple[object, ...]]:
    """The tokens of each response, why it ended, and the tokens that top-p and top-k kept."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [
        (
            r.token_ids.tolist(),
            r.finish_reason,
            r.kept and (r.kept.token_ids.tolist(), r.kept.counts.tolist()),
        )
        for r in rollouts
    ]


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_output_is_plain_output(
    tiny_path: Path, drafters: dict[str, Weights], drafter: str, selector: str
) -> None:
    case = DRAFTERS.index(drafter) * len(SELECTORS) + SELECTORS.index(selector)
    for number in range(NUM_COMPOSITIONS):
        seed = NUM_COMPOSITIONS * case + number
        draw = random.Random(seed)
        prompts, params, settings = draw_composition(drafter, number, draw)
        plain = engine_over(tiny_path).generate(prompts, params, policy_version=1)
        engine = engine_over(tiny_path, **settings)
        chosen = make_selector(selector, seed, usable_strategies(drafter, number))
        draft_with(engine, drafters, drafter, chosen)
        for epoch in range(2 if drafter == "always_right" else 1):
            speculative = engine.generate(prompts, params, policy_version=1)
            assert len(content_of(speculative)) == NUM_REQUESTS
            told = f"composition {seed}, epoch {epoch}, {params}, {settings}"
            assert content_of(speculative) == content_of(plain), told


@pytest.mark.parametrize(
    ("temperature", "atol", "settings"),
    [(0.0, 1e-6, {}), (1.0, 0.0, {"dtype": "bfloat16", "batch_invariant": True})],
    ids=str,
)
def test_cut_and_continued_responses_are_those_of_one_go(
    tiny_path: Path, drafters: dict[str, Weights], temperature: float, atol: float, settings: dict
) -> None:
    prompts = draw_prompts(8, 70, random.Random(8))
    params = SamplingParams(
        num_samples=2,
        max_new_tokens=40,
        temperature=temperature,
        top_p=0.9,
        stop_token_ids=(5,),
        seed=9,
    )
    engine = engine_over(tiny_path, **settings)

    def generate(prompts: Sequence[Prompt], params: SamplingParams) -> list[RolloutGroup]:
        return engine.generate(prompts, params, policy_version=1)

    check_continued(generate, prompts, params, cut=1, atol=atol)
    selector = at_random([OFF, *STRATEGIES], seed=1)
    draft_with(engine, drafters, "trained", selector)
    check_continued(generate, prompts, params, cut=17, atol=atol)


def test_drafters_are_as_right_and_as_wrong_as_they_are_called(
    tiny_path: Path, drafters: dict[str, Weights]
) -> None:
    """Measured in tokens out per pass: 1 if nothing is accepted, 5 if all drafted tokens are."""
    engine = engine_over(tiny_path)
    prompts = draw_prompts(16, 20, random.Random(2))

    def measure(drafter: str, strategy: SpeculationStrategy, temperature: float = 1.0) -> float:
        draft_with(engine, drafters, drafter, FixedSelector(strategy))
        params = SamplingParams(num_samples=2, max_new_tokens=25, temperature=temperature, seed=4)
        engine.generate(prompts, params, policy_version=1)
        return statistics.fmean(accept_lengths(engine.generate(prompts, params, policy_version=1)))

    measured = {name: measure(name, CHAIN) for name in ("trained", "random", "always_wrong")}
    measured["by noise"] = measure("trained", CHAIN, HOT)
    measured["of an earlier epoch"] = measure("random", NGRAMS)
    assert measured["always_wrong"] < 1.12 < measured["random"] < measured["trained"], measured
    assert min(measured["by noise"], measured["of an earlier epoch"]) > 3.5, measured
    assert measure("always_wrong", TREE, 0.0) < 1.05


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_rounding_changes_few_tokens_and_no_logprob(
    tiny_path: Path, drafters: dict[str, Weights], dtype: str, most: float
) -> None:
    prompts = draw_prompts(24, 20, random.Random(3))
    params = SamplingParams(num_samples=4, max_new_tokens=32, seed=5)
    engine = engine_over(tiny_path, max_batch_size=64, dtype=dtype)
    plain = engine.generate(prompts, params, policy_version=1)
    draft_with(engine, drafters, "trained", at_random([OFF, *STRATEGIES], seed=6))
    speculative = engine.generate(prompts, params, policy_version=1)
    num_differing = num_compared = 0
    for mine, theirs in zip(speculative, plain, strict=True):
        for a, b in zip(mine.rollouts, theirs.rollouts, strict=True):
            is_same_T = a.token_ids == b.token_ids  # what follows a difference is another text
            num_same = int(is_same_T.long().cumprod(0).sum())
            num_differing += num_same < is_same_T.numel()
            num_compared += min(num_same + 1, is_same_T.numel())
            for name in ("logprobs", "policy_logprobs") if dtype == "float32" else ():
                ours, others = getattr(a, name)[:num_same], getattr(b, name)[:num_same]
                torch.testing.assert_close(ours, others, atol=1e-4, rtol=0)
    assert num_differing <= most * num_compared
