"""The loss against values worked out by hand, and its gradient where clipping must stop it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.policy_batches import make_packed
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy.policy_loss import (
    clipped_surrogate,
    kl_estimate,
    policy_loss,
)
from tlt_megatron.types import MicroBatch, TokenLogprobs


def micro_batch(
    advantages: list[float], mask: list[float], weights: list[float] | None = None, **fields: object
) -> MicroBatch:
    weights_P = torch.tensor(weights or mask)
    return make_packed(mask, advantages=torch.tensor(advantages), loss_weights=weights_P, **fields)


def predicted(logprobs: list[float]) -> TokenLogprobs:
    values = torch.tensor(logprobs, requires_grad=True)
    return TokenLogprobs(
        logprobs=values, entropy=torch.full_like(values, 0.5).detach(), policy_logprobs=values
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.5, 1.0, -1.28, 1.0),  # too far up: capped at 1 + clip_high
        (0.5, 1.0, -0.5, 0.0),  # a fall may be undone
        (0.5, -1.0, 0.8, 1.0),  # too far down: held at 1 - clip_low
        (1.5, -1.0, 1.5, 0.0),
        (5.0, -1.0, 3.0, 1.0),  # dual clip
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, is_clipped: float
) -> None:
    loss_P, clipped_P = clipped_surrogate(
        torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.28, dual_clip=3.0
    )
    assert float(loss_P) == pytest.approx(loss, rel=1e-5)
    assert float(clipped_P) == is_clipped


def test_a_clipped_token_has_no_gradient_and_an_unmasked_one_none_either() -> None:
    output = predicted([-1.0 + math.log(1.5), -1.0, -0.3])
    batch = micro_batch([1.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    result = policy_loss(output, batch, AlgorithmSection(clip_low=0.2, clip_high=0.2))
    result.loss_sum.backward()
    assert output.logprobs.grad.tolist() == pytest.approx([0.0, -1.0, 0.0])
    assert result.count == 2
    assert float(result.metrics["pg_clipfrac"]) == 1.0


def test_kl_estimators_by_hand() -> None:
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(kl_estimate("k1", logprobs, reference)) == pytest.approx(math.log(2))
    assert float(kl_estimate("k2", logprobs, reference)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_estimate("k3", logprobs, reference)) == pytest.approx(0.5 - 1 + math.log(2))


def test_kl_loss_adds_its_coefficient_times_the_estimate() -> None:
    section = AlgorithmSection(kl_coef=0.1, kl_estimator="k2")
    batch = micro_batch([0.0], [1.0], ref_logprobs=torch.tensor([-2.0]))
    result = policy_loss(predicted([-1.0]), batch, section)
    assert float(result.loss_sum) == pytest.approx(0.1 * 0.5)
    assert float(result.metrics["kl_loss"]) == pytest.approx(0.5)


def two_responses(**fields: object) -> MicroBatch:
    """Prompt tokens at 0 and 3. Response 1 has the advantage 2, response 2 the advantage -1.
    Weights of sequence_mean.
    """
    return micro_batch(
        [0.0, 2.0, 2.0, 0.0, -1.0, -1.0, -1.0, 0.0],
        [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        [0.0, 0.5, 0.5, 0.0, 1 / 3, 1 / 3, 1 / 3, 0.0],
        cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32),
        loss_count=2,
        **fields,
    )


def shifted(*ratios: float) -> TokenLogprobs:
    """Log-probs whose ratios to the old ones, all -1, are those. At masked tokens they do not
    matter.
    """
    return predicted([-1.0 + math.log(ratio) for ratio in ratios])


def test_gspo_by_hand() -> None:
    """Ratios 4 and 1 have the geometric mean 2; 1/8, 1 and 1 have 1/2. The arithmetic means would
    be 2.5 and 0.7.
    """
    section = AlgorithmSection(loss="gspo", aggregation="sequence_mean", clip_low=0.9, clip_high=2)
    output = shifted(7.0, 4.0, 1.0, 7.0, 1 / 8, 1.0, 1.0, 7.0)
    result = policy_loss(output, two_responses(), section)
    # -(2 * 2) of response 1, +1/2 of response 2, counted in sequences
    assert float(result.loss_sum) == pytest.approx(-4 + 0.5, rel=1e-5)
    assert result.count == 2
    result.loss_sum.backward()
    # d s/d logprob_t = s / T: -2 * 2 / 2 for each token of response 1, 1/2 / 3 for each of response
    # 2
    expected = [0.0, -2.0, -2.0, 0.0, 1 / 6, 1 / 6, 1 / 6, 0.0]
    assert output.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert float(result.metrics["pg_clipfrac"]) == 0


def test_gspo_clips_whole_responses() -> None:
    section = AlgorithmSection(
        loss="gspo", aggregation="sequence_mean", clip_low=0.4, clip_high=0.5
    )
    output = shifted(1.0, 4.0, 1.0, 1.0, 1 / 8, 1.0, 1.0, 1.0)
    result = policy_loss(output, two_responses(), section)
    # the ratio 2 counts as 1.5 for the advantage 2, the ratio 1/2 as 0.6 for the advantage -1
    assert float(result.loss_sum) == pytest.approx(-3 + 0.6, rel=1e-5)
    assert float(result.metrics["pg_clipfrac"]) == 5
    result.loss_sum.backward()
    assert output.logprobs.grad.tolist() == [0.0] * 8


def test_cispo_by_hand_keeps_the_gradient_of_a_clipped_token() -> None:
    """-clip(ratio) * A * logprob: the gradient is -clip(ratio) * A, also where the ratio is cut."""
    section = AlgorithmSection(loss="cispo", clip_low=1.0, clip_high=0.5)
    output = shifted(7.0, 4.0, 1.0, 7.0, 1 / 8, 1.0, 1.0, 7.0)
    result = policy_loss(output, two_responses(), section)
    result.loss_sum.backward()
    # ratio 4 -> 1.5, no lower bound: 1/8 stays. Times the advantage, times the weight of
    # sequence_mean.
    expected = [0.0, -1.5, -1.0, 0.0, 1 / 24, 1 / 3, 1 / 3, 0.0]
    assert output.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)
    logprobs = [-1 + math.log(ratio) for ratio in (7.0, 4.0, 1.0, 7.0, 1 / 8, 1.0, 1.0, 7.0)]
    by_hand = sum(e * logprob for e, logprob in zip(expected, logprobs, strict=True))
    assert float(result.loss_sum) == pytest.approx(by_hand, rel=1e-5)
    assert float(result.metrics["pg_clipfrac"]) == 1


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_first_update_of_a_batch_has_the_gradient_of_ppo(loss: str) -> None:
    """All ratios are 1, and the advantage is the same at every token of a response."""
    grads = []
    for name in ("ppo", loss):
        output = shifted(1.0, 4.0, 1.0, 1.0, 1 / 8, 1.0, 1.0, 1.0)
        section = AlgorithmSection(loss=name, aggregation="sequence_mean")
        policy_loss(output, two_responses(old_logprobs=None), section).loss_sum.backward()
        grads.append(output.logprobs.grad.tolist())
    assert grads[0] == pytest.approx(grads[1])


def test_a_sequence_without_a_response_token_gives_nothing_under_gspo() -> None:
    section = AlgorithmSection(loss="gspo", aggregation="sequence_mean")
    batch = micro_batch([1.0, 1.0], [0.0, 0.0])
    assert float(policy_loss(shifted(2.0, 2.0), batch, section).loss_sum) == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("logprobs.sum(), logprobs", r"returned \[\[\], \[1\]\], must be two tensors of \[1\]"),
        ("logprobs", r"returned \[1\], must be two tensors"),
        ("None", r"returned None, must be two tensors"),
        ("(logprobs, [0.0])", r"returned \[\[1\], \['0\.0'\]\], must be two tensors"),
        ("logprobs.missing", r"raised AttributeError\(.*missing"),
    ],
)
def test_a_users_loss_that_fails_is_named(tmp_path: Path, result: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"def total(logprobs, old_logprobs, batch, section):\n    return {result}\n"
    )
    section = AlgorithmSection(loss=f"{tmp_path}/mine.py:total")
    with pytest.raises((ValueError, RuntimeError), match=r"mine\.py:total': " + message):
        policy_loss(predicted([-1.0]), micro_batch([1.0], [1.0]), section)
