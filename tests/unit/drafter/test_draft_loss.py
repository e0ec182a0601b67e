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
    """Row t at step k is what the engine computes k tokens after it verified up to t + 1: no
    mixed-up features or keys.
    """
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
def test_loss_metrics_and_gradients_equal_the_definition(algorithm: str) -> None:
    model = make_draft_model(architecture_of(algorithm))
    objective = dataclasses.replace(
        make_objective(DrafterSection(algorithm=algorithm)),
        num_steps=1 if algorithm == "eagle" else 3,
        decay=0.7,
    )
    sequences = [make_sequence(model, n, seed=n, loss_start=start) for n, start in ((7, 4), (5, 0))]
    batch = pack_batch(sequences)
    loss = draft_loss(model, batch, objective, head_chunk_tokens=3)
    outputs, heads = unroll_draft(model, batch, objective)
    total, count = torch.zeros((), dtype=torch.float64), 0
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
                total = total + 0.7**k * (step_loss + objective.feature_weight * distance)
                by_step[k][0] += 1
                by_step[k][1] += int(p.argmax() == log_q.argmax())
                by_step[k][2] += torch.minimum(p, log_q.exp()).sum().item()
        first += length
    torch.testing.assert_close(loss.loss_sum, total)
    for actual, expected in zip(
        gradients_of(model, loss.loss_sum), gradients_of(model, total), strict=True
    ):
        torch.testing.assert_close(actual, expected)
    assert loss.count == count
    counts, agreed, accepted = zip(*by_step, strict=True)
    assert loss.counts_K.tolist() == list(counts)
    assert loss.agreed_K.tolist() == list(agreed)
    assert loss.accepted_K.tolist() == pytest.approx(accepted)
    assert counts[-1] < counts[0] or objective.num_steps == 1


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
