"""Responses are drafted again without the policy: passes start where the engine started them, for
any strategy and drafter.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    VOCAB_SIZE,
    engine_over,
    make_drafter,
    make_prompts,
    speculate,
)
from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.acceptance import Replay
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import draft_sequence, pack_batch
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.types import DraftSequence, Prompt, Rollout, SamplingParams

STRATEGIES = [
    SpeculationStrategy.parse(s) for s in ("4_1_4", "8_1_8", "14_1_14", "4_2_8", "6_4_16")
]
PARAMS = SamplingParams(
    num_samples=2, max_new_tokens=40, temperature=0.8, stop_token_ids=(5,), seed=5
)
Recorded = list[tuple[Rollout, DraftSequence]]


def record(
    engine: EmbeddedEngine,
    params: SamplingParams,
    first_position: int = 0,
    prompts: Sequence[Prompt] = make_prompts(1, 2, 3, 9, 40),
) -> Recorded:
    """Responses of two tokens or more with their states."""
    found: Recorded = []
    hidden_size = engine.target_tensors()[0].shape[1]

    def keep(rollout: Rollout, features_TF: Tensor) -> None:
        if len(rollout.token_ids) > 1 and rollout.num_tokens > 2:
            sequence = draft_sequence(rollout, features_TF.clone(), hidden_size, first_position)
            found.append((rollout, sequence))

    if first_position:
        prompts = [dataclasses.replace(each, first_position=first_position) for each in prompts]
    engine.generate(prompts, params, policy_version=1, on_features=keep)
    return sorted(found, key=lambda each: (each[0].draw_index, each[0].sample_index))


def train(model: DraftModel, recorded: Recorded, num_steps: int) -> DraftModel:
    algorithm = "eagle3" if model.config.is_eagle3 else "hass"
    trainer = DrafterTrainer(model, DrafterSection(algorithm=algorithm, lr=5e-3))
    batch = pack_batch([sequence for _, sequence in recorded])
    for _ in range(num_steps):
        trainer.step(batch)
    return model


@torch.no_grad()
def replayed(
    recorded: Recorded,
    model: DraftModel,
    params: SamplingParams,
    ids_V: Tensor | None = None,
) -> list[list[tuple[int, ...]]]:
    """The accept lengths of each response, by strategy."""
    sequences = [sequence for _, sequence in recorded]
    lengths = [sequence.num_rows for sequence in sequences]
    replay = Replay(sequences, params, ids_V=ids_V)
    committed = replay.is_committed_P.split(lengths)
    found = []
    for is_start_P in replay.starts(model, STRATEGIES):
        of_strategy = []
        for is_start, is_committed in zip(is_start_P.split(lengths), committed, strict=True):
            number_T = is_start.cumsum(0)[is_committed].tolist()  # the pass of each token
            of_strategy.append(tuple(Counter(number_T).values()))
        found.append(of_strategy)
    return found


@pytest.fixture(scope="module")
def deeper_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with enough layers for EAGLE-3."""
    path = tmp_path_factory.mktemp("deeper")
    return make_tiny_hf(path, "qwen3", num_layers=4, vocab_size=VOCAB_SIZE)


KINDS: dict[str, dict[str, Any]] = {
    "young": {"num_updates": 0},
    "trained": {},
    "greedy": {"temperature": 0.0},
    "cut": {"top_p": 0.9, "top_k": 20, "temperature": 1.0},
    "eagle3": {"architecture": "eagle3"},
    "few ids": {"num_ids": 30},
    "continued": {"first_position": 7},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_starts_where_the_engine_started_it(
    tiny_path: Path, deeper_path: Path, kind: str
) -> None:
    """So the accept length on the hold-out is the live one, with chains and trees."""
    given = {"num_updates": 40, "num_ids": 0, "architecture": "eagle", "first_position": 0}
    given |= KINDS[kind]
    num_updates, num_ids, architecture, first_position = (given.pop(name) for name in [*given][:4])
    params = dataclasses.replace(PARAMS, **given)
    taps = default_aux_layer_ids(4) if architecture == "eagle3" else ()
    path = deeper_path if architecture == "eagle3" else tiny_path
    engine = engine_over(path, max_batch_size=16, max_new_tokens=64, tap_layers=taps)
    model = make_drafter(engine, architecture)
    model = train(model, record(engine, params, first_position), num_updates)
    recorded, live = [], []
    for strategy in STRATEGIES:
        speculate(engine, [strategy], drafter=model, num_ids=num_ids)
        recorded = record(engine, params, first_position)
        live.append([rollout.accept_lengths for rollout, _ in recorded])
    assert replayed(recorded, model, params, engine.drafted_ids()) == live
    if num_updates:
        assert max(n for lengths in live[2] for n in lengths) > 5  # the chains differ


def test_an_observation_starts_the_passes_anew(tiny_path: Path) -> None:
    engine = engine_over(tiny_path, max_batch_size=16, max_new_tokens=64)
    params = dataclasses.replace(PARAMS, num_samples=1)
    model = train(make_drafter(engine), record(engine, params), 40)
    live = []
    for strategy in STRATEGIES:
        speculate(engine, [strategy], drafter=model)
        (prompt,) = make_prompts(4)
        turns, observation = [], (7, 8, 9)
        for _ in range(2):
            turns += record(engine, params, prompts=[prompt])
            tokens = turns[-1][0].token_ids
            prompt = dataclasses.replace(
                prompt,
                token_ids=(*prompt.token_ids, *tokens.tolist(), *observation),
                first_position=len(tokens) + len(observation),
            )
        (first, _), (second, whole) = turns
        live.append([first.accept_lengths + second.accept_lengths])
    loss_mask = torch.ones(whole.token_ids.numel(), dtype=torch.bool)
    loss_mask[4 + len(first.token_ids) :][: len(observation)] = False
    whole = dataclasses.replace(whole, loss_start=4, loss_mask=loss_mask, request=(0, 0, 0))
    assert replayed([(second, whole)], model, params) == live
