"""The Megatron policy trains the same at every layout, and says the same log-probs as
transformers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore_policy import (
    LENGTHS,
    Layout,
    build_policy,
    check_trained,
    export,
    hf_logits,
    load_hf,
    make_batch,
    share_of,
    tiny_loss,
    train,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.types import LossResult, MicroBatch, TokenLogprobs

ALL = (len(LENGTHS),)
ONE_RANK = Layout(world=1)


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True)


def _train(
    path: Path, layout: Layout, shares: tuple[int, ...], mcore: dict[str, Any]
) -> dict[str, Any]:
    policy, groups = build_policy(path, layout, **mcore)
    return train(policy, groups, (1, 2, 3), shares)


@pytest.fixture(scope="module")
def one_rank(model_path: Path) -> dict[str, Any]:
    return run_ranks(1, _train, model_path, ONE_RANK, ALL, {})[0]


@pytest.mark.parametrize(
    ("layout", "shares", "mcore"),
    [
        (Layout(world=2, tensor=2), ALL, {}),
        (Layout(world=2, pipeline=2), ALL, {}),
        (Layout(world=4, tensor=2, pipeline=2), ALL, {}),
        (Layout(world=2, context=2), ALL, {}),
        (Layout(world=4, context=2, tensor=2), ALL, {}),
        (Layout(world=4, context=2, pipeline=2), ALL, {}),
        (Layout(world=4, context=2), (4, 1), {}),
        (Layout(world=2), (3, 2), {}),
        (Layout(world=4, tensor=2), (1, 4), {}),
        (Layout(world=2), (5, 0), {}),
        (Layout(world=4, pipeline=2), (0, 5), {}),
        (Layout(world=2, pipeline=2, virtual=2), ALL, {}),
        (Layout(world=4, pipeline=2, virtual=2), (0, 5), {"recompute": "full"}),
        (Layout(world=4, pipeline=2), (2, 3), {"recompute": "full"}),
        (
            Layout(world=2, pipeline=2),
            ALL,
            {
                "recompute": "selective",
                "transformer": {"recompute_modules": ["core_attn", "layernorm", "mlp"]},
            },
        ),
        (Layout(world=2, tensor=2), ALL, {"recompute": "selective"}),
        (Layout(world=2, context=2), ALL, {"recompute": "full"}),
        (Layout(world=2, context=2), ALL, {"recompute": "selective"}),
    ],
    ids=str,
)
def test_three_steps_at_any_layout_equal_one_rank(
    model_path: Path,
    one_rank: dict[str, Any],
    layout: Layout,
    shares: tuple[int, ...],
    mcore: dict[str, Any],
) -> None:
    results = run_ranks(layout.world, _train, model_path, layout, shares, mcore)
    check_trained(results, one_rank, 5e-6)


def test_three_steps_with_embeddings_shared_by_stages_equal_one_rank(tied_path: Path) -> None:
    (expected,) = run_ranks(1, _train, tied_path, ONE_RANK, ALL, {})
    for layout, shares in (
        (Layout(world=4, tensor=2, pipeline=2), ALL),
        (Layout(world=4, pipeline=2), (4, 1)),
        (Layout(world=4, pipeline=2), (5, 0)),
    ):
        check_trained(run_ranks(4, _train, tied_path, layout, shares, {}), expected)


@pytest.mark.parametrize("layout", [ONE_RANK, Layout(world=2, tensor=2)])
def test_rows_that_predict_no_response_token_cost_no_logits_and_change_no_gradient(
    model_path: Path, layout: Layout
) -> None:
    """A mask of ones lets the output layer compute every row; `loss_weights` stay as they were."""

    def run() -> tuple[list[int], list[float], dict[str, Any], dict[str, Any]]:
        policy, _ = build_policy(model_path, layout)
        num_rows: list[int] = []
        policy._stage[0].output_layer.register_forward_hook(
            lambda _, inputs, output: num_rows.append(output[0].size(0))
        )
        batch = make_batch(1)
        full = [dataclasses.replace(b, loss_mask=torch.ones(b.num_tokens)) for b in batch]
        gradients, losses = [], []
        for batches in (batch, full):
            losses.append(policy.forward_backward(batches, 0.8, tiny_loss)["loss"])
            gradients.append(
                {n: p.main_grad.clone() for n, p in policy._stage[0].named_parameters()}
            )
            policy._optimizer.zero_grad()
        return num_rows, losses, *gradients

    masks = [batch.loss_mask.int() for batch in make_batch(1)]
    for num_rows, losses, gradient, full_gradient in run_ranks(layout.world, run):
        needed, all_rows = num_rows[: len(masks)], num_rows[len(masks) :]
        chunks = layout.tensor
        for mask, rows, every_row in zip(masks, needed, all_rows, strict=True):
            padded = torch.nn.functional.pad(mask, (0, -len(mask) % chunks))
            assert rows == chunks * int(padded.view(chunks, -1).sum(1).max())
            assert every_row == len(padded)
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for name, expected in full_gradient.items():
            assert (gradient[name] - expected).norm() <= 1e-6 * expected.norm(), name


@pytest.mark.parametrize(
    "layout",
    [
        ONE_RANK,
        Layout(world=2, tensor=2),
        Layout(world=2, pipeline=2),
        Layout(world=4, tensor=2, pipeline=2),
        Layout(world=4, context=2, tensor=2),
    ],
)
def test_logprobs_on_every_rank_equal_transformers(model_path: Path, layout: Layout) -> None:
    def infer() -> list[list[TokenLogprobs]]:
        policy, _ = build_policy(model_path, layout)
        assert policy.infer_logprobs([], 1.0) == []
        return [policy.infer_logprobs(make_batch(1), temperature) for temperature in (0.7, 1.0)]

    results = run_ranks(layout.world, infer)
    expected = [
        [_hf_logprobs(model_path, micro_batch, temperature) for micro_batch in make_batch(1)]
        for temperature in (0.7, 1.0)
    ]
    for by_temperature in results:
        for mine, theirs in zip(by_temperature, expected, strict=True):
            assert len(mine) == len(theirs)
            for value, reference in zip(mine, theirs, strict=True):
                for name in ("logprobs", "entropy", "policy_logprobs"):
                    torch.testing.assert_close(
                        getattr(value, name), getattr(reference, name), atol=1e-4, rtol=0
                    )


def _hf_logprobs(path: Path, micro_batch: MicroBatch, temperature: float) -> TokenLogprobs:
    """What transformers gives where `loss_mask` is 1, and 0 elsewhere."""
    with torch.no_grad():
        logits_PV = hf_logits(load_hf(path), micro_batch)
    log_p_PV = torch.log_softmax(logits_PV / temperature, dim=-1)
    labels_P1, mask_P = micro_batch.labels[:, None], micro_batch.loss_mask
    policy_log_p_PV = torch.log_softmax(logits_PV, dim=-1)
    return TokenLogprobs(
        logprobs=log_p_PV.gather(1, labels_P1)[:, 0] * mask_P,
        entropy=-(log_p_PV.exp() * log_p_PV).sum(-1) * mask_P,
        policy_logprobs=policy_log_p_PV.gather(1, labels_P1)[:, 0] * mask_P,
    )


def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any(model_path: Path) -> None:
    layout = Layout(world=2)
    section = OptimizerSection(lr=1e-3, warmup_steps=4)

    def broken_loss(logprobs: TokenLogprobs, micro_batch: MicroBatch) -> LossResult:
        return LossResult(loss_sum=(logprobs.logprobs * float("inf")).sum(), count=1, metrics={})

    def run(has_broken_step: bool) -> tuple[dict[str, Any], list[Any], bool]:
        policy, groups = build_policy(model_path, layout, optimizer=section)
        skipped, is_equal = [], True
        train(policy, groups, (1,), (3, 2))
        if has_broken_step:
            before = export(policy)
            share = share_of(make_batch(9), groups, (3, 2))
            policy.forward_backward(share, 1.0, broken_loss if groups.dp.rank == 1 else tiny_loss)
            skipped.append(policy.optimizer_step())
            is_equal = all(torch.equal(before[n], w) for n, w in export(policy).items())
        return train(policy, groups, (2,), (3, 2)), skipped, is_equal

    expected, _, _ = run_ranks(2, run, False)[0]
    for result, skipped, is_equal in run_ranks(2, run, True):
        assert is_equal
        assert skipped[0].is_skipped
        assert result["stats"] == expected["stats"]  # the schedule did not move either
        for name, weight in expected["weights"].items():
            assert torch.equal(result["weights"][name], weight)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout(world=4, tensor=2), "float32"), (Layout(world=2, pipeline=2), "bfloat16")],
)
def test_the_reference_is_the_initial_policy_and_leaves_no_trace(
    tied_path: Path, layout: Layout, dtype: str
) -> None:
    def run() -> tuple[bool, bool, bool]:
        policy, groups = build_policy(tied_path, layout, dtype=dtype, keep_reference=True)
        shares = (3, 2) if groups.dp.size == 2 else ALL
        share = share_of(make_batch(5), groups, shares)
        initial = policy.infer_logprobs(share, 1.0)
        train(policy, groups, (1, 2), shares)
        before, trained = export(policy), policy.infer_logprobs(share, 1.0)
        reference = policy.infer_logprobs(share, 1.0, reference=True)
        again, after = policy.infer_logprobs(share, 1.0), export(policy)
        is_initial = all(map(_has_same_bits, initial, reference))
        is_changed = not any(map(_has_same_bits, trained, reference))
        is_back = all(map(_has_same_bits, trained, again))
        is_back = is_back and all(torch.equal(before[n], w) for n, w in after.items())
        return is_initial, is_changed, is_back

    assert run_ranks(layout.world, run) == [(True, True, True)] * layout.world


def _has_same_bits(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    return torch.equal(one.logprobs, other.logprobs) and torch.equal(one.entropy, other.entropy)
