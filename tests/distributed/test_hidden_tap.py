"""Tapped hidden states equal a plain forward at every layout, and tapping changes nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import LENGTHS, Layout, build_policy, make_batch, share_of
from tests.ranks import run_ranks
from tlt_megatron.config.schema import RolloutSection
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.mcore.hidden_tap import HiddenStateTap, TappedSequence
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import HfReader, checksum_tensors
from tlt_megatron.policy.batching import pack_rollouts
from tlt_megatron.runtime.device import select_device
from tlt_megatron.types import MicroBatch, Prompt, Rollout, SamplingParams

AUX_LAYERS = (0, 1, 2)  # of four: with two stages on both of them
LAYOUTS = [
    Layout(world=1),
    Layout(world=2, tensor=2),
    Layout(world=2, pipeline=2),
    Layout(world=4, tensor=2, pipeline=2),
    Layout(world=2),
    Layout(world=2, context=2),
    Layout(world=4, context=2, tensor=2),
    Layout(world=4, context=2, pipeline=2),
]
NAMES = ("tp1", "tp2", "pp2", "tp2_pp2", "dp2", "cp2", "cp2_tp2", "cp2_pp2")


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[tuple[int, ...], tuple[int, list[Tensor]]]:
    """By tokens: the prompt's length, and transformers' states after each layer, the last one normed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path).float().eval()
    found = {}
    for batch in make_batch(1):
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            token_ids = batch.token_ids[start:end]
            with torch.no_grad():
                states = model(token_ids[None], output_hidden_states=True).hidden_states[1:]
            prompt_length = max(1, (end - start) // 3)  # see tests/mcore_policy.py
            found[tuple(token_ids.tolist())] = (prompt_length, [s[0, :-1] for s in states])
    return found


def _record(
    policy: McorePolicyModel, batches: list[MicroBatch], **settings: Any
) -> tuple[list[TappedSequence], list[Tensor]]:
    kept: list[TappedSequence] = []
    tap = HiddenStateTap(
        on_sequence=kept.append, **{"max_bytes": 1 << 20, "hidden_size": 64} | settings
    )
    logprobs = [value.logprobs for value in policy.infer_logprobs(batches, 1.0, tap=tap)]
    return kept, logprobs


def _num_hooks(policy: McorePolicyModel) -> int:
    return sum(len(module._forward_hooks) for module in policy._stage.modules())


def _tap_on_rank(path: Path, layout: Layout) -> dict[str, Any]:
    policy, groups = build_policy(path, layout)
    batches = share_of(make_batch(1), groups, (3, 2) if groups.dp.size == 2 else (len(LENGTHS),))
    num_hooks = _num_hooks(policy)
    plain = [value.logprobs for value in policy.infer_logprobs(batches, 1.0)]
    final, with_final = _record(policy, batches)
    aux, with_aux = _record(policy, batches, aux_layer_ids=AUX_LAYERS)
    assert not any(s.features.requires_grad for s in (*final, *aux))
    return {
        "final": final,
        "aux": aux,
        "is_neutral": all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(plain, with_final, with_aux, strict=True)
        ),
        "has_new_hooks": _num_hooks(policy) != num_hooks,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_states_at_any_layout_equal_a_plain_forward(
    model_path: Path, expected: dict[tuple[int, ...], Any], layout: Layout
) -> None:
    results = run_ranks(layout.world, _tap_on_rank, model_path, layout)
    learnable = {tokens for tokens in expected if len(tokens) >= 3}
    for kind in ("final", "aux"):
        tapped = [sequence for result in results for sequence in result[kind]]
        assert len(tapped) == len(learnable)
        assert {tuple(s.token_ids.tolist()) for s in tapped} == learnable
        for sequence in tapped:
            prompt_length, states = expected[tuple(sequence.token_ids.tolist())]
            assert sequence.prompt_length == prompt_length
            if kind == "final":
                assert sequence.final_hidden is None
                wanted = [(sequence.features, states[-1])]
            else:
                layers = torch.cat([states[layer] for layer in AUX_LAYERS], dim=1)
                wanted = [(sequence.features, layers), (sequence.final_hidden, states[-1])]
            for mine, theirs in wanted:
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for result in results:
        assert result["final"], "every rank has data of its own"
        assert result["is_neutral"]
        assert not result["has_new_hooks"]


def test_within_a_budget_the_longest_are_tapped_in_the_wanted_dtype(
    model_path: Path, expected: dict[tuple[int, ...], Any]
) -> None:
    budget = (16 + 12) * 64 * 2  # states of the sequences of 17 and of 13 tokens, in bfloat16

    def on_rank() -> list[TappedSequence]:
        policy, _ = build_policy(model_path, Layout(world=2, pipeline=2))
        return _record(policy, make_batch(1), max_bytes=budget, dtype=torch.bfloat16)[0]

    first, second = run_ranks(2, on_rank)
    assert [s.token_ids.numel() for s in (*first, *second)] == [17, 13]
    for sequence in (*first, *second):
        states = expected[tuple(sequence.token_ids.tolist())][1]
        assert sequence.features.dtype == torch.bfloat16
        torch.testing.assert_close(sequence.features.float(), states[-1], atol=1e-4, rtol=2**-7)
    assert len(first) == len(second) == 1


def test_bfloat16_policy_is_tapped_under_sequence_parallelism(
    model_path: Path, expected: dict[tuple[int, ...], Any]
) -> None:
    def on_rank() -> list[TappedSequence]:
        layout = Layout(world=2, tensor=2)
        policy, _ = build_policy(model_path, layout, dtype="bfloat16")
        return _record(policy, make_batch(1))[0]

    for sequence in itertools.chain(*run_ranks(2, on_rank)):
        final = expected[tuple(sequence.token_ids.tolist())][1][-1]
        assert sequence.features.dtype == torch.float32
        assert (sequence.features - final).norm() < 0.1 * final.norm()


def test_a_tap_that_cannot_be_is_refused(model_path: Path) -> None:
    def on_rank() -> None:
        policy, _ = build_policy(model_path, Layout(world=2, pipeline=2))
        with pytest.raises(ValueError, match=r"layers \[4\] are not in 0..3"):
            _record(policy, make_batch(1), aux_layer_ids=(0, 1, 4))
        assert _record(policy, [])[0] == []

    run_ranks(2, on_rank)


def test_states_equal_those_of_the_rollout_engine(model_path: Path) -> None:
    """The same features from the verify and decode passes as from the log-prob pass, position by position."""
    from_engine: list[tuple[Rollout, Tensor]] = []
    engine = EmbeddedEngine(
        load_model_config(model_path), RolloutSection(dtype="float32"), select_device("cpu")
    )
    tensors = list(HfReader(model_path).items())
    checksum = checksum_tensors(tensors)
    engine.load_weights(tensors, version=0, checksum=lambda: checksum)
    prompts = [
        Prompt(prompt_id=str(n), draw_index=n, token_ids=tuple(range(n, n + 5 + n)))
        for n in range(3)
    ]
    params = SamplingParams(num_samples=2, max_new_tokens=20, seed=4)
    engine.generate(
        prompts, params, policy_version=0, on_features=lambda *pair: from_engine.append(pair)
    )

    def on_rank() -> list[TappedSequence]:
        policy, _ = build_policy(model_path, Layout(world=1))
        return _record(policy, [pack_rollouts([rollout for rollout, _ in from_engine])])[0]

    tapped = {tuple(s.token_ids.tolist()): s for s in run_ranks(1, on_rank)[0]}
    assert len(tapped) == len(from_engine) == 6
    for rollout, features_TD in from_engine:
        sequence = tapped[(*rollout.prompt_ids, *rollout.token_ids.tolist())]
        assert sequence.prompt_length == len(rollout.prompt_ids)
        torch.testing.assert_close(sequence.features, features_TD, atol=1e-4, rtol=1e-4)
