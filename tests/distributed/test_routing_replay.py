"""Routing replay: training sends tokens to the experts of the rollout, at every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mcore_policy import LENGTHS, Layout, build_policy, make_batch, share_of, train
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tests.unit.engines.conftest import engine_over, make_prompts
from tlt_megatron.policy.batching import pack_rollouts
from tlt_megatron.types import MicroBatch, SamplingParams

ALL = (len(LENGTHS),)
EP2 = Layout(world=2, expert=2)


def _routed_batch(seed: int) -> list[MicroBatch]:
    """With random experts for most tokens; a fifth of them have none."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for each in make_batch(seed):
        routes = torch.rand(each.num_tokens, 3, 8, generator=generator).argsort()[:, :, :2].short()
        routes[torch.rand(each.num_tokens, generator=generator) < 0.2] = -1
        batch.append(dataclasses.replace(each, routes=routes))
    return batch


def _replay(path: Path, layout: Layout, shares: tuple[int, ...], recompute: str) -> dict[str, Any]:
    """Log-probs with routes and without, what the routers chose with them, and three steps."""
    from megatron.core.transformer.moe.router import TopKRouter

    mcore: dict[str, Any] = {"recompute": recompute}
    if recompute == "moe":
        mcore = {"recompute": "selective", "transformer": {"recompute_modules": ["moe"]}}
    policy, groups = build_policy(path, layout, **mcore)
    share = share_of(_routed_batch(1), groups, shares)
    first = sum(shares[: groups.dp.rank])
    chosen: list[torch.Tensor] = []
    routers = [m for m in policy._stage[0].modules() if isinstance(m, TopKRouter)]
    handles = [r.register_forward_hook(lambda *call: chosen.append(call[2][1])) for r in routers]
    replayed = [each.logprobs for each in policy.infer_logprobs(share, 1.0)]
    for handle in handles:
        handle.remove()
    unrouted = [dataclasses.replace(each, routes=None) for each in share]
    free = [each.logprobs for each in policy.infer_logprobs(unrouted, 1.0)]
    return train(policy, groups, (1, 2, 3), shares, make=_routed_batch) | {
        "replayed": {first + i: each for i, each in enumerate(replayed)},
        "free": {first + i: each for i, each in enumerate(free)},
        "chosen": chosen,
    }


@pytest.fixture(scope="module")
def replayed_on_one_rank(mixture: Path) -> dict[str, Any]:
    return run_ranks(1, _replay, mixture, Layout(world=1), ALL, "none")[0]


def test_routers_choose_the_replayed_experts(replayed_on_one_rank: dict[str, Any]) -> None:
    chosen = iter(replayed_on_one_rank["chosen"])
    for number, batch in enumerate(_routed_batch(1)):
        assert batch.routes is not None
        has_route_P = batch.routes[:, 0, 0] >= 0
        for layer in range(3):
            expected_PK = batch.routes[has_route_P, layer].long().sort().values
            found_PE = next(chosen)
            assert (found_PE.sum(dim=1) == 2).all()
            assert torch.equal(found_PE[has_route_P].nonzero()[:, 1].view(-1, 2), expected_PK)
        free, replayed = (replayed_on_one_rank[name][number] for name in ("free", "replayed"))
        assert (replayed - free).abs().max() > 0.1


@pytest.mark.parametrize(
    ("layout", "shares", "recompute"),
    [
        (EP2, (5, 0), "none"),
        (EP2, (3, 2), "full"),
        (EP2, (3, 2), "moe"),
        (Layout(world=2, tensor=2, expert=2), ALL, "none"),
        (Layout(world=4, pipeline=2, expert=2), (4, 1), "full"),
        (Layout(world=4, pipeline=2, virtual=2, expert=2), (4, 1), "full"),
        (Layout(world=4, context=2, tensor=2, expert=2), ALL, "full"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_replayed_routes_equal_one_rank_at_every_layout(
    mixture: Path,
    replayed_on_one_rank: dict[str, Any],
    layout: Layout,
    shares: tuple[int, ...],
    recompute: str,
) -> None:
    for result in run_ranks(layout.world, _replay, mixture, layout, shares, recompute):
        for index, logprobs in result["replayed"].items():
            expected = replayed_on_one_rank["replayed"][index]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        # Adam's first step enlarges rounding errors: few tokens reach an expert, so gradients near
        # 0 count.
        stats = zip(result["stats"], replayed_on_one_rank["stats"], (1e-6, 2e-5, 2e-5), strict=True)
        for mine, theirs, tolerance in stats:
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)


def _reference(path: Path, layout: Layout, shares: tuple[int, ...], recompute: str) -> list[Any]:
    """Log-probs of the reference first, after a pass with routes and after updates with routes."""
    policy, groups = build_policy(path, layout, keep_reference=True, recompute=recompute)
    share = share_of(_routed_batch(1), groups, shares)

    def infer() -> list[torch.Tensor]:
        return [each.logprobs for each in policy.infer_logprobs(share, 1.0, reference=True)]

    found = [infer()]
    policy.infer_logprobs(share, 1.0)
    found.append(infer())
    train(policy, groups, (2, 1), shares, make=_routed_batch)
    return [*found, infer()]


@pytest.mark.parametrize(
    ("layout", "shares", "recompute"),
    [(Layout(world=1), ALL, "none"), (EP2, (3, 2), "full")],
    ids=["ep1", "ep2"],
)
def test_a_reference_routes_freely_after_any_pass(
    mixture: Path, layout: Layout, shares: tuple[int, ...], recompute: str
) -> None:
    for first, *others in run_ranks(layout.world, _reference, mixture, layout, shares, recompute):
        for found in others:
            assert all(map(torch.equal, found, first))


def _differences(
    path: Path, dtype: str, batch: MicroBatch, expected_P: torch.Tensor
) -> list[float]:
    """Mean absolute differences to the log-probs of the rollout, without routes and with them."""
    policy, _ = build_policy(path, Layout(world=1), dtype=dtype)
    found = []
    for each in (dataclasses.replace(batch, routes=None), batch):
        [logprobs] = policy.infer_logprobs([each], 1.0)
        difference_P = (logprobs.policy_logprobs - expected_P).abs()[batch.loss_mask > 0]
        found.append(float(difference_P.mean()))
    return found


def _add_noise(path: Path, share: float) -> None:
    """Add noise to the weights of the model's routers: `share` of their own size."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + share * tensor.std() * noise
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_replay_brings_the_log_probs_of_training_nearer_to_those_of_the_rollout(
    tmp_path: Path,
) -> None:
    """Prints the table of docs/exactness.md: run it with -s."""
    sizes = {"num_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}
    prompts = make_prompts(*range(5, 21), seed=1)
    params = SamplingParams(num_samples=4, max_new_tokens=48, seed=3)
    for dtype, share in (("bfloat16", 0.0), ("float32", 0.01), ("float32", 0.1)):
        path = make_tiny_hf(tmp_path / f"{dtype}_{share}", "qwen3_moe", **sizes)
        engine = engine_over(path, dtype=dtype, routing_replay=True, max_batch_size=64)
        groups = engine.generate(prompts, params, policy_version=1)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        batch = pack_rollouts(rollouts)
        drawn = [dataclasses.replace(r, logprobs=r.policy_logprobs) for r in rollouts]
        expected_P = pack_rollouts(drawn).rollout_logprobs
        _add_noise(path, share)
        [[free, replayed]] = run_ranks(1, _differences, path, dtype, batch, expected_P)
        print(f"| {dtype} | {100 * share:.0f} % | {free:.5f} | {replayed:.5f} |")
        assert replayed < 0.8 * free
