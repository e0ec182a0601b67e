"""One rank's optimizer against numbers worked out by hand and against transformers' gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.mcore_policy import (
    Layout,
    build_policy,
    export,
    hf_logits,
    load_hf,
    make_batch,
    make_micro_batch,
    tiny_loss,
)
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import OptimizerSection
from tlt_megatron.mcore.optimizer_state import steps_to_host
from tlt_megatron.types import LossResult, MicroBatch, OptimizerStats, TokenLogprobs
from tools.gpu.pretend_cuda import CUDA, PretendGpu

ONE_RANK = Layout(world=1)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", num_layers=2)


def _no_gradient(logprobs: TokenLogprobs, micro_batch: MicroBatch) -> LossResult:
    return LossResult(loss_sum=logprobs.logprobs.sum() * 0.0, count=1, metrics={})


def _decay_only(
    path: Path, section: OptimizerSection, num_steps: int, num_updates: int = 1
) -> tuple:
    def run() -> tuple[Weights, Weights, list[float]]:
        policy, _ = build_policy(path, ONE_RANK, optimizer=section, num_updates=num_updates)
        before, rates = export(policy), []
        for _ in range(num_steps):
            policy.forward_backward([make_micro_batch((3,), 0)], 1.0, _no_gradient)
            rates.append(policy.optimizer_step().lr)
        return before, export(policy), rates

    return run_ranks(1, run)[0]


def test_weight_decay_touches_matrices_and_neither_norms_nor_biases(model_path: Path) -> None:
    section = OptimizerSection(lr=0.1, weight_decay=0.5)
    before, after, _ = _decay_only(model_path, section, 1)
    num_exempt = 0
    for name, weight in before.items():
        is_exempt = name.endswith(("norm.weight", ".bias"))
        num_exempt += is_exempt
        expected = weight if is_exempt else weight * (1 - 0.1 * 0.5)
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=0)
    assert num_exempt == 2 * (2 + 3) + 1


@pytest.mark.parametrize(
    ("section", "num_updates", "expected"),
    [
        ({}, 4, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, 2, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (
            {"warmup_steps": 1, "decay": "linear", "min_lr": 0.02},
            5,
            [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"decay": "cosine"}, 4, [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
        ({"decay": "linear", "warmup_steps": 2}, 1, [1 / 3, 2 / 3, 1.0, 0.0]),
    ],
)
def test_learning_rate_follows_its_schedule(
    model_path: Path, section: dict, num_updates: int, expected: list[float]
) -> None:
    optimizer = OptimizerSection(lr=0.1, weight_decay=0.5, **section)
    before, after, rates = _decay_only(model_path, optimizer, len(expected), num_updates)
    assert rates == pytest.approx([0.1 * factor for factor in expected], rel=1e-5, abs=1e-9)
    kept = 1.0  # what each step used is what it reports
    for rate in rates:
        kept *= 1 - rate * 0.5
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] * kept, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e6])
def test_one_update_equals_adam_on_the_gradient_of_transformers(
    model_path: Path, clip_grad: float
) -> None:
    # With lr = eps = 1 and no decay, the first update of Adam is -g / (|g| + 1): it shows the
    # gradient's size.
    section = OptimizerSection(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=clip_grad)

    def run() -> tuple[Weights, OptimizerStats]:
        policy, _ = build_policy(model_path, ONE_RANK, optimizer=section)
        policy.forward_backward(make_batch(1), 0.8, tiny_loss)
        stats = policy.optimizer_step()
        return export(policy), stats

    after, stats = run_ranks(1, run)[0]
    before, gradients = _hf_gradients(model_path)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert norm > 1.0
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    factor = clip_grad / norm if 0 < clip_grad < norm else 1.0
    for name, weight in before.items():
        clipped = gradients[name] * factor
        torch.testing.assert_close(
            after[name] - weight, -clipped / (clipped.abs() + 1), rtol=1e-4, atol=1e-5
        )


def _hf_gradients(path: Path) -> tuple[Weights, Weights]:
    """Weights, and d(sum of loss sums) / (sum of counts), from transformers and autograd."""
    model = load_hf(path)
    loss, count = torch.zeros(()), 0
    for micro_batch in make_batch(1):
        logits_PV = hf_logits(model, micro_batch)
        log_p_PV = torch.log_softmax(logits_PV / 0.8, dim=-1)
        logprobs_P = log_p_PV.gather(1, micro_batch.labels[:, None])[:, 0]
        result = tiny_loss(
            TokenLogprobs(
                logprobs=logprobs_P,
                entropy=-(log_p_PV.exp() * log_p_PV).sum(-1),
                policy_logprobs=logprobs_P,
            ),
            micro_batch,
        )
        loss, count = loss + result.loss_sum, count + result.count
    (loss / count).backward()
    parameters = dict(model.named_parameters())
    return (
        {name: parameter.detach() for name, parameter in parameters.items()},
        {name: parameter.grad for name, parameter in parameters.items()},
    )


def test_bfloat16_adds_up_updates_too_small_to_show_one_by_one(model_path: Path) -> None:
    # A bfloat16 just below 1 is 2^-8 from the next: updates of 5e-4 vanish unless a float32 copy
    # adds them up.
    section = OptimizerSection(lr=5e-4, weight_decay=0.0, clip_grad=0.0)

    def run() -> list[torch.Tensor]:
        policy, _ = build_policy(model_path, ONE_RANK, optimizer=section, dtype="bfloat16")
        norms = [export(policy)["model.norm.weight"]]
        for num_steps in (1, 9):
            for _ in range(num_steps):
                policy.forward_backward(make_batch(1), 1.0, tiny_loss)
                assert not policy.optimizer_step().is_skipped
            norms.append(export(policy)["model.norm.weight"])
        logprobs = policy.infer_logprobs(make_batch(2), 1.0)
        assert all(value.logprobs.dtype == torch.float32 for value in logprobs)
        return norms

    first, second, last = run_ranks(1, run)[0]
    is_large = first.abs() > 0.5
    assert first.dtype == torch.bfloat16
    assert torch.equal(first[is_large], second[is_large])
    assert (first != last)[is_large].float().mean() > 0.5


def test_the_steps_of_adamw_stay_in_host_memory() -> None:
    """Megatron brings all of an optimizer's state back to the GPU."""
    parameter = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([parameter])
    with PretendGpu():
        adam.state[parameter] = {"step": torch.tensor(3.0, device=CUDA)}
        steps_to_host(
            cast(Any, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)]))
        )
        step = adam.state[parameter]["step"]
    assert step.device.type == "cpu"
    assert float(step) == 3.0
