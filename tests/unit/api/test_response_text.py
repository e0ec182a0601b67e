"""The text of a growing response is the decoded whole, and ends before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tlt_megatron.api.response_text import ResponseText
from tlt_megatron.stop_strings import StopStrings

# The same examples each time, however slow the machine is.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def by_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer."""
    return bytes(token_ids).decode(errors="replace")


_FALLBACK = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
_FALLBACK.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


def by_fallback(token_ids: Sequence[int]) -> str:
    """SentencePiece's byte tokens: a run of them is text, or all of it is not."""
    return _FALLBACK.decode(list(token_ids))


def read(
    decode,
    token_ids: Sequence[int],
    stop: Sequence[str] = (),
    pieces_of=lambda token: bytes([token]),
) -> tuple[str, list[str], int]:
    """The text, what was given out after each token, and the number of tokens until the end."""
    strings = StopStrings(stop, pieces_of)
    text, pieces = ResponseText(decode, strings), list[str]()
    count = strings.run(b"", token_ids)[0]  # as the engine ends it
    for token_id in token_ids[:count]:
        text.add(token_id)
        pieces.append(text.take(is_ended=False))
    text.end()
    return text.text, [*pieces, text.take(is_ended=True)], count


@pytest.mark.parametrize("decode", [by_bytes, by_fallback])
@STEADY
@given(st.lists(st.sampled_from([*"ab €é😀".encode(), 0xC3, 0xFF, 0xE2]), max_size=120))
def test_any_bytes_read_as_the_whole(decode, token_ids: list[int]) -> None:
    text, pieces, _ = read(decode, token_ids)
    if decode is by_bytes or "\ufffd" not in decode(token_ids):
        assert text == decode(token_ids)
    assert "".join(pieces) == text


@STEADY
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
    assert read(by_bytes, b"a\nb\n\nc", ["\n\n"]) == ("a\nb", ["a", "", "\nb", "", "", ""], 5)


@STEADY
@given(
    st.lists(st.sampled_from(["a", "ab", "b€", "é", "<x>"]), max_size=40),
    st.lists(
        st.sampled_from(["ba", "€", "<x>", "a<x>", "b<x>é", "aab", "x"]), min_size=1, max_size=3
    ),
)
def test_a_special_token_stops_with_its_name_and_is_no_part_of_the_text(
    tokens: list[str], stop: list[str]
) -> None:
    """The text is what is visible of the bytes before the first complete string."""
    names = dict(enumerate(tokens))

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(names[i] for i in token_ids if names[i] != "<x>")

    text, pieces, count = read(decode, list(names), stop, lambda token: names[token].encode())
    whole = "".join(tokens[:count])
    places = [whole.find(each) for each in stop if each in whole]
    assert text == whole[: min(places, default=None)].replace("<x>", "").replace("<", "")
    assert "".join(pieces) == text
