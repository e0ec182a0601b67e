"""What is compared on the hold-out: the newest responses, with the strategies that ran just now."""

from __future__ import annotations

import math

import torch

from tests.slow_draft import make_draft_model, make_sequence
from tests.spot_phases import make_drafter_trainer
from tests.unit.spot.test_lifecycle import Shelf
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.acceptance import Replay
from tlt_megatron.engines.base import PassRecord
from tlt_megatron.spot.holdout import Holdout, _part
from tlt_megatron.types import SamplingParams

TWO, FOUR, TREE = (SpeculationStrategy.parse(text) for text in ("2_1_2", "4_1_4", "3_2_6"))


def make_holdout() -> Holdout:
    strategies = [TWO, FOUR, TREE, SpeculationStrategy.parse("ngram_4")]
    return Holdout(Shelf(), SamplingParams(), strategies)


def passes(**tokens: int) -> list[PassRecord]:
    """One pass of each strategy, named as x2_1_2, with these committed tokens."""
    rest = {"start_s": 0.0, "seconds": 0.1, "batch_size": 8, "reason": "", "accepted_by_depth": ()}
    return [
        PassRecord(strategy=name.removeprefix("x"), num_committed=count, **rest)
        for name, count in tokens.items()
    ]


def test_strategies_count_by_their_tokens_in_this_step() -> None:
    holdout = make_holdout()
    assert holdout.shares == {TWO: 1 / 3, FOUR: 1 / 3, TREE: 1 / 3}  # nothing is known yet
    holdout.add_passes(passes(x2_1_2=100, x3_2_6=300, x4_1_4=20, off=900, ngram_4=900))
    assert holdout.shares == {TWO: 0.25, TREE: 0.75}
    holdout.start_step()
    holdout.add_passes(passes(x4_1_4=7, off=9))
    assert holdout.shares == {FOUR: 1.0}


def test_drafters_are_compared_on_a_sample_of_the_newest_responses() -> None:
    trainer = make_drafter_trainer()
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    other = make_draft_model("eagle", seed=1).state_dict()
    holdout = make_holdout()
    assert holdout.compare(trainer, candidate=own, published=other) is None
    for step, length in ((1, 50), (2, 30)):
        holdout.start_step()
        for draw in range(100):
            sequence = make_sequence(trainer.model, length, seed=draw, request=(draw, step, 0))
            holdout.add(sequence)
        comparison = holdout.compare(trainer, candidate=other, published=other)
    assert comparison is not None
    assert 512 - 28 < comparison.num_tokens <= 512  # 28 of each response
    assert comparison.accept_lengths[0] == comparison.accept_lengths[1] > 1.0
    assert comparison.standard_error == 0.0
    broken = own | {"fc.weight": torch.full_like(own["fc.weight"], math.nan)}
    comparison = holdout.compare(trainer, candidate=broken, published=other)
    assert comparison is not None
    assert comparison.accept_lengths[1] > comparison.accept_lengths[0] == 1.0
    assert comparison.standard_error > 0.0
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, own[name])


def test_a_part_of_a_long_response_has_the_passes_that_it_has_in_the_whole() -> None:
    model = make_drafter_trainer().model
    whole = make_sequence(model, 700, seed=1, request=(3, 0, 5))
    (starts_P,) = Replay([whole], SamplingParams()).starts(model, [FOUR])
    starts = starts_P.nonzero().squeeze(1).tolist()
    assert len(starts) < 690
    for start in starts[1:100:20]:
        part = _part(whole, start + 1 - whole.loss_start)
        (found_P,) = Replay([part], SamplingParams()).starts(model, [FOUR])
        found = found_P.nonzero().squeeze(1).tolist()
        assert found == [each for each in starts if start <= each < part.num_rows]
        assert part.num_rows - part.loss_start == 512


def test_the_responses_of_a_rank_that_finished_last_are_compared_a_step_later() -> None:
    trainer = make_drafter_trainer()
    weights = trainer.model.state_dict()
    holdout = make_holdout()
    counts = []
    for step, has_time in ((1, True), (2, False), (3, True), (4, True)):
        holdout.start_step()
        holdout.add(make_sequence(trainer.model, 10 * step + 2, seed=step, request=(step, 0, 0)))
        if has_time:
            comparison = holdout.compare(trainer, candidate=weights, published=weights)
            counts.append(comparison and comparison.num_tokens)
    assert counts == [10, 20 + 30, 40]
