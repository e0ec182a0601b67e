"""Alignment of packed batches against a loop written from the definition; balance and bounds of the
packing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.policy_batches import make_rollout
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.policy import batching
from tlt_megatron.policy.batching import (
    attach_targets,
    balance_by_size,
    pack_by_tokens,
    pack_rollouts,
    pack_share,
    response_slices,
    split_evenly,
)
from tlt_megatron.types import Rollout


def rollout(prompt: tuple[int, ...], response: list[int], sample_index: int = 0) -> Rollout:
    logprobs = -torch.arange(1.0, len(response) + 1)
    return make_rollout(prompt, torch.tensor(response), (0, sample_index), logprobs=logprobs)


ROLLOUTS = [rollout((1, 2), [3, 4]), rollout((5,), [6, 7, 8], 1), rollout((9, 10, 11), [12], 2)]


def test_packed_labels_and_masks_follow_the_definition() -> None:
    batch = pack_rollouts(ROLLOUTS)
    assert batch.requests == tuple(r.key for r in ROLLOUTS)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert batch.labels.tolist() == [2, 3, 4, 0, 6, 7, 8, 0, 10, 11, 12, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    assert batch.rollout_logprobs.tolist() == [0, -1, -2, 0, -1, -2, -3, 0, 0, 0, -1, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert batch.cu_seqlens.dtype == torch.int32


def test_response_slices_pick_the_predictions_of_each_response() -> None:
    labels = pack_rollouts(ROLLOUTS).labels
    picked = [labels[where].tolist() for where in response_slices(ROLLOUTS)]
    assert picked == [r.token_ids.tolist() for r in ROLLOUTS]


@pytest.mark.parametrize(
    ("aggregation", "weights", "count"),
    [
        ("token_mean", [1, 1, 1, 1, 1, 1], 6),
        ("sequence_mean", [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1], 3),
        ("sequence_sum", [1 / 8] * 6, 3),
    ],
)
def test_aggregation_weights_by_hand(aggregation: str, weights: list[float], count: int) -> None:
    (pack,) = pack_share(ROLLOUTS, 1000)
    targets = {
        "advantages": {r.key: torch.full_like(r.logprobs, r.sample_index) for r in ROLLOUTS},
        "old_logprobs": {r.key: r.logprobs * 2 for r in ROLLOUTS},
        "ref_logprobs": None,
    }
    batch = attach_targets(pack, targets, AlgorithmSection(aggregation=aggregation), 8)
    is_response = batch.loss_mask.bool()
    assert batch.loss_weights[is_response].tolist() == pytest.approx(weights)
    assert batch.loss_weights[~is_response].abs().sum() == 0
    assert batch.loss_count == count
    assert batch.advantages[is_response].tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.old_logprobs[is_response].tolist() == [-2, -4, -2, -4, -6, -2]
    assert batch.ref_logprobs is None


def test_every_index_goes_to_exactly_one_part_and_loads_are_near_equal() -> None:
    sizes = [random.Random(3).randint(1, 500) for _ in range(97)]
    parts = balance_by_size(sizes, 4)
    assert sorted(i for part in parts for i in part) == list(range(97))
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert max(loads) <= 4 / 3 * sum(sizes) / 4
    assert max(loads) - min(loads) <= max(sizes)


def test_fewer_sequences_than_parts_leaves_parts_empty() -> None:
    assert sorted(balance_by_size([5], 3)) == [[], [], [0]]


def test_packs_hold_their_bound_unless_one_sequence_is_longer() -> None:
    generator = random.Random(4)
    for _ in range(200):
        sizes = [generator.randint(1, 120) for _ in range(generator.randint(1, 40))]
        packs = pack_by_tokens(sizes, 100)
        assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
        assert all(len(p) == 1 or sum(sizes[i] for i in p) <= 100 for p in packs)
    assert pack_by_tokens([], 100) == []


def test_sequences_of_more_than_half_a_pack_are_packed_in_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempts once grew with the number of sequences, to seconds for a thousand."""
    attempts: list[int] = []

    def counted(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
        attempts.append(num_parts)
        return balance_by_size(sizes, num_parts)

    monkeypatch.setattr(batching, "balance_by_size", counted)
    sizes = [51 + i % 50 for i in range(60)]
    assert sorted(pack_by_tokens(sizes, 100)) == [[i] for i in range(60)]
    assert attempts == [60]


def test_split_evenly_covers_the_range_in_order() -> None:
    pieces = split_evenly(10, 4)
    assert [i for piece in pieces for i in piece] == list(range(10))
    assert {len(piece) for piece in pieces} <= {2, 3}
