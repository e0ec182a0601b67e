"""A response with stop strings is the begin of the response without them, up to the token that
completes one, whatever drafts and wherever its KV is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.recorded_graphs import recording_device
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    TEXTS,
    VOCAB_SIZE,
    accept_lengths,
    at_random,
    engine_over,
    make_drafter,
    make_prompts,
    speculate,
    stop_at,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.types import FinishReason, Prompt, Rollout, SamplingParams

PARAMS = SamplingParams(
    num_samples=3, max_new_tokens=70, stop_token_ids=(5,), seed=6, temperature=1.3, top_k=20
)
STRINGS = ("€a", "bcabb", "abab")  # of the call; a prompt has none or its own
PROMPTS = make_prompts(4, 70, 9, 30)
GIVEN = [
    PROMPTS[0],
    PROMPTS[1],
    replace(PROMPTS[2], stop=stop_at()),
    replace(PROMPTS[3], stop=stop_at("bb")),
]
MIXED = [SpeculationStrategy.parse(text) for text in ("3_1_3", "4_4_16", "ngram_6")]
LITTLE = {"max_batch_size": 5, "kv_cache_tokens": 64 * 9}
CASES = {
    "plain": ("", {}),
    "chain": ("4_1_4", {}),
    "tree": ("4_4_16", {}),
    "ngram": ("ngram_6", {}),
    "eagle3": ("4_4_16", {"tap_layers": (0, 1, 2)}),
    "in turns": ("mixed", LITTLE),
    "plain, preempted": ("", {"max_batch_size": 5, "kv_cache_tokens": 64 * 4}),
    "batch invariant": ("4_1_4", {"dtype": "float32", "batch_invariant": True}),
    "graphs": ("4_4_16", {"has_graphs": True}),
    "graphs, plain": ("", {"has_graphs": True}),
    "graphs, growing lanes, preempted": (
        "4_1_4",
        {"has_graphs": True, "max_prompt_tokens": 75, **LITTLE},
    ),
    "routes": ("4_4_16", {"routing_replay": True}),
}


def make_engine(path: Path, strategy: str = "", **settings) -> EmbeddedEngine:
    if settings.pop("has_graphs", False):
        settings["device"] = recording_device()
    engine = engine_over(path, **({"max_new_tokens": 70} | settings))
    architecture = "eagle3" if "tap_layers" in settings else "eagle"
    if strategy == "mixed":
        speculate(engine, MIXED, selector=at_random([OFF, *MIXED], seed=3))
    elif strategy:
        speculate(engine, strategy, drafter=make_drafter(engine, architecture))
    return engine


def answer(engine: EmbeddedEngine, prompts: list[Prompt], params: SamplingParams) -> list[Rollout]:
    groups = engine.generate(prompts, params, policy_version=1)
    return [rollout for group in groups for rollout in group.rollouts]


def end_by_text(rollout: Rollout, strings: tuple[str, ...]) -> int | None:
    """The number of tokens up to the first with which their text holds one of the strings."""
    text = ""
    for count, token_id in enumerate(rollout.token_ids.tolist(), 1):
        text += TEXTS[token_id]
        if any(string in text for string in strings):
            return count
    return None


@pytest.mark.parametrize("case", CASES)
def test_stop_strings_cut_what_comes_without_them(
    tiny_path: Path, tmp_path: Path, case: str
) -> None:
    strategy, settings = CASES[case]
    path = tiny_path
    if case in ("routes", "eagle3"):
        kind = "qwen3_moe" if case == "routes" else "qwen3"
        path = make_tiny_hf(tmp_path, kind, num_layers=4, vocab_size=VOCAB_SIZE)
    reference = {k: v for k, v in settings.items() if k in ("dtype", "batch_invariant")}
    whole = answer(make_engine(path, **reference), PROMPTS, PARAMS)
    params = replace(PARAMS, stop=stop_at(*STRINGS))
    engine = make_engine(path, strategy, **settings)
    ended: list[Rollout] = []
    groups = engine.generate(GIVEN, params, policy_version=1, on_finish=ended.append)
    found = [rollout for group in groups for rollout in group.rollouts]
    assert len(ended) == len(found) == len(whole)
    num_stopped = num_inside = 0
    for ours, theirs in zip(found, whole, strict=True):
        strings = {2: (), 3: ("bb",)}.get(ours.draw_index, STRINGS)
        count = end_by_text(theirs, strings)
        assert ours.token_ids.tolist() == theirs.token_ids[:count].tolist()
        torch.testing.assert_close(ours.logprobs, theirs.logprobs[:count], rtol=0, atol=1e-6)
        assert ours.kept is not None
        assert theirs.kept is not None
        sizes = theirs.kept.counts[:count]
        assert ours.kept.counts.tolist() == sizes.tolist()
        assert torch.equal(ours.kept.token_ids, theirs.kept.token_ids[: int(sizes.sum())])
        assert all(start + n <= ours.num_tokens for start, n in ours.passes)
        assert ours.finish_reason is (FinishReason.STOP if count else theirs.finish_reason)
        if case == "routes":
            assert ours.routes is not None
            assert len(ours.routes) == ours.num_tokens - 1
        text = "".join(TEXTS[token] for token in ours.token_ids.tolist())
        num_stopped += count is not None
        num_inside += count is not None and not text.endswith(strings)
    assert num_stopped > 4
    assert num_inside > 0
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(each.token_ids.numel() for each in found)
    assert ("preempted" in case) == (stats.num_preemptions > 0)
    assert bool(stats.num_graph_replays) == ("graphs" in case)
    if strategy:
        assert max(accept_lengths(groups)) > 1
