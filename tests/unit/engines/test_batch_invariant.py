"""With `rollout.batch_invariant` a rollout is the same bit for bit, whatever shares its passes and
whatever drafts it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    accept_lengths,
    at_random,
    engine_over,
    speculate,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.base import EngineStats
from tlt_megatron.models import arithmetic
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tlt_megatron.types import Prompt, SamplingParams

VOCAB_SIZE, NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 48, 16, 4, 24
# with two query heads for a kv head; with sizes that no vector length divides
MODELS = ("qwen3", "llama", "glm4_moe")
DTYPES = ("float32", "bfloat16")
STRATEGIES = [
    SpeculationStrategy.parse(text) for text in ("5_1_5", "3_2_6", "4_4_16", "2_8_20", "ngram_6")
]
Key = tuple[str, int]  # prompt, sample
Written = tuple[Tensor, ...]  # everything of a response that could differ; features last


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {}
    if request.param == "llama":
        options = {"hidden_size": 72, "intermediate_size": 100, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_hf(folder, request.param, num_layers=2, vocab_size=VOCAB_SIZE, **options)


def all_prompts() -> list[Prompt]:
    """Prompts that are shorter than a page, longer, and exactly as long as pages."""
    draw = random.Random(1)
    lengths = [1, 40, 45, 60, 63, 64, 65, 128, *(draw.randint(2, 150) for _ in range(8))]
    return [
        Prompt(
            prompt_id=str(i),
            draw_index=i,
            token_ids=tuple(draw.randrange(VOCAB_SIZE) for _ in range(length)),
        )
        for i, length in enumerate(lengths)
    ]


def write(
    path: Path,
    dtype: str,
    prompts: Sequence[Prompt],
    *,
    selector: StrategySelector | None = None,
    num_samples: int = NUM_SAMPLES,
    top_p: float = 1.0,
    num_tokens: int = NUM_TOKENS,
    batch_invariant: bool = True,
    **settings: int,
) -> tuple[dict[Key, Written], EngineStats]:
    engine = engine_over(path, dtype=dtype, batch_invariant=batch_invariant, **settings)
    if selector is not None:
        speculate(engine, STRATEGIES, selector=selector)
    features: dict[Key, Tensor] = {}
    params = SamplingParams(num_samples=num_samples, max_new_tokens=num_tokens, seed=3, top_p=top_p)
    groups = engine.generate(
        prompts,
        params,
        policy_version=1,
        on_features=lambda r, f: features.setdefault((r.prompt_id, r.sample_index), f.clone()),
    )
    written = {
        (key := (r.prompt_id, r.sample_index)): (
            *(r.token_ids, r.logprobs, r.policy_logprobs),
            features[key],
        )
        for group in groups
        for r in group.rollouts
    }
    if selector is not None:
        assert max(accept_lengths(groups)) > 1, "nothing that was drafted was accepted"
    return written, engine.stats()


def differing(written: dict[Key, Written], expected: dict[Key, Written]) -> list[Key]:
    return [
        key
        for key, response in written.items()
        if not all(map(torch.equal, response, expected[key]))
    ]


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, dict[Key, Written]]:
    """By dtype: 64 requests in one batch."""
    return {dtype: write(path, dtype, all_prompts(), max_batch_size=64)[0] for dtype in DTYPES}


@pytest.mark.parametrize(
    ("batch_size", "dtype"),
    [(1, "bfloat16"), (2, "float32"), (5, "bfloat16"), (13, "float32"), (33, "bfloat16")],
)
def test_batches_of_any_size_and_composition_give_the_same_bits(
    path: Path, expected: dict[str, dict[Key, Written]], batch_size: int, dtype: str
) -> None:
    draw = random.Random(batch_size)
    prompts = draw.sample(all_prompts(), {1: 2, 2: 3, 5: 4, 13: 8, 33: NUM_PROMPTS}[batch_size])
    written, _ = write(
        path,
        dtype,
        prompts,
        num_samples=draw.randint(1, NUM_SAMPLES),
        max_batch_size=batch_size,
        prefill_chunk_tokens=draw.choice((17, 64, 2048)),
    )
    assert differing(written, expected[dtype]) == []


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [*((None, dtype) for dtype in DTYPES), *zip(STRATEGIES, itertools.cycle(DTYPES), strict=False)],
    ids=str,
)
def test_speculation_gives_the_bits_of_plain_decoding(
    path: Path,
    expected: dict[str, dict[Key, Written]],
    strategy: SpeculationStrategy | None,
    dtype: str,
) -> None:
    """`None` chooses another strategy at every step; plain decoding is among them."""
    selector = (
        at_random([OFF, *STRATEGIES], seed=0) if strategy is None else FixedSelector(strategy)
    )
    prompts = all_prompts()[:: 1 if strategy is None else 2]
    written, stats = write(path, dtype, prompts, selector=selector, max_batch_size=7)
    assert stats.num_unspeculated_passes == 0
    assert differing(written, expected[dtype]) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_response_computed_again_after_preemption_has_the_same_bits(
    path: Path, dtype: str
) -> None:
    """Responses of 70 tokens take a second page."""
    prompts, settings = all_prompts()[:6], {"num_samples": 2, "num_tokens": 70, "top_p": 0.8}
    expected, _ = write(path, dtype, prompts, **settings)
    written, stats = write(path, dtype, prompts, kv_cache_tokens=9 * 64, **settings)
    assert stats.num_preemptions > 0
    assert differing(written, expected) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_arithmetic_of_torch_bits_differ(
    path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were equal, the tests above would show nothing."""
    monkeypatch.setattr(arithmetic, "has_loops", lambda _: False)
    off = {"batch_invariant": False}
    together, _ = write(path, dtype, all_prompts(), max_batch_size=64, **off)
    apart, _ = write(path, dtype, all_prompts()[:8], max_batch_size=1, **off)
    assert differing(apart, together)
    trees = FixedSelector(STRATEGIES[2])
    speculative, _ = write(path, dtype, all_prompts()[:8], selector=trees, max_batch_size=7, **off)
    assert differing(speculative, together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mode_changes_results_by_rounding_alone(
    path: Path, expected: dict[str, dict[Key, Written]], dtype: str
) -> None:
    plain, _ = write(path, dtype, all_prompts()[:4], batch_invariant=False)
    tolerance = {"float32": 1e-3, "bfloat16": 0.3}[dtype]
    for key, response in plain.items():
        num_prompt = len(all_prompts()[int(key[0])].token_ids)
        ours, theirs = (written[-1][:num_prompt] for written in (expected[dtype][key], response))
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
