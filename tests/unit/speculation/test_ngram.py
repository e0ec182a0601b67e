"""The n-gram index against a search through everything that was ever appended."""

from __future__ import annotations

import random

import pytest
import torch

from tlt_megatron.speculation.ngram import IndexedText, NgramIndex
from tlt_megatron.speculation.tree import UNUSED

SIZES = (5, 3, 2)


class SlowIndex:
    """The definition: every token with all tokens before it, in the order in which they came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int], int]] = []

    def append(self, prompt_id: str, text: list[int], tokens: list[int]) -> None:
        for token in tokens:
            self.events.append((prompt_id, list(text), token))
            text.append(token)

    def propose(self, prompt_id: str, text: list[int], num_tokens: int) -> list[int]:
        text, found = list(text), []
        while len(found) < num_tokens and (token := self._next(prompt_id, text)) is not None:
            text.append(token)
            found.append(token)
        return found

    def _next(self, prompt_id: str, text: list[int]) -> int | None:
        for size in SIZES:
            context = text[-size:]
            seen = [
                (key, token)
                for key, before, token in reversed(self.events)
                if context in [before[-each:] for each in SIZES]
            ]
            own = [token for key, token in seen if key == prompt_id]
            if seen:
                return own[0] if own else seen[0][1]
        return None


def rows(token_ids_BN: torch.Tensor) -> list[list[int]]:
    """The tokens found; only UNUSED may stand behind them."""
    found = [[token for token in row if token != UNUSED] for row in token_ids_BN.tolist()]
    for row, tokens in zip(token_ids_BN.tolist(), found, strict=True):
        assert row == tokens + [UNUSED] * (len(row) - len(tokens))
    return found


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_proposals_equal_a_search_through_all_texts(vocab: int) -> None:
    generator = random.Random(vocab)
    for _ in range(6):
        index, slow = NgramIndex(sizes=SIZES), SlowIndex()
        prompts = {
            key: [generator.randrange(vocab) for _ in range(generator.randrange(1, 9))]
            for key in "abc"
        }
        texts, slow_texts = [], []
        for key in "aabbbc":
            texts.append(index.start(key, prompts[key]))
            slow_texts.append((key, []))
            if key not in [k for k, _ in slow_texts[:-1]]:
                slow.append(key, slow_texts[-1][1], prompts[key])
            else:
                slow_texts[-1][1].extend(prompts[key])
        for _ in range(12):
            new = [
                [generator.randrange(vocab) for _ in range(generator.randrange(4))] for _ in texts
            ]
            index.append(texts, new)
            for (key, text), tokens in zip(slow_texts, new, strict=True):
                slow.append(key, text, tokens)
            found = rows(index.propose(texts, 6))
            assert found == [slow.propose(key, text, 6) for key, text in slow_texts]


def test_sibling_of_a_known_prompt_teaches_nothing() -> None:
    """Indexing the prompt again would cost as much as a short response, and bury what the others
    wrote.
    """
    index = NgramIndex(sizes=(2,))
    index.append([index.start("a", [5, 1, 2, 3, 1, 2])], [[9]])
    assert rows(index.propose([index.start("a", [5, 1, 2, 3, 1, 2])], 1)) == [[9]]


def test_what_other_prompts_wrote_outlives_one_change_of_generation() -> None:
    index = NgramIndex(sizes=(2,), max_entries=100)
    index.start("a", [1, 2, 3])
    found = []
    for first in range(100, 400, 30):
        index.append([index.start("b", [])], [list(range(first, first + 30))])
        found.append(rows(index.propose([index.start("c", [1, 2])], 1))[0])
    assert found[0] == [3]
    assert found[-1] == []


def test_any_token_of_a_large_vocabulary_comes_back() -> None:
    """Among them are the surrogates of UTF-16 (from 0xD800 on) and the last code point."""
    tokens = [0, 1, 255, 256, 0xD7FE, 0xD7FF, 0xDBFF, 0xDFFE, 0xDFFF, 0xFFFF, 0x10FFFE]
    index = NgramIndex()
    index.start("a", [7, 8, *tokens])
    assert rows(index.propose([index.start("a", [7, 8])], len(tokens))) == [tokens]


def count_entries(index: NgramIndex) -> int:
    both = (index._newer, index._older)
    return sum(len(t) for each in both for t in (each.of_all, *each.by_prompt.values()))


def test_room_is_bounded() -> None:
    """All tokens differ, so that each makes one entry for each size, in its prompt's table and in
    that of all texts.
    """
    index, max_entries, num_tokens = NgramIndex(sizes=(3, 2), max_entries=400), 400, 0
    for number in range(60):
        texts = [index.start(str(number), [])]
        for _ in range(3):
            new = list(range(num_tokens, num_tokens + 7))
            index.append(texts, [new])
            num_tokens += 7
            assert count_entries(index) <= max_entries + 2 * 2 * 7
    assert count_entries(index) > max_entries // 3


def forgetful_index() -> tuple[NgramIndex, IndexedText]:
    """An index that has given up the table of a prompt, and a response to it."""
    index = NgramIndex(sizes=(2,), max_entries=100)
    old = index.start("old", [1, 2, 3])
    for first in range(1000, 1300, 60):
        index.append([index.start("new", [])], [list(range(first, first + 60))])
    return index, old


def test_response_goes_on_when_the_table_of_its_prompt_was_given_up() -> None:
    index, old = forgetful_index()
    assert rows(index.propose([index.start("old", [1, 2])], 1)) == [[]]
    index.append([old], [[4, 1, 2, 3, 4]])
    index.append([old], [[1, 2]])
    assert rows(index.propose([old], 3)) == [[3, 4, 1]]


def test_response_without_a_table_in_the_index_takes_no_room_from_others() -> None:
    index, old = forgetful_index()
    index.start("kept", [7, 8, 5])
    index.start("other", [7, 8, 6])
    index.append([old], [list(range(2000, 2200))])
    assert rows(index.propose([index.start("kept", [7, 8])], 1)) == [[5]]
