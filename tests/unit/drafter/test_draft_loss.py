"""The unrolled pass against step-by-step drafting, and the loss against its definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.slow_draft import make_draft_model, make_sequence, slow_draft
from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_loss import Objective, draft_loss, make_objective, unroll_draft
from tlt_megatron.drafter.packing import pack_batch
from tlt_megatron.models.draft_model import DraftModel

ALGORITHMS = ("eagle", "hass", "eagle3")


def architecture_of(algorithm: str) -> str:
    return "eagle3" if algorithm == "eagle3" else "eagle"


def gradients_of(model: DraftModel, loss_sum: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_sum, list(model.parameters())))


@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_unrolled_steps_equal_drafting_on_kept_keys(architecture: str) -> None:
    """Row t at step k is what the engine computes k tokens after it verified up to t + 1: no mixed-up features or keys."""
    model = make_draft_model(architecture)
    sequences = [make_sequence(model, n, seed=n) for n in (9, 4, 6)]
    batch = pack_batch(sequences)
    num_steps = 4
    objective = Objective(num_steps=num_steps, feature_weight=0, decay=1, has_detached_steps=False)
    with torch.no_grad():
        outputs, heads = unroll_draft(model, batch, objective)
    first = 0
    for sequence, length in zip(sequences, batch.lengths, strict=True):
        for t in range(length):
            steps = min(num_steps, length - t)
            with torch.no_grad():
                expected = slow_draft(model, sequence, t, steps)
            for k in range(steps):
                actual = (outputs[k][first + t], heads[k][first + t])
                torch.testing.assert_close(actual, expected[k], rtol=1e-9, atol=1e-9)
        first += length


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_metrics_equal_the_definition(algorithm: str) -> None:
    model = make_draft_model(architecture_of(algorithm))
    objective = dataclasses.replace(
        make_objective(DrafterSection(algorithm=algorithm)),
        num_steps=1 if algorithm == "eagle" else 3,
        decay=0.7,
    )
    sequences = [make_sequence(model, n, seed=n, loss_start=start) for n, start in ((7, 4), (5, 0))]
    batch = pack_batch(sequences)
    loss = draft_loss(model, batch, objective, head_chunk_tokens=3)
    with torch.no_grad():
        outputs, heads = unroll_draft(model, batch, objective)
    total, count = 0.0, 0
    by_step = [[0, 0, 0.0] for _ in range(objective.num_steps)]
    first = 0
    for sequence, length in zip(sequences, batch.lengths, strict=True):
        states = sequence.features if sequence.final_hidden is None else sequence.final_hidden
        for s in range(length):  # predicts token s + 2
            if s + 2 < sequence.loss_start:
                continue
            count += 1
            p = (model.lm_head_VD @ states[s + 1]).softmax(dim=0)
            for k in range(min(objective.num_steps, s + 1)):
                row = first + s - k
                log_q = (model.lm_head_VD @ heads[k][row]).log_softmax(dim=0)
                step_loss = -(p * log_q).sum()
                distance = F.smooth_l1_loss(outputs[k][row], states[s + 1])
                total += 0.7**k * (step_loss + objective.feature_weight * distance)
                by_step[k][0] += 1
                by_step[k][1] += int(p.argmax() == log_q.argmax())
                by_step[k][2] += torch.minimum(p, log_q.exp()).sum().item()
        first += length
    torch.testing.assert_close(loss.loss_sum.detach(), torch.as_tensor(total))
    assert loss.count == count
    counts, agreed, accepted = zip(*by_step, strict=True)
    assert loss.counts_K.tolist() == list(counts)
    assert loss.agreed_K.tolist() == list(agreed)
    assert loss.accepted_K.tolist() == pytest.approx(accepted)
    assert counts[-1] < counts[0] or objective.num_steps == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_equal_autograd_through_plain_logits(algorithm: str) -> None:
    model = make_draft_model(architecture_of(algorithm))
    objective = make_objective(DrafterSection(algorithm=algorithm))
    batch = pack_batch([make_sequence(model, 8, seed=1), make_sequence(model, 5, seed=2)])
    fast = draft_loss(model, batch, objective, head_chunk_tokens=4)
    outputs, heads = unroll_draft(model, batch, objective)
    p = (batch.target_hidden @ model.lm_head_VD.t()).softmax(dim=-1)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_rows):
        for k in range(min(objective.num_steps, int(batch.position_ids[row]) + 1)):
            log_q = (model.lm_head_VD @ heads[k][row - k]).log_softmax(dim=0)
            distance = F.smooth_l1_loss(outputs[k][row - k], batch.target_hidden[row])
            step_loss = objective.feature_weight * distance - (p[row] * log_q).sum()
            total = total + objective.decay**k * step_loss
    for actual, expected in zip(
        gradients_of(model, fast.loss_sum), gradients_of(model, total), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_batch_equals_each_sequence_alone(algorithm: str) -> None:
    model = make_draft_model(architecture_of(algorithm))
    objective = make_objective(DrafterSection(algorithm=algorithm))
    sequences = [make_sequence(model, n, seed=n, loss_start=n // 3) for n in (8, 3, 6, 11)]
    packed = draft_loss(model, pack_batch(sequences), objective, head_chunk_tokens=5)
    alone = [
        draft_loss(model, pack_batch([s]), objective, head_chunk_tokens=512) for s in sequences
    ]
    summed = sum(loss.loss_sum for loss in alone)
    torch.testing.assert_close(packed.loss_sum, summed)
    assert packed.count == sum(loss.count for loss in alone)
    torch.testing.assert_close(packed.accepted_K, sum(loss.accepted_K for loss in alone))
    for actual, expected in zip(
        gradients_of(model, packed.loss_sum), gradients_of(model, summed), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("architecture", ["eagle", "eagle3"])
def test_a_future_token_and_a_neighbour_change_nothing(architecture: str) -> None:
    model = make_draft_model(architecture)
    objective = Objective(num_steps=3, feature_weight=0, decay=1, has_detached_steps=False)
    before, changed, after = (make_sequence(model, 8, seed=seed) for seed in range(3))
    batch = pack_batch([before, changed, after])
    features, token_ids = batch.features.clone(), batch.token_ids.clone()
    row = 6 + 3  # the fourth row of the second sequence
    features[row] += 1.0
    token_ids[row] = (token_ids[row] + 1) % 32
    other = dataclasses.replace(batch, features=features, token_ids=token_ids)
    with torch.no_grad():
        first, _ = unroll_draft(model, batch, objective)
        second, _ = unroll_draft(model, other, objective)
    for x, y in zip(first, second, strict=True):
        is_equal = (x == y).all(dim=-1)
        assert is_equal[:row].all()
        assert not is_equal[row:12].any()
        assert is_equal[12:].all()


def test_hass_treats_own_features_as_data_and_eagle3_does_not() -> None:
    model = make_draft_model("eagle")
    batch = pack_batch([make_sequence(model, 9)])
    through = Objective(num_steps=3, feature_weight=1, decay=1, has_detached_steps=False)
    detached = dataclasses.replace(through, has_detached_steps=True)
    losses = [draft_loss(model, batch, o, head_chunk_tokens=9) for o in (through, detached)]
    torch.testing.assert_close(losses[0].loss_sum, losses[1].loss_sum)
    first, second = (gradients_of(model, loss.loss_sum)[0] for loss in losses)
    assert not torch.allclose(first, second)
    assert make_objective(DrafterSection(algorithm="hass")).has_detached_steps
    assert not make_objective(DrafterSection(algorithm="eagle3")).has_detached_steps
    assert make_objective(DrafterSection(algorithm="eagle3")).feature_weight == 0


def test_a_batch_without_trained_rows_has_no_loss() -> None:
    model = make_draft_model("eagle")
    batch = pack_batch([make_sequence(model, 5, loss_start=5)])
    loss = draft_loss(model, batch, make_objective(DrafterSection()), head_chunk_tokens=8)
    assert loss.count == 0
    assert loss.loss_sum.item() == 0.0
