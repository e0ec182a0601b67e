"""Log-probabilities over a cut vocabulary, against a dense float64 softmax."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tlt_megatron.mcore.logprobs import vocab_parallel_logprobs
from tlt_megatron.runtime.process_groups import SINGLE, Group, group_of
from tlt_megatron.types import KeptTokens

P, V = 29, 64
NAMES = ("logprobs", "entropy", "policy_logprobs")
GRADED = NAMES[:2]


def _case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [P, V], labels [P] that touch both ends of every shard, and a weight [2, P] for each
    output with a gradient.
    """
    generator = torch.Generator().manual_seed(1)
    logits_PV = (torch.randn(P, V, generator=generator) * 4 + 30).to(dtype)
    labels_P = torch.randint(0, V, (P,), generator=generator)
    labels_P[:4] = torch.tensor([0, V // 2 - 1, V // 2, V - 1])
    return logits_PV, labels_P, torch.randn(2, P, generator=generator)


def _kept_sets(labels_P: Tensor) -> tuple[KeptTokens, Tensor]:
    """Sets of 1 to 6 tokens with the label, and the whole vocabulary at every fifth place; as a
    mask [P, V] too.
    """
    generator = torch.Generator().manual_seed(7)
    is_kept_PV = torch.zeros(P, V, dtype=torch.bool)
    is_kept_PV.scatter_(1, torch.randint(0, V, (P, 5), generator=generator), True)
    is_kept_PV[2] = False
    is_kept_PV.scatter_(1, labels_P[:, None], True)
    counts_P = is_kept_PV.sum(1).int()
    counts_P[::5] = 0
    ids = is_kept_PV[counts_P > 0].nonzero()[:, 1].int()
    return KeptTokens(token_ids=ids, counts=counts_P), is_kept_PV | (counts_P == 0)[:, None]


def _dense(
    logits_PV: Tensor,
    labels_P: Tensor,
    temperature: float,
    weights_2P: Tensor,
    is_kept_PV: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The three outputs, and the gradient of their weighted sum, in float64."""
    logits = logits_PV.double().requires_grad_(True)
    cut = logits if is_kept_PV is None else logits.masked_fill(~is_kept_PV, -1e9)
    log_p = (cut / temperature).log_softmax(-1)
    outputs = {
        "logprobs": log_p.gather(-1, labels_P[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "policy_logprobs": logits.log_softmax(-1).gather(-1, labels_P[:, None])[:, 0],
    }
    sum((outputs[n] * w).sum() for n, w in zip(GRADED, weights_2P, strict=True)).backward()
    return {name: value.detach() for name, value in outputs.items()}, logits.grad


def _ours(
    tp: Group,
    logits_PV: Tensor,
    labels_P: Tensor,
    temperature: float,
    weights_2P: Tensor,
    kept: KeptTokens | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    shard = logits_PV.chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_(True)
    result = vocab_parallel_logprobs(shard, labels_P, temperature, tp, kept)
    values = {name: getattr(result, name) for name in NAMES}
    sum((values[n] * w).sum() for n, w in zip(GRADED, weights_2P, strict=True)).backward()
    return {name: value.detach() for name, value in values.items()}, shard.grad


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("has_kept", [False, True])
def test_values_and_gradient_equal_a_dense_softmax(num_ranks: int, has_kept: bool) -> None:
    """Over the kept tokens, if there are some. The log-probs of the raw policy stay those of the
    whole vocabulary.
    """
    logits_PV, labels_P, weights_2P = _case()
    kept, is_kept_PV = _kept_sets(labels_P) if has_kept else (None, None)
    logprobs_alone, entropy_alone = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    cases = [
        (temperature, weights_2P * graded)
        for temperature in (0.7, 1.0, 1.6)
        for graded in (1.0, logprobs_alone, entropy_alone)
    ]

    def rank() -> list[tuple[dict[str, Tensor], Tensor | None]]:
        tp = group_of(dist.group.WORLD)
        return [_ours(tp, logits_PV, labels_P, *case, kept) for case in cases]

    ranks = run_ranks(num_ranks, rank)
    for case, *found in zip(cases, *ranks, strict=True):
        expected, expected_grad = _dense(logits_PV, labels_P, *case, is_kept_PV=is_kept_PV)
        for values, _ in found:
            for name in NAMES:
                assert values[name].dtype == torch.float32
                assert torch.equal(values[name], found[0][0][name])
                torch.testing.assert_close(values[name].double(), expected[name], rtol=0, atol=2e-5)
            if has_kept:
                assert values["logprobs"][2] == values["entropy"][2] == 0, "the label is alone"
        grad = torch.cat([grad for _, grad in found], dim=-1)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=2e-5)


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    logits_PV, labels_P, weights_2P = _case(torch.bfloat16)
    expected, expected_grad = _dense(logits_PV, labels_P, 0.7, weights_2P)
    values, grad = _ours(SINGLE, logits_PV, labels_P, 0.7, weights_2P)
    torch.testing.assert_close(values["logprobs"].double(), expected["logprobs"], rtol=0, atol=2e-5)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1 / 128, atol=1e-5)


def test_blocks_of_rows_equal_one_block() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_PV = torch.randn(70, 1 << 18, generator=generator)  # 64 rows fill a block
    labels_P = torch.randint(0, 1 << 18, (70,), generator=generator)
    weights_2P = torch.ones(2, 70)
    pairs_P2 = torch.stack([labels_P, (labels_P + 9) % (1 << 18)], 1).int()
    kept, tail_kept = (
        KeptTokens(token_ids=pairs.flatten(), counts=torch.full((len(pairs),), 2))
        for pairs in (pairs_P2, pairs_P2[60:])
    )
    for sets, tail_sets in ((None, None), (kept, tail_kept)):
        whole, whole_grad = _ours(SINGLE, logits_PV, labels_P, 0.7, weights_2P, sets)
        tail, tail_grad = _ours(
            SINGLE, logits_PV[60:], labels_P[60:], 0.7, weights_2P[:, 60:], tail_sets
        )
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
