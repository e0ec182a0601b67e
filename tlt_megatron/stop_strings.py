"""Stop strings: texts that end a response, as an automaton over the bytes of its tokens.

The engines advance it over committed tokens, whatever drafted them. So a response ends at the same
token with any strategy, and a token may end or begin within a stop string or within a character.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

MAX_STRINGS = 64
MAX_BYTES = 256  # of one string, in UTF-8

TokenBytes = Callable[[int], bytes]


class StopStrings:
    """Some stop strings. A response ends with the token that completes one of them.

    A state is the longest end of the bytes so far with which a string begins, and None once a
    string is complete. A step is computed at its first use and kept.

    Example: stop "ab", tokens "xa" and "bc": `advance(b"", xa)` is b"a", `advance(b"a", bc)` None.
    """

    def __init__(self, strings: Iterable[str], token_bytes: TokenBytes) -> None:
        """`token_bytes` returns the bytes of a token, as they stand in a text."""
        self.strings = tuple(strings)
        self.token_bytes = token_bytes
        self.start: bytes | None = b""  # the state before the first token
        self._stops = [text.encode() for text in self.strings]
        self._longest = max(map(len, self._stops), default=0) - 1  # bytes of a state
        self._begins = {stop[:size] for stop in self._stops for size in range(1, len(stop))}
        self._steps: dict[tuple[bytes, int], bytes | None] = {}

    def advance(self, state: bytes | None, token_id: int) -> bytes | None:
        """Return the state after one more token."""
        if state is None:
            return None
        try:
            return self._steps[state, token_id]
        except KeyError:
            after = self._steps[state, token_id] = self._step(state, token_id)
            return after

    def _step(self, state: bytes, token_id: int) -> bytes | None:
        text = state + self.token_bytes(token_id)
        if any(stop in text for stop in self._stops):
            return None
        ends = (text[start:] for start in range(max(0, len(text) - self._longest), len(text)))
        return next((end for end in ends if end in self._begins), b"")

    def run(self, state: bytes | None, token_ids: Sequence[int]) -> tuple[int, bytes | None]:
        """Return the number of tokens up to the one that completes a string, or else of all, and
        the state after them.
        """
        for index, token_id in enumerate(token_ids):
            state = self.advance(state, token_id)
            if state is None:
                return index + 1, None
        return len(token_ids), state

    def after(self, token_ids: Sequence[int]) -> StopStrings:
        """Return the same strings for a response that goes on after these tokens."""
        later = copy.copy(self)
        later.start = self.run(self.start, token_ids)[1]
        return later

    def size_of_end(self, state: bytes, token_id: int) -> int:
        """Return the bytes from the begin of the first complete string to the end of `token_id`,
        which completes it after `state`.
        """
        text = state + self.token_bytes(token_id)
        return len(text) - min(text.find(stop) for stop in self._stops if stop in text)


def check_stop_strings(given: object, name: str) -> tuple[str, ...]:
    """Return one string or several as a tuple. ValueError for what cannot be stop strings, by its
    `name`.
    """
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name}={given!r:.80}: must be a string or a list of strings")
    if len(given) > MAX_STRINGS:
        raise ValueError(f"{name} has {len(given)} strings: must be at most {MAX_STRINGS}")
    for index, text in enumerate(given):
        _check_string(text, f"{name}[{index}]")
    return tuple(dict.fromkeys(given))


def _check_string(text: object, name: str) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}={text!r:.80}: must be a string that is not empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is {text[error.start]!a}, half of a surrogate pair"
        ) from None
    if size > MAX_BYTES:
        raise ValueError(f"{name}={text!r:.40} has {size} bytes: must have at most {MAX_BYTES}")
