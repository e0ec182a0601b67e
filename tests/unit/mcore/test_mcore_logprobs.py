"""Log-probabilities over a cut vocabulary, against a dense float64 softmax."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tlt_megatron.mcore.logprobs import vocab_parallel_logprobs
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of

P, V = 29, 64
NAMES = ("logprobs", "entropy", "policy_logprobs")


def _case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [P, V], labels [P] that touch both ends of every shard, and a weight [3, P] for each output."""
    generator = torch.Generator().manual_seed(1)
    logits_PV = (torch.randn(P, V, generator=generator) * 4 + 30).to(dtype)
    labels_P = torch.randint(0, V, (P,), generator=generator)
    labels_P[:4] = torch.tensor([0, V // 2 - 1, V // 2, V - 1])
    return logits_PV, labels_P, torch.randn(3, P, generator=generator)


def _dense(
    logits_PV: Tensor, labels_P: Tensor, temperature: float, weights_3P: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The three outputs, and the gradient of their weighted sum, in float64."""
    logits = logits_PV.double().requires_grad_(True)
    log_p = (logits / temperature).log_softmax(-1)
    outputs = {
        "logprobs": log_p.gather(-1, labels_P[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "policy_logprobs": logits.log_softmax(-1).gather(-1, labels_P[:, None])[:, 0],
    }
    sum((outputs[n] * w).sum() for n, w in zip(NAMES, weights_3P, strict=True)).backward()
    return {name: value.detach() for name, value in outputs.items()}, logits.grad


def _ours(
    tp: Group, logits_PV: Tensor, labels_P: Tensor, temperature: float, weights_3P: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    shard = logits_PV.chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_(True)
    result = vocab_parallel_logprobs(shard, labels_P, temperature, tp)
    values = {name: getattr(result, name) for name in NAMES}
    sum((values[n] * w).sum() for n, w in zip(NAMES, weights_3P, strict=True)).backward()
    return {name: value.detach() for name, value in values.items()}, shard.grad


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("which", [*NAMES, "all"])
def test_values_and_gradient_equal_a_dense_softmax(temperature: float, which: str) -> None:
    logits_PV, labels_P, weights_3P = _case()
    if which != "all":
        weights_3P = weights_3P * torch.tensor([[n == which] for n in NAMES])
    expected, expected_grad = _dense(logits_PV, labels_P, temperature, weights_3P)
    values, grad = _ours(SINGLE, logits_PV, labels_P, temperature, weights_3P)
    for name in NAMES:
        assert values[name].dtype == torch.float32
        torch.testing.assert_close(values[name].double(), expected[name], rtol=0, atol=2e-5)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=2e-5)


def test_two_ranks_equal_a_dense_softmax() -> None:
    logits_PV, labels_P, weights_3P = _case()

    def rank() -> list[tuple[dict[str, list[float]], list[list[float]]]]:
        tp = group_of(dist.group.WORLD)
        results = [_ours(tp, logits_PV, labels_P, t, weights_3P) for t in (0.7, 1.0)]
        return [({k: v.tolist() for k, v in out.items()}, grad.tolist()) for out, grad in results]

    ranks = run_ranks(2, rank)
    for number, temperature in enumerate((0.7, 1.0)):
        expected, expected_grad = _dense(logits_PV, labels_P, temperature, weights_3P)
        outputs = [rank[number][0] for rank in ranks]
        assert outputs[0] == outputs[1]
        for name in NAMES:
            value = torch.tensor(outputs[0][name], dtype=torch.float64)
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5)
        grad = torch.cat([torch.tensor(rank[number][1]) for rank in ranks], dim=-1)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=2e-5)


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    logits_PV, labels_P, weights_3P = _case(torch.bfloat16)
    expected, expected_grad = _dense(logits_PV, labels_P, 0.7, weights_3P)
    values, grad = _ours(SINGLE, logits_PV, labels_P, 0.7, weights_3P)
    torch.testing.assert_close(values["logprobs"].double(), expected["logprobs"], rtol=0, atol=2e-5)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1 / 128, atol=1e-5)


def test_blocks_of_rows_equal_one_block() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_PV = torch.randn(70, 1 << 18, generator=generator)  # 64 rows fill a block
    labels_P = torch.randint(0, 1 << 18, (70,), generator=generator)
    weights_3P = torch.ones(3, 70)
    whole, whole_grad = _ours(SINGLE, logits_PV, labels_P, 0.7, weights_3P)
    tail, tail_grad = _ours(SINGLE, logits_PV[60:], labels_P[60:], 0.7, weights_3P[:, 60:])
    for name in NAMES:
        assert torch.equal(whole[name][60:], tail[name])
    assert torch.equal(whole_grad[60:], tail_grad)


def test_only_the_logits_themselves_are_kept_for_the_backward_pass() -> None:
    logits_PV, labels_P, _ = _case()
    logits_PV.requires_grad_(True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocab_parallel_logprobs(logits_PV, labels_P, 0.7, SINGLE)
    assert kept.pop(logits_PV.untyped_storage().data_ptr()) == logits_PV.nbytes
    assert max(kept.values()) <= 8 * P


def test_policy_logprobs_are_the_logprobs_at_temperature_one() -> None:
    logits_PV, labels_P, _ = _case()
    result = vocab_parallel_logprobs(logits_PV, labels_P, 1.0, SINGLE)
    assert result.policy_logprobs is result.logprobs


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    logits_PV, labels_P, _ = _case()
    with pytest.raises(ValueError, match=r"temperature=.*must be > 0"):
        vocab_parallel_logprobs(logits_PV, labels_P, temperature, SINGLE)
