"""Policy checkpoints: save + load = never saved, at the same layout bit for bit, at another to
rounding.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.mcore_policy import (
    LENGTHS,
    Layout,
    build_policy,
    check_same_bits,
    check_weights,
    make_batch,
    train,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tests.unit.mcore.test_checkpoint_reader import Call
from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.mcore.megatron_checkpoint import _sharded_state

ALL = (len(LENGTHS),)
DP2 = Layout(world=2)
TP2 = Layout(world=2, tensor=2)
PP2 = Layout(world=2, pipeline=2)
VIRTUAL = Layout(world=2, pipeline=2, virtual=2)
EP2 = Layout(world=2, expert=2)


@pytest.fixture(scope="module")
def uneven_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, and with sizes for which Megatron pads between the two buckets that a tied stage
    has.
    """
    return make_tiny_hf(
        tmp_path_factory.mktemp("models") / "llama",
        "llama",
        tied=True,
        vocab_size=518,
        hidden_size=48,
        intermediate_size=84,
    )


def _save(
    model_path: Path, layout: Layout, shares: tuple[int, ...], path: Path, settings: dict[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Two steps, save, log-probs, two more steps."""
    policy, groups = build_policy(model_path, layout, **settings)
    train(policy, groups, (1, 2), shares)
    policy.save(path)
    logprobs = [value.logprobs for value in policy.infer_logprobs(make_batch(7), 1.0)]
    return train(policy, groups, (3, 4), shares), logprobs


def _load(
    model_path: Path, layout: Layout, shares: tuple[int, ...], path: Path, settings: dict[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    policy, groups = build_policy(model_path, layout, **settings)
    policy.load(path)
    logprobs = [value.logprobs for value in policy.infer_logprobs(make_batch(7), 1.0)]
    return train(policy, groups, (3, 4), shares), logprobs


@pytest.mark.parametrize(
    ("model", "layout", "shares", "settings"),
    [
        ("model_path", Layout(world=4, tensor=2, pipeline=2), ALL, {}),
        ("model_path", DP2, (3, 2), {"dtype": "bfloat16"}),
        ("model_path", Layout(world=2, context=2), ALL, {}),
        ("uneven_path", PP2, ALL, {}),
        ("uneven_path", VIRTUAL, ALL, {}),
        ("mixture", EP2, (3, 2), {}),
    ],
    ids=["tp2pp2", "bfloat16", "cp2", "padding between buckets", "virtual pipeline", "ep2"],
)
def test_save_then_load_equals_never_saved_bit_for_bit(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    model: str,
    layout: Layout,
    shares: tuple[int, ...],
    settings: dict[str, Any],
) -> None:
    path, model_path = tmp_path / "checkpoint", request.getfixturevalue(model)
    straight = run_ranks(layout.world, _save, model_path, layout, shares, path, settings)
    resumed = run_ranks(layout.world, _load, model_path, layout, shares, path, settings)
    for (expected, _), (result, _) in zip(straight, resumed, strict=True):
        assert result["sums"] == expected["sums"]
        assert result["stats"] == expected["stats"]
        check_same_bits(result["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("uneven_path", TP2, PP2),
        ("uneven_path", VIRTUAL, TP2),
        ("uneven_path", PP2, VIRTUAL),
        ("uneven_path", Layout(world=4, pipeline=2), TP2),
        ("uneven_path", TP2, DP2),
        ("uneven_path", Layout(world=4, tensor=2, context=2), Layout(world=1)),
    ],
    ids=str,
)
def test_a_checkpoint_loads_at_another_layout(
    tmp_path: Path, request: pytest.FixtureRequest, model: str, saved: Layout, loaded: Layout
) -> None:
    path, model_path = tmp_path / "checkpoint", request.getfixturevalue(model)
    shares = [
        (3, 2) if lay.world > lay.tensor * lay.context * lay.pipeline else ALL
        for lay in (saved, loaded)
    ]
    straight = run_ranks(saved.world, _save, model_path, saved, shares[0], path, {})
    resumed = run_ranks(loaded.world, _load, model_path, loaded, shares[1], path, {})
    expected, expected_logprobs = straight[0]
    losses = [_total(straight, "loss", step) for step in (0, 1)]
    for result, logprobs in resumed:
        for mine, theirs in zip(logprobs, expected_logprobs, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        for mine, theirs in zip(result["stats"], expected["stats"], strict=True):
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        check_weights(result["weights"], expected["weights"])
    assert [_total(resumed, "loss", step) for step in (0, 1)] == pytest.approx(losses, rel=1e-5)


def _total(results: list[tuple[dict[str, Any], Any]], name: str, step: int) -> float:
    return sum({r["dp_rank"]: r["sums"][step][name] for r, _ in results}.values())


def test_a_policy_saved_before_its_first_step_loads(tmp_path: Path, model_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def save() -> dict[str, Any]:
        policy, groups = build_policy(model_path, DP2)
        policy.save(path)
        return train(policy, groups, (3, 4), (3, 2))

    straight = run_ranks(2, save)
    resumed = run_ranks(2, _load, model_path, DP2, (3, 2), path, {})
    assert resumed[0][0]["stats"] == straight[0]["stats"]


def test_loading_into_a_trained_policy_forgets_its_training(
    tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "checkpoint"

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        section = OptimizerSection(lr=1e-3, decay="linear")
        policy, groups = build_policy(model_path, DP2, optimizer=section, num_updates=8)
        train(policy, groups, (1,), (3, 2))
        policy.save(path)
        first = train(policy, groups, (2, 3), (3, 2))
        policy.load(path)
        return first, train(policy, groups, (2, 3), (3, 2))

    for first, second in run_ranks(2, run):
        assert first["stats"] == second["stats"]
        check_same_bits(second["weights"], first["weights"])


def test_the_schedule_goes_on_with_the_settings_of_the_resumed_run(
    tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    settings = {"decay": "linear", "weight_decay": 0.0}
    before = {"optimizer": OptimizerSection(lr=1e-3, **settings), "num_updates": 4}
    after = {"optimizer": OptimizerSection(lr=2e-3, **settings), "num_updates": 4}
    straight = run_ranks(1, _save, model_path, Layout(world=1), ALL, path, before)
    resumed = run_ranks(1, _load, model_path, Layout(world=1), ALL, path, after)
    assert [s.lr for s in straight[0][0]["stats"]] == pytest.approx([5e-4, 2.5e-4])
    assert [s.lr for s in resumed[0][0]["stats"]] == pytest.approx([1e-3, 5e-4])


def test_a_checkpoint_of_another_kind_and_an_unfinished_one_are_refused(
    tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "checkpoint"

    def run(dtype: str) -> None:
        policy, _ = build_policy(model_path, DP2, dtype=dtype)
        with pytest.raises(ValueError, match="no complete torch_dist checkpoint"):
            policy.load(tmp_path)
        if dtype == "float32":
            policy.save(path)
        else:
            with pytest.raises(ValueError, match=r"model\.dtype='float32'"):
                policy.load(path)

    run_ranks(2, run, "float32")
    run_ranks(2, run, "bfloat16")


def test_a_checkpoint_is_written_by_one_file_per_saving_rank_and_complete(
    tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "checkpoint"

    def save() -> list[str]:
        build_policy(model_path, TP2)[0].save(path)
        return sorted(file.name for file in path.iterdir())

    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"]
    assert run_ranks(2, save) == [names, names]


def test_no_data_parallel_rank_holds_more_of_the_optimizer_than_its_share(
    model_path: Path,
) -> None:
    """Beside it, only parameters that shards cut: one when saving, one at each end when loading."""

    def count() -> tuple[int, int, list[int]]:
        policy, groups = build_policy(model_path, DP2)
        train(policy, groups, (1,), (3, 2))
        sizes = [p.numel() for p in policy._parameters()]
        held = []
        for is_loading in (False, True):
            state = _sharded_state(policy._stage, policy._optimizer, is_loading=is_loading)
            parts = state["optimizer"]["param_state"].values()
            held.append(sum(part["exp_avg"].data.numel() for part in parts))
        return sum(sizes), max(sizes), held

    (total, largest, first), (_, _, second) = run_ranks(2, count)
    assert first[0] + second[0] == total
    for saved, loaded in (first, second):
        assert 0 < saved <= total / 2 + largest
        assert 0 < loaded <= total / 2 + 2 * largest
    assert total > 3 * largest  # so that a whole stage on one rank is more than is allowed


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, model_path: Path) -> None:
    """The weight sync finds those of a policy, nothing else those of a critic."""

    def run() -> None:
        policy, groups = build_policy(model_path, TP2)
        if groups.world.rank == 1:
            with torch.no_grad():
                next(policy._parameters()).view(-1)[3] = float("nan")
        with pytest.raises(RuntimeError, match=r"rank 1: weights of .* are not finite: not saved"):
            policy.save(tmp_path / "checkpoint")

    run_ranks(2, run)
    assert not (tmp_path / "checkpoint").exists()


def test_an_entry_of_bytes_in_place_of_a_tensor_is_refused(
    tmp_path: Path, model_path: Path
) -> None:
    """Torch would unpickle it without a limit, whatever the run asked for."""
    path, trace = tmp_path / "checkpoint", tmp_path / "trace"

    def run() -> None:
        policy, _ = build_policy(model_path, Layout(world=1))
        policy.save(path)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        (index, place) = next((i, p) for i, p in metadata.storage_data.items() if "norm" in i.fqn)
        torch.save(Call(os.mkdir, str(trace)), path / "evil")
        size = (path / "evil").stat().st_size
        evil = dataclasses.replace(place, relative_path="evil", offset=0, length=size)
        metadata.storage_data[MetadataIndex(index.fqn)] = evil
        metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            ValueError, match=r"not loaded: rank 0: the checkpoint has no tensor .*norm"
        ):
            policy.load(path)

    run_ranks(1, run)
    assert not trace.exists()
