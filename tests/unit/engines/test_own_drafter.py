"""With the checkpoint's own layer as the drafter, tokens are those of plain decoding, trained or
not, in chains and trees.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import (
    VOCAB_SIZE,
    accept_lengths,
    by_turns,
    engine_over,
    make_prompts,
    speculate,
    tokens_of,
)
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import draft_sequence, pack_sequences
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.own_drafter import load_own_drafter
from tlt_megatron.types import DraftSequence, SamplingParams

STRATEGIES = [SpeculationStrategy.parse(text) for text in ("4_1_4", "3_2_6", "4_4_16")]
PARAMS = SamplingParams(num_samples=4, max_new_tokens=40, stop_token_ids=(5,), seed=5)
SIZES = {"max_batch_size": 16, "max_new_tokens": 64}


@pytest.mark.parametrize("kind", ["mimo", "glm4_moe"])
def test_tokens_are_those_of_plain_decoding_and_training_raises_the_accept_length(
    kind: str, tmp_path: Path
) -> None:
    path = make_tiny_hf(tmp_path / "m", kind, num_layers=2, vocab_size=VOCAB_SIZE, has_mtp=True)
    engine, policy = engine_over(path, **SIZES), load_model_config(path)
    prompts = make_prompts(*range(3, 23, 5))
    sequences: list[DraftSequence] = []

    def keep(rollout, features_TF) -> None:
        sequences.append(draft_sequence(rollout, features_TF.float(), policy.hidden_size))

    plain = engine.generate(prompts, PARAMS, policy_version=1, on_features=keep)
    cold = dataclasses.replace(PARAMS, temperature=0.0)
    greedy = engine.generate(prompts, cold, policy_version=1)
    embedding, head = engine.target_tensors()
    model = load_own_drafter(path, policy, embedding_VD=embedding, lm_head_VD=head)
    trainer = DrafterTrainer(model, DrafterSection(algorithm="hass", lr=5e-3))
    means = []
    for num_steps in (0, 40):
        for _ in range(num_steps):
            for batch in pack_sequences(sequences, 1024):
                trainer.step(batch)
        speculate(engine, STRATEGIES, drafter=model)
        chains = engine.generate(prompts, PARAMS, policy_version=1)
        assert tokens_of(chains) == tokens_of(plain)
        means.append(sum(accept_lengths(chains)) / len(accept_lengths(chains)))
        speculate(engine, STRATEGIES, drafter=model, selector=by_turns([*STRATEGIES, OFF]))
        assert tokens_of(engine.generate(prompts, PARAMS, policy_version=1)) == tokens_of(plain)
        assert tokens_of(engine.generate(prompts, cold, policy_version=1)) == tokens_of(greedy)
    assert means[1] > means[0] + 0.1, means
