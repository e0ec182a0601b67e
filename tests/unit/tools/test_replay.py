"""Off-line evaluation on tables small enough to work out by hand."""

from __future__ import annotations

import pytest

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.selector import FixedSelector
from tools.bench.replay import PassTrace, RecordingSelector, TraceTable, replay

CHAIN = SpeculationStrategy.parse("2_1_2")


def small_table() -> TraceTable:
    """Batch 1: plain 1 token in 1 s, the chain 2 in 1 s.

    Batch 8: plain 8 in 1 s, the chain 16 in 4 s.
    """
    return TraceTable(
        [
            PassTrace("off", 1, (), 1.0),
            PassTrace("2_1_2", 1, (1, 1), 1.5),
            PassTrace("2_1_2", 1, (0, 0), 0.5),
            PassTrace("off", 8, (), 1.0),
            PassTrace("2_1_2", 8, (4, 4), 4.0),
            PassTrace("2_1_2", 5, (4, 4), 4.0),  # on the way to the end: left out
        ],
        [1, 8],
    )


def test_fixed_strategy_against_the_oracle_by_hand() -> None:
    """Two passes at batch 1 and one at batch 8 with the chain: 4 + 16 tokens in 2 + 4 s.

    The oracle takes 2 + 2 s.
    """
    assert replay(FixedSelector(CHAIN), small_table(), [1, 1, 8]) == pytest.approx(4.0 / 6.0)


def test_batch_sizes_are_taken_as_the_nearest_recorded_one() -> None:
    """Ratios: 2 is 2 times 1 and a fourth of 8; 3 is 3 times 1 and 1 / 2.67 of 8."""
    recorder = RecordingSelector(OFF)
    replay(recorder, small_table(), [1, 2, 3, 8, 100])
    assert [each.batch_size for each in recorder.passes] == [1, 1, 8, 8, 8]


def test_passes_are_drawn_in_recorded_order() -> None:
    recorder = RecordingSelector(CHAIN)
    replay(recorder, small_table(), [1, 1, 1])
    assert [each.num_committed for each in recorder.passes] == [3, 1, 3]
    assert [each.seconds for each in recorder.passes] == [1.0, 1.0, 1.0]  # the median of both


def test_a_few_slow_passes_do_not_make_a_strategy_slow() -> None:
    passes = [PassTrace("off", 1, (), seconds) for seconds in (1.0, 1.0, 1.0, 100.0)]
    assert TraceTable(passes, [1]).cells[OFF, 1].tokens_per_s == 1.0


def test_tables_with_holes_are_refused() -> None:
    passes = [
        PassTrace("off", 1, (), 1.0),
        PassTrace("2_1_2", 1, (1, 0), 1.0),
        PassTrace("off", 2, (), 1.0),
    ]
    with pytest.raises(ValueError, match="strategy=2_1_2 was not recorded at batch_size=2"):
        TraceTable(passes, [1, 2])
    with pytest.raises(ValueError, match="no plain pass"):
        TraceTable(passes[1:2], [1])
    other = FixedSelector(SpeculationStrategy.parse("3_4_8"))
    with pytest.raises(ValueError, match="strategy=3_4_8 was chosen, recorded are off, 2_1_2"):
        replay(other, TraceTable(passes, [1]), [1])
