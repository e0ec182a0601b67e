"""The Megatron policy trains at every layout as on one rank, and its tap gives the same states."""

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
    check_same_bits,
    check_trained,
    export,
    make_batch,
    share_of,
    tap_states,
    tiny_loss,
    train,
)
from tests.ranks import run_ranks
from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.types import LossResult, MicroBatch, TokenLogprobs

ALL = (len(LENGTHS),)
ONE_RANK = Layout(world=1)
EP2 = Layout(world=2, expert=2)
AUX_LAYERS = (0, 1, 2)  # out of four: with two stages on both of them
# Relative, of losses, gradient norms and weights after three steps.
TOLERANCE = {"dense": 5e-6, "tied": 1e-5, "mixture": 5e-6, "glm": 5e-6}


@pytest.fixture(scope="module")
def paths(model_path: Path, tied_path: Path, mixture: Path, glm: Path) -> dict[str, Path]:
    return {"dense": model_path, "tied": tied_path, "mixture": mixture, "glm": glm}


def _pass_and_train(
    path: Path, layout: Layout, shares: tuple[int, ...], mcore: dict[str, Any]
) -> dict[str, Any]:
    """Log-probs and tapped states of this rank's share, then three steps."""
    policy, groups = build_policy(path, layout, **mcore)
    share = share_of(make_batch(1), groups, shares)
    logprobs = [each.logprobs for each in policy.infer_logprobs(share, 1.0)]
    tapped = {}
    for layers in ((), AUX_LAYERS):
        sequences, tapped_logprobs = tap_states(policy, share, layers)
        assert all(map(torch.equal, logprobs, tapped_logprobs)), "the tap changes a pass"
        tapped |= {(layers, *sequence.token_ids.tolist()): sequence for sequence in sequences}
    experts = {name for name, _ in policy._stage[0].named_parameters() if "local_experts" in name}
    first = sum(shares[: groups.dp.rank])
    return train(policy, groups, (1, 2, 3), shares) | {
        "logprobs": {first + i: each for i, each in enumerate(logprobs)},
        "tapped": tapped,
        "num_expert_weights": len(experts),
    }


@pytest.fixture(scope="module")
def one_rank(paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {
        name: run_ranks(1, _pass_and_train, path, ONE_RANK, ALL, {})[0]
        for name, path in paths.items()
    }


@pytest.mark.parametrize(
    ("model", "layout", "shares", "mcore"),
    [
        ("dense", Layout(world=4, tensor=2, pipeline=2), ALL, {}),
        ("dense", Layout(world=4, context=2, tensor=2), ALL, {}),
        ("dense", Layout(world=4, context=2, pipeline=2), ALL, {}),
        ("dense", Layout(world=4, context=2), (4, 1), {}),
        ("dense", Layout(world=4, tensor=2), (1, 4), {}),
        ("dense", Layout(world=2), (5, 0), {}),
        ("dense", Layout(world=2, pipeline=2, virtual=2), ALL, {}),
        ("dense", Layout(world=4, pipeline=2, virtual=2), (0, 5), {"recompute": "full"}),
        (
            "dense",
            Layout(world=2, pipeline=2),
            ALL,
            {
                "recompute": "selective",
                "transformer": {"recompute_modules": ["core_attn", "layernorm", "mlp"]},
            },
        ),
        ("dense", Layout(world=2, tensor=2), ALL, {"recompute": "selective"}),
        ("dense", Layout(world=2, context=2), ALL, {"recompute": "full"}),
        ("tied", Layout(world=4, tensor=2, pipeline=2), ALL, {}),
        ("tied", Layout(world=4, pipeline=2), (5, 0), {}),
        ("mixture", EP2, (5, 0), {}),
        ("mixture", EP2, (3, 2), {"recompute": "full"}),
        ("mixture", Layout(world=4, tensor=2, expert=2), (1, 4), {}),
        ("mixture", Layout(world=4, tensor=2, expert=4), (1, 4), {}),
        ("mixture", Layout(world=4, pipeline=2, expert=2), (4, 1), {}),
        ("mixture", Layout(world=4, context=2, expert=4), (1, 4), {}),
        ("mixture", Layout(world=4, context=2, tensor=2, expert=2), ALL, {}),
        ("glm", EP2, (4, 1), {}),
        ("glm", Layout(world=4, tensor=2, expert=4), (3, 2), {}),
    ],
    ids=str,
)
def test_passes_and_three_steps_at_any_layout_equal_one_rank(
    paths: dict[str, Path],
    one_rank: dict[str, dict[str, Any]],
    model: str,
    layout: Layout,
    shares: tuple[int, ...],
    mcore: dict[str, Any],
) -> None:
    """Also if a rank has fewer micro-batches than those with which it shares experts, or none."""
    expected = one_rank[model]
    results = run_ranks(layout.world, _pass_and_train, paths[model], layout, shares, mcore)
    # A key's bias on channels that do not turn changes no softmax: its gradient is rounding, which
    # Adam makes a step of.
    learned = {n: w for n, w in expected["weights"].items() if not n.endswith("k_proj.bias")}
    check_trained(results, expected | {"weights": learned}, TOLERANCE[model])
    assert sum(len(result["tapped"]) for result in results) == len(expected["tapped"])
    for result in results:
        assert result["tapped"] or shares[result["dp_rank"]] < 2, "a rank is given nothing"
        if layout.pipeline == 1:
            num_shared = result["num_expert_weights"] * layout.expert
            assert num_shared == expected["num_expert_weights"]
        for index, logprobs in result["logprobs"].items():
            torch.testing.assert_close(logprobs, expected["logprobs"][index], atol=1e-5, rtol=0)
        for key, mine in result["tapped"].items():
            theirs = expected["tapped"][key]
            assert mine.loss_start == theirs.loss_start
            for field in ("features", "final_hidden"):
                torch.testing.assert_close(
                    getattr(mine, field), getattr(theirs, field), atol=1e-5, rtol=1e-5
                )


def test_training_changes_all_weights_but_the_bias_of_a_router(
    paths: dict[str, Path], one_rank: dict[str, dict[str, Any]]
) -> None:
    source = dict(HfReader(paths["glm"]).items())
    assert one_rank["glm"]["weights"].keys() == source.keys()
    for name, weight in one_rank["glm"]["weights"].items():
        assert torch.equal(weight, source[name]) == name.endswith("correction_bias"), name


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
        check_same_bits(result["weights"], expected["weights"])


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
