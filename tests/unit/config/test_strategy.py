"""Strategies: what is allowed, how they are written."""

from __future__ import annotations

import pytest

from tlt_megatron.config.strategy import SpeculationStrategy

NAMES = ("num_steps", "topk", "num_draft_tokens", "num_retrieved")


@pytest.mark.parametrize(
    ("text", "values", "num_rows", "switches"),
    [  # num_steps, topk, num_draft_tokens, num_retrieved; is_off, is_learned, is_chain
        ("off", (0, 0, 0, 0), 1, (True, False, True)),
        ("ngram_8", (0, 0, 0, 8), 9, (False, False, True)),
        ("5_1_5", (5, 1, 5, 0), 6, (False, True, True)),
        ("4_2_14", (4, 2, 14, 0), 15, (False, True, False)),
    ],
)
def test_a_text_stands_for_its_numbers(
    text: str, values: tuple[int, ...], num_rows: int, switches: tuple[bool, ...]
) -> None:
    strategy = SpeculationStrategy.parse(text)
    assert strategy == SpeculationStrategy(**dict(zip(NAMES, values, strict=True)))
    assert str(strategy) == text
    assert strategy.num_rows == num_rows
    assert (strategy.is_off, strategy.is_learned, strategy.is_chain) == switches


def test_candidates_are_counted_by_hand() -> None:
    """2 below the root, then 2 expanded nodes with 2 children each for each of the steps 2, 3,
    4.
    """
    assert SpeculationStrategy.parse("4_2_14").num_candidates == 2 + 3 * 4
    assert SpeculationStrategy.parse("5_1_5").num_candidates == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((4, 2, 65, 0), r"=65: must be <= 14, the tree of num_steps=4, topk=2"),
        ((4, 1, 5, 0), r"num_draft_tokens=5: must be <= 4, the tree"),
        ((8, 4, 6, 0), r"num_draft_tokens=6: must be >= num_steps=8"),
        ((0, 2, 2, 0), r"num_steps, topk, num_draft_tokens=\(0, 2, 2\): must be all >= 1"),
        ((3, -1, 3, 0), r"topk, num_draft_tokens=\(3, -1, 3\): must be all >= 1"),
        ((1, 1, 1, -1), "num_retrieved=-1"),
        ((1, 1, 1, 4), "num_retrieved=4"),
    ],
)
def test_impossible_strategy_is_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationStrategy(**dict(zip(NAMES, values, strict=True)))


UNREADABLE = "6_4 6_4_16_1 a_b_c 6-4-16 6_-4_16 OFF 0_0_0 ngram ngram_ ngram_0 ngram_-2 +ngram_4"


@pytest.mark.parametrize("text", [*UNREADABLE.split(), "4_2_8+", "off+ngram_4"])
def test_unreadable_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="strategy="):
        SpeculationStrategy.parse(text)
    with pytest.raises(ValueError, match="are two strategies"):
        SpeculationStrategy.parse("4_2_8+ngram_4")
