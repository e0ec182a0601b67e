"""A mixture of experts over expert-parallel ranks: trains, taps and is saved as on one rank.

Its logits and weights are compared in test_mcore_parity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore_policy import (
    LENGTHS,
    Layout,
    build_policy,
    check_trained,
    check_weights,
    export,
    make_batch,
    make_micro_batch,
    share_of,
    tiny_loss,
    train,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.mcore.hidden_tap import HiddenStateTap
from tlt_megatron.models.hf_io import HfReader
from tlt_megatron.types import DraftSequence

ALL = (len(LENGTHS),)
TOLERANCE = 5e-6  # relative, of losses, gradient norms and weights after three steps
EP2 = Layout(world=2, expert=2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe whose first layer is dense."""
    path = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return make_tiny_hf(path, "qwen3_moe", mlp_only_layers=[0])


def _pass_and_train(path: Path, layout: Layout, shares: tuple[int, ...]) -> dict[str, Any]:
    """Log-probs and tapped states of this rank's share, then three steps."""
    policy, groups = build_policy(path, layout)
    tapped: list[DraftSequence] = []
    tap = HiddenStateTap(
        on_sequence=tapped.append, max_bytes=1 << 20, hidden_size=64, aux_layer_ids=(1,)
    )
    share = share_of(make_batch(1), groups, shares)
    logprobs = [each.logprobs for each in policy.infer_logprobs(share, 1.0, tap=tap)]
    experts = {n for n, _ in policy._stage[0].named_parameters() if "local_experts" in n}
    result = train(policy, groups, (1, 2, 3), shares)
    first = sum(shares[: groups.dp.rank])
    return result | {
        "logprobs": {first + i: each for i, each in enumerate(logprobs)},
        "tapped": {tuple(s.token_ids.tolist()): s for s in tapped},
        "num_experts": len({name.rpartition(".linear")[0] for name in experts}),
    }


@pytest.fixture(scope="module")
def one_rank(mixture: Path) -> dict[str, Any]:
    return run_ranks(1, _pass_and_train, mixture, Layout(world=1), ALL)[0]


@pytest.mark.parametrize(
    ("layout", "shares", "num_experts"),
    [
        (EP2, (3, 2), 12),  # 8 experts in each of 3 layers, halved
        (EP2, (5, 0), 12),
        (Layout(world=2, tensor=2, expert=2), ALL, 12),
        (Layout(world=4, tensor=2, expert=2), (1, 4), 12),
        (Layout(world=4, tensor=2, expert=4), (1, 4), 6),
        (Layout(world=4, pipeline=2, expert=2), (4, 1), None),
        (Layout(world=2, context=2, expert=2), ALL, 12),
        (Layout(world=4, context=2, expert=4), (1, 4), 6),
        (Layout(world=4, context=2, tensor=2, expert=2), ALL, 12),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_passes_and_three_steps_equal_one_rank(
    mixture: Path,
    one_rank: dict[str, Any],
    layout: Layout,
    shares: tuple[int, ...],
    num_experts: int | None,
) -> None:
    """Also if a rank has fewer micro-batches than those with which it shares experts, or none."""
    results = run_ranks(layout.world, _pass_and_train, mixture, layout, shares)
    check_trained(results, one_rank, TOLERANCE)
    tapped = {tokens: s for result in results for tokens, s in result["tapped"].items()}
    assert tapped.keys() == one_rank["tapped"].keys()
    for tokens, mine in tapped.items():
        theirs = one_rank["tapped"][tokens]
        torch.testing.assert_close(mine.features, theirs.features, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.final_hidden, theirs.final_hidden, atol=1e-5, rtol=1e-5)
    for result in results:
        assert num_experts in (None, result["num_experts"])
        for index, logprobs in result["logprobs"].items():
            expected = one_rank["logprobs"][index]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert result["weights"].keys() == one_rank["weights"].keys()


def test_recomputation_routes_as_the_first_pass_did(
    mixture: Path, one_rank: dict[str, Any]
) -> None:
    def on_rank() -> dict[str, Any]:
        policy, groups = build_policy(mixture, EP2, recompute="full")
        return train(policy, groups, (1, 2, 3), (3, 2))

    check_trained(run_ranks(2, on_rank), one_rank, TOLERANCE)


def _grad_norm(path: Path, layout: Layout, coefficient: float) -> float:
    """Of four micro-batches whose sequences are of multiples of four tokens, which no layout
    pads.
    """
    policy, groups = build_policy(path, layout, transformer={"moe_aux_loss_coeff": coefficient})
    batches = [make_micro_batch((n, 12), seed=n) for n in (20, 12, 32, 8)]
    share = batches[groups.dp.rank :: groups.dp.size]
    policy.forward_backward(share, 1.0, tiny_loss)
    return policy.optimizer_step().grad_norm


def test_the_load_balancing_loss_is_that_of_one_rank_at_every_layout(mixture: Path) -> None:
    off, expected = (run_ranks(1, _grad_norm, mixture, Layout(world=1), c)[0] for c in (0.0, 0.5))
    assert abs(expected - off) > 0.1 * off
    for layout in (
        EP2,
        Layout(world=2, tensor=2, expert=2),
        Layout(world=4, tensor=2, expert=4),
        Layout(world=2, context=2, expert=2),
    ):
        for found in run_ranks(layout.world, _grad_norm, mixture, layout, 0.5):
            assert found == pytest.approx(expected, rel=TOLERANCE)


def _save(path: Path, folder: Path) -> dict[str, Any]:
    policy, groups = build_policy(path, EP2)
    train(policy, groups, (1, 2), (3, 2))
    policy.save(folder)
    return train(policy, groups, (3, 4), (3, 2))


def _load(path: Path, folder: Path, layout: Layout, shares: tuple[int, ...]) -> dict[str, Any]:
    policy, groups = build_policy(path, layout)
    policy.load(folder)
    return train(policy, groups, (3, 4), shares)


def test_a_checkpoint_continues_bit_for_bit_and_at_other_layouts(
    tmp_path: Path, mixture: Path
) -> None:
    straight = run_ranks(2, _save, mixture, tmp_path)
    expected = straight[0]["weights"]
    for result in run_ranks(2, _load, mixture, tmp_path, EP2, (3, 2)):
        for name, weight in expected.items():
            assert torch.equal(result["weights"][name], weight), name
    for layout in (Layout(world=1), Layout(world=4, pipeline=2, expert=2)):
        shares = ALL if layout.world == 1 else (3, 2)
        for result in run_ranks(layout.world, _load, mixture, tmp_path, layout, shares):
            check_weights(result["weights"], expected)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router of sigmoids with a bias, a shared expert, a dense first layer."""
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "glm4_moe", "glm4_moe")


def test_glm_trains_as_on_one_rank_and_keeps_its_bias(glm: Path) -> None:
    (expected,) = run_ranks(1, _pass_and_train, glm, Layout(world=1), ALL)
    source = dict(HfReader(glm).items())
    assert expected["weights"].keys() == source.keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, source[name]) == name.endswith("correction_bias"), name
    # A key's bias on channels that do not turn changes no softmax: its gradient is rounding, which
    # Adam makes a step of.
    learned = {n: w for n, w in expected["weights"].items() if not n.endswith("k_proj.bias")}
    for layout, shares in ((EP2, (4, 1)), (Layout(world=4, tensor=2, expert=4), (3, 2))):
        results = run_ranks(layout.world, _pass_and_train, glm, layout, shares)
        check_trained(results, expected | {"weights": learned}, TOLERANCE)


def test_in_bfloat16_the_bias_of_the_router_is_exported_as_it_was_read(
    glm: Path, tmp_path: Path
) -> None:
    def on_rank() -> dict[str, torch.Tensor]:
        policy, groups = build_policy(glm, EP2, dtype="bfloat16")
        train(policy, groups, (1,), (3, 2))
        policy.save(tmp_path / "checkpoint")
        policy.load(tmp_path / "checkpoint")
        return export(policy)

    source = dict(HfReader(glm).items())
    for exported in run_ranks(2, on_rank):
        for name, tensor in source.items():
            is_bias = name.endswith("correction_bias")
            assert exported[name].dtype == (torch.float32 if is_bias else torch.bfloat16)
            assert torch.equal(exported[name], tensor) == is_bias, name
