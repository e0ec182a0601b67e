"""The same rollouts from both engines, for the tests of SGLang: engines over a folder, prompts,
drafters, comparisons.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from tlt_megatron.config.schema import (
    DrafterSection,
    RolloutSection,
    SglangSection,
    SpeculationSection,
)
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import load_drafter, save_drafter
from tlt_megatron.drafter.packing import draft_sequence, pack_sequences
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.engines.sglang.sglang_engine import SglangEngine
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader, checksum_tensors
from tlt_megatron.runtime.device import select_device
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.types import DraftSequence, Prompt, Rollout, RolloutGroup, SamplingParams

VERSION = 1
MAX_PROMPT_TOKENS = 16
STOP_TOKEN = 7
SAMPLED = SamplingParams(
    num_samples=3, max_new_tokens=40, temperature=1.0, stop_token_ids=(STOP_TOKEN,), seed=5
)
GREEDY = replace(SAMPLED, num_samples=1, temperature=0.0)
CUT = replace(SAMPLED, temperature=0.8, top_p=0.9, top_k=12, seed=8)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "cut": CUT}

Weights = Sequence[tuple[str, Tensor]]


def load(engine: SglangEngine | EmbeddedEngine, tensors: Weights, version: int = VERSION) -> None:
    """Replace the policy's weights."""
    engine.load_weights(tensors, version=version, checksum=lambda: checksum_tensors(tensors))


def load_draft(engine: SglangEngine, tensors: Weights, version: int = 1) -> None:
    """Replace the drafter's weights."""
    engine.load_drafter_weights(dict(tensors), version=version, checksum=checksum_tensors(tensors))


def tensors_of(folder: Path) -> list[tuple[str, Tensor]]:
    """Return all tensors of a model or drafter."""
    return list(HfReader(folder).items())


def make_prompts(count: int = 6, seed: int = 0) -> list[Prompt]:
    """Prompts of 3 to 8 tokens."""
    draws = random.Random(seed)
    return [
        Prompt(
            prompt_id=f"p{index}",
            draw_index=index,
            token_ids=tuple(draws.randrange(8, 48) for _ in range(3 + index % 6)),
        )
        for index in range(count)
    ]


def rollout_section(*, routing_replay: bool) -> RolloutSection:
    """Room for 8 responses at once, so that requests wait and batches change."""
    return RolloutSection(
        max_batch_size=8, max_new_tokens=40, num_samples=3, routing_replay=routing_replay
    )


def start_sglang(
    policy: Path,
    *,
    drafter: Path | None = None,
    strategies: Sequence[str] = (),
    selector: str = "fixed",
    routing_replay: bool = False,
    engine_args: Mapping[str, object] | None = None,
    request_timeout_s: float = 300.0,
    rank: int | None = None,
) -> SglangEngine:
    """An engine that holds the weights at `policy` as VERSION.

    Ports follow from `rank`. The default ones are not those of another test run that begins at the
    same moment, nor of ranks 0 and 1.
    """
    speculation = None
    if strategies:
        speculation = SpeculationSection(
            enabled=True,
            drafter=str(drafter or "none"),
            strategies=list(strategies),
            selector=selector,
        )
    engine = SglangEngine(
        str(policy),
        rollout_section(routing_replay=routing_replay),
        SglangSection(engine_args=dict(engine_args or {}), request_timeout_s=request_timeout_s),
        select_device("cpu"),
        rank=32 + os.getpid() % 32 if rank is None else rank,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        speculation=speculation,
    )
    load(engine, tensors_of(policy))
    return engine


def start_embedded(
    policy: Path,
    *,
    drafter: Path | None = None,
    strategy: str = "",
    tap_layers: Sequence[int] = (),
    ids: Sequence[int] = (),
    routing_replay: bool = False,
) -> EmbeddedEngine:
    """The embedded twin in float32, speculating if a drafter is given. `ids`: the only ones that it
    drafts.
    """
    engine = EmbeddedEngine(
        load_model_config(policy),
        rollout_section(routing_replay=routing_replay),
        select_device("cpu"),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        tap_layers=tuple(tap_layers),
    )
    load(engine, tensors_of(policy))
    if drafter is not None:
        embedding, head = engine.target_tensors()
        model = load_drafter(drafter, embedding_VD=embedding, lm_head_VD=head)
        parsed = SpeculationStrategy.parse(strategy)
        draft = DraftInference(model, num_ids=len(ids))
        speculation = Speculation(draft, FixedSelector(parsed), [parsed])
        counts = {"ids": list(ids), "counts": [10**6] * len(ids)}
        speculation.load_state_dict(speculation.state_dict() | {"token_counts": counts})
        engine.set_speculation(speculation)
    return engine


def save_random_drafter(policy: Path, folder: Path, architecture: str, seed: int = 0) -> Path:
    """A drafter of this policy that knows nothing."""
    embedding, head = start_embedded(policy).target_tensors()
    config = make_draft_config(load_model_config(policy), architecture, embedding)
    save_drafter(folder, DraftModel(config, embedding_VD=embedding, lm_head_VD=head, seed=seed))
    return folder


def train_drafter(policy: Path, folder: Path, *, num_steps: int = 120) -> Path:
    """An EAGLE drafter, trained for seconds on the policy's own responses."""
    engine = start_embedded(policy)
    embedding, head = engine.target_tensors()
    sequences: list[DraftSequence] = []

    def keep(rollout: Rollout, features_TF: Tensor) -> None:
        sequence = draft_sequence(rollout, features_TF, embedding.shape[1])
        if sequence.num_rows > 0:
            sequences.append(sequence)

    params = SamplingParams(num_samples=16, max_new_tokens=40, stop_token_ids=(STOP_TOKEN,))
    engine.generate(make_prompts(), params, policy_version=VERSION, on_features=keep)
    config = make_draft_config(load_model_config(policy), "eagle", embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=head)
    trainer = DrafterTrainer(model, DrafterSection(lr=3e-3, batch_tokens=1024))
    batches = pack_sequences(sequences, 1024)
    for step in range(num_steps):
        trainer.step(batches[step % len(batches)])
    save_drafter(folder, model)
    return folder


def answers(
    engine: SglangEngine | EmbeddedEngine,
    params: SamplingParams,
    version: int = VERSION,
    prompts: Sequence[Prompt] = (),
) -> list[Rollout]:
    """All responses, in order."""
    groups: list[RolloutGroup] = engine.generate(
        prompts or make_prompts(), params, policy_version=version
    )
    return [rollout for group in groups for rollout in group.rollouts]


def token_lists(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """For a comparison that pytest can print."""
    return [rollout.token_ids.tolist() for rollout in rollouts]


def check_same(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    """Tokens, log-probabilities and what top-p and top-k kept."""
    assert token_lists(found) == token_lists(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.finish_reason == theirs.finish_reason
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.policy_logprobs, theirs.policy_logprobs, rtol=0, atol=1e-4)
        assert (ours.kept is None) == (theirs.kept is None)
        if ours.kept is not None and theirs.kept is not None:
            assert torch.equal(ours.kept.token_ids, theirs.kept.token_ids)
            assert torch.equal(ours.kept.counts, theirs.kept.counts)


def mean_accept_length(rollouts: Sequence[Rollout]) -> float:
    """Tokens out per verify pass."""
    lengths = [length for rollout in rollouts for length in rollout.accept_lengths]
    return sum(lengths) / len(lengths)


def check_accept_lengths(
    engine: SglangEngine, policy: Path, drafter: Path, strategy: str, *, num_tokens: int
) -> None:
    """What passes commit, over at least `num_tokens` tokens greedy and as many at temperature 1:
    the mean is the embedded engine's within 5 %, and with a chain nearly every pass of every
    response is (rounding may swap two drafts)."""
    twin = start_embedded(policy, drafter=drafter, strategy=strategy)
    for params in (replace(GREEDY, seed=7), replace(SAMPLED, seed=7, num_samples=4)):
        prompts = make_prompts(48 // params.num_samples, seed=7)
        found = answers(engine, params, prompts=prompts)
        expected = answers(twin, params, prompts=prompts)
        assert token_lists(found) == token_lists(expected)
        assert sum(sum(rollout.accept_lengths) for rollout in found) >= num_tokens
        for rollout in found:
            assert 1 + sum(rollout.accept_lengths) == rollout.token_ids.numel()
        mean = mean_accept_length(found)
        assert mean == pytest.approx(mean_accept_length(expected), rel=0.05)
        assert mean > 1.2
        if not SpeculationStrategy.parse(strategy).is_chain:
            continue  # SGLang keeps the nodes of its trees by other estimates
        pairs = zip(found, expected, strict=True)
        num_same = sum(ours.accept_lengths == theirs.accept_lengths for ours, theirs in pairs)
        assert num_same >= 0.95 * len(found)


def engine_processes() -> list[psutil.Process]:
    """The processes of all engines that this process started; Python's resource tracker stays."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if is_of_engine(child)]


def is_of_engine(process: psutil.Process) -> bool:
    """Python's resource tracker and a process that has just ended are not."""
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False
