"""The text of a response while its tokens come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_WINDOW_TOKENS = 32  # decoded again with each new token; more cost time, fewer lose context
_INCOMPLETE = "\ufffd"  # how a tokenizer decodes the first bytes of a character


class ResponseText:
    """Decodes token by token, up to the first of the `stop` strings.

    Example: with stop ("\\n\\n",) and the texts "a", "\\n", "\\nb", `add` returns False, False,
    True, and `text` is "a". `take` gives out "a" at once. It holds back the line break, because a
    stop string could begin with it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """`decode` is `Tokenizer.decode`."""
        self._decode = decode
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self.text = ""
        self.is_stopped = False  # a stop string has come
        self._num_taken = 0  # characters of `text`
        self._token_ids: list[int] = []
        # The window: tokens from `_start` on are decoded together, and `_num_known` characters of
        # them are in `text`. `_next_start` is a border between characters.
        self._start = self._next_start = self._num_known = 0

    def add(self, token_id: int) -> bool:
        """Add a token. Return whether the text has just reached a stop string."""
        self._token_ids.append(token_id)
        window = self._decode(self._token_ids[self._start :])
        stable = window.rstrip(_INCOMPLETE)
        piece = stable[self._num_known :]
        self._num_known += len(piece)
        if stable == window and len(self._token_ids) - self._next_start >= _WINDOW_TOKENS:
            self._start, self._next_start = self._next_start, len(self._token_ids)
            self._num_known = len(self._decode(self._token_ids[self._start :]))
        return self._append(piece)

    def end(self) -> bool:
        """Add bytes that no character has completed. Return as `add`."""
        return self._append(self._decode(self._token_ids[self._start :])[self._num_known :])

    def _append(self, piece: str) -> bool:
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        hits = [self.text.find(stop, start) for stop in self._stop]
        hit = min((place for place in hits if place >= 0), default=-1)
        if hit >= 0:
            self.text, self.is_stopped = self.text[:hit], True
        return hit >= 0

    def take(self, *, is_ended: bool) -> str:
        """Return the text since the last call, without a possible begin of a stop string unless the
        response has ended.
        """
        end = len(self.text)
        if not is_ended:
            starts = range(max(self._num_taken, end - self._longest_stop + 1), end)
            end = next((i for i in starts if self._may_stop(self.text[i:])), end)
        piece = self.text[self._num_taken : end]
        self._num_taken += len(piece)
        return piece

    def _may_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)
