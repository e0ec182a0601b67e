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
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.types import DraftSequence, MicroBatch

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
    Layout(world=2, pipeline=2, virtual=2),
]
NAMES = ("tp1", "tp2", "pp2", "tp2_pp2", "dp2", "cp2", "cp2_tp2", "cp2_pp2", "pp2_virtual2")


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[tuple[int, ...], tuple[int, list[Tensor]]]:
    """By tokens: the prompt's length, and transformers' states after each layer, the last one
    normed.
    """
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
) -> tuple[list[DraftSequence], list[Tensor]]:
    kept: list[DraftSequence] = []
    tap = HiddenStateTap(
        on_sequence=kept.append, **{"max_bytes": 1 << 20, "hidden_size": 64} | settings
    )
    logprobs = [value.logprobs for value in policy.infer_logprobs(batches, 1.0, tap=tap)]
    return kept, logprobs


def _num_hooks(policy: McorePolicyModel) -> int:
    modules = (module for chunk in policy._stage for module in chunk.modules())
    return sum(len(module._forward_hooks) for module in modules)


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
            assert sequence.loss_start == prompt_length
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


def test_bfloat16_policy_is_tapped_under_sequence_parallelism(
    model_path: Path, expected: dict[tuple[int, ...], Any]
) -> None:
    def on_rank() -> list[DraftSequence]:
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
