"""The text of a response while its tokens come, and what a stop string cuts from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlt_megatron.stop_strings import StopStrings

_WINDOW_TOKENS = 32  # decoded again with each new token; more cost time, fewer lose context
_INCOMPLETE = "\ufffd"  # how a tokenizer decodes the first bytes of a character


class ResponseText:
    """Decodes token by token. The engine ends the response at a stop string, the text before it.

    Example: with the stop string "\\n\\n" and the texts "a", "\\n", "\\nb", `text` is "a" after
    `end`. `take` gives out "a" at once. It holds back the line break, because a stop string could
    begin with it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: StopStrings | None = None
    ) -> None:
        """`decode` is `Tokenizer.decode`."""
        self._decode = decode
        self._stop = stop
        self._state: bytes | None = b""  # of `stop`
        # Bytes at the end of the tokens: a possible begin of a stop string, or from a whole one on.
        self._held_bytes = 0
        self.text = ""
        self._num_taken = 0  # characters of `text`
        self._token_ids: list[int] = []
        # The window: tokens from `_start` on are decoded together, and `_num_known` characters of
        # them are in `text`. `_next_start` is a border between characters.
        self._start = self._next_start = self._num_known = 0

    def add(self, token_id: int) -> None:
        """Add a token."""
        self._token_ids.append(token_id)
        window = self._decode(self._token_ids[self._start :])
        stable = window.rstrip(_INCOMPLETE)
        piece = stable[self._num_known :]
        self._num_known += len(piece)
        if stable == window and len(self._token_ids) - self._next_start >= _WINDOW_TOKENS:
            self._start, self._next_start = self._next_start, len(self._token_ids)
            self._num_known = len(self._decode(self._token_ids[self._start :]))
        self.text += piece
        if self._stop is not None and self._state is not None:
            before, self._state = self._state, self._stop.advance(self._state, token_id)
            self._held_bytes = (
                self._stop.size_of_end(before, token_id)
                if self._state is None
                else len(self._state)
            )

    def end(self) -> None:
        """Add bytes that no character has completed. Cut the text before a stop string."""
        self.text += self._decode(self._token_ids[self._start :])[self._num_known :]
        if self._state is None:
            self.text = self.text[: max(0, len(self.text) - len(self._held()))]

    def take(self, *, is_ended: bool) -> str:
        """Return the text since the last call, without a possible begin of a stop string unless the
        response has ended.
        """
        num_held = 0 if is_ended else len(self._held().rstrip(_INCOMPLETE))
        piece = self.text[self._num_taken : max(self._num_taken, len(self.text) - num_held)]
        self._num_taken += len(piece)
        return piece

    def _held(self) -> str:
        """Return the text of the bytes that are held. Special tokens have none."""
        parts, num_bytes = [b""], self._held_bytes
        for token_id in reversed(self._token_ids):
            if num_bytes <= 0:
                break
            assert self._stop is not None
            own = self._stop.token_bytes(token_id)
            if self._decode([token_id, token_id]):  # a text alone may lose its first space
                parts.append(own[-num_bytes:])
            num_bytes -= len(own)
        return b"".join(reversed(parts)).decode(errors="replace")
