"""Strategies: what is allowed, how they are written."""

from __future__ import annotations

import pytest

from tlt_megatron.config.strategy import OFF, SpeculationStrategy


def test_text_round_trip() -> None:
    strategy = SpeculationStrategy(num_steps=6, topk=4, num_draft_tokens=16)
    assert str(strategy) == "6_4_16"
    assert SpeculationStrategy.parse("6_4_16") == strategy
    assert SpeculationStrategy.parse(str(OFF)) is OFF


def test_candidates_of_a_small_tree_are_counted_by_hand() -> None:
    """2 below the root, then 2 expanded nodes with 2 children each for each of the steps 2, 3, 4."""
    strategy = SpeculationStrategy(num_steps=4, topk=2, num_draft_tokens=14)
    assert strategy.num_candidates == 2 + 3 * 4
    assert strategy.num_rows == 15
    assert not strategy.is_off
    assert not strategy.is_chain


def test_chain_holds_one_token_per_step() -> None:
    chain = SpeculationStrategy(num_steps=5, topk=1, num_draft_tokens=5)
    assert chain.is_chain
    assert chain.num_candidates == 5


@pytest.mark.parametrize(
    "text, values",
    [("ngram_8", (0, 0, 0, 8)), ("4_2_8", (4, 2, 8, 0)), ("off", (0, 0, 0, 0))],
)
def test_text_stands_for_its_numbers(text: str, values: tuple[int, ...]) -> None:
    strategy = SpeculationStrategy.parse(text)
    num_steps, topk, num_draft_tokens, num_retrieved = values
    assert strategy == SpeculationStrategy(
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        num_retrieved=num_retrieved,
    )
    assert str(strategy) == text


def test_retrieved_tokens_alone_are_a_chain_without_a_drafter() -> None:
    strategy = SpeculationStrategy.parse("ngram_8")
    assert (strategy.depth, strategy.num_nodes, strategy.num_rows) == (8, 8, 9)
    assert strategy.is_chain
    assert not strategy.is_learned
    assert not strategy.is_off


def test_off_is_a_value() -> None:
    assert OFF.is_off
    assert OFF.num_rows == 1
    assert SpeculationStrategy(num_steps=0, topk=0, num_draft_tokens=0) == OFF


@pytest.mark.parametrize(
    "values, message",
    [
        ((4, 2, 65), r"num_draft_tokens=65 exceeds the tree of num_steps=4, topk=2 \(at most 14\)"),
        ((4, 1, 5), r"num_draft_tokens=5 exceeds .* \(at most 4\)"),
        ((8, 4, 6), r"num_draft_tokens=6 is below num_steps=8"),
        ((0, 2, 2), r"num_steps=0, topk=2, num_draft_tokens=2: all must be >= 1"),
        ((3, -1, 3), "topk=-1"),
    ],
)
def test_impossible_strategy_is_refused(values: tuple[int, int, int], message: str) -> None:
    num_steps, topk, num_draft_tokens = values
    with pytest.raises(ValueError, match=message):
        SpeculationStrategy(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("num_retrieved", [-1, 4])
def test_retrieved_tokens_are_a_strategy_of_their_own(num_retrieved: int) -> None:
    with pytest.raises(ValueError, match=f"num_retrieved={num_retrieved}"):
        SpeculationStrategy(num_steps=1, topk=1, num_draft_tokens=1, num_retrieved=num_retrieved)
    with pytest.raises(ValueError, match="are two strategies"):
        SpeculationStrategy.parse("4_2_8+ngram_4")


@pytest.mark.parametrize(
    "text",
    [
        *("6_4", "6_4_16_1", "a_b_c", "", "6-4-16", "6_-4_16", "OFF", "0_0_0"),
        *(
            "ngram",
            "ngram_",
            "ngram_0",
            "ngram_-2",
            "+ngram_4",
            "4_2_8ngram_4",
            "4_2_8+",
            "off+ngram_4",
        ),
    ],
)
def test_unreadable_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="strategy="):
        SpeculationStrategy.parse(text)
