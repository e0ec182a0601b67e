"""The text of a growing response is the decoded whole, and ends before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tlt_megatron.api.response_text import ResponseText


def by_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer."""
    return bytes(token_ids).decode(errors="replace")


_FALLBACK = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
_FALLBACK.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


def by_fallback(token_ids: Sequence[int]) -> str:
    """SentencePiece's byte tokens: a run of them is text, or all of it is not."""
    return _FALLBACK.decode(list(token_ids))


def read(decode, token_ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, list[str], int]:
    """The text, what was given out after each token, and the number of tokens until the end."""
    text, pieces, count = ResponseText(decode, stop), list[str](), 0
    for token_id in token_ids:
        count += 1
        if text.add(token_id):
            break
        pieces.append(text.take(is_ended=False))
    else:
        text.end()
    return text.text, [*pieces, text.take(is_ended=True)], count


@pytest.mark.parametrize("decode", [by_bytes, by_fallback])
@given(st.lists(st.sampled_from([*"ab €é😀".encode(), 0xC3, 0xFF, 0xE2]), max_size=120))
def test_any_bytes_read_as_the_whole(decode, token_ids: list[int]) -> None:
    text, pieces, _ = read(decode, token_ids)
    if decode is by_bytes or "\ufffd" not in decode(token_ids):
        assert text == decode(token_ids)
    assert "".join(pieces) == text


@given(
    st.text(alphabet="ab€\n", max_size=80),
    st.lists(st.text(alphabet="ab€\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_it_ends_before_the_first_stop_string(whole: str, stop: list[str]) -> None:
    text, pieces, count = read(by_bytes, whole.encode(), stop)
    places = [whole.find(each) for each in stop if each in whole]
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    assert "".join(pieces) == text
    if not places:
        assert (text, count) == (whole, len(whole.encode()))
    else:  # the first token that completes one of them
        end = min(ends)
        assert count == len(whole[:end].encode())
        hits = [whole[:end].find(each) for each in stop if each in whole[:end]]
        assert text == whole[: min(hits)]


def test_a_possible_begin_of_a_stop_string_is_held_back() -> None:
    assert read(by_bytes, b"a\nb\n\nc", ["\n\n"]) == ("a\nb", ["a", "", "\nb", "", ""], 5)
