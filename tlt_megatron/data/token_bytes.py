"""The bytes that a token adds to a text, for stop strings.

Decoding tells them but for tokens that end within a character. The name of such a token does: by
byte-level BPE each letter of it stands for a byte, and SentencePiece has `<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenizers.pre_tokenizers import ByteLevel

_INCOMPLETE = "\ufffd"  # how a tokenizer decodes the first bytes of a character
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Call it with a token id. Special tokens have the bytes of their names."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        name_of: Callable[[int], object],
        anchor: Sequence[int],
    ) -> None:
        """`decode` keeps special tokens. `anchor` are the tokens of a text that stands before:
        the first token of a text may lose its space.
        """
        self._decode = decode
        self._name_of = name_of
        self._anchor = list(anchor)
        self._before = decode(self._anchor)
        self._letters = _bytes_of_letters()
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        text = self._decode([*self._anchor, token_id]).removeprefix(self._before)
        if _INCOMPLETE not in text:
            return text.encode()
        name = str(self._name_of(token_id))
        if match := _FALLBACK.fullmatch(name):
            return bytes([int(match[1], 16)])
        if all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        return text.encode()


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE: printable ones are their own, and the
    letters from U+0100 on stand for the others in order.
    """
    letters = sorted(ByteLevel.alphabet())
    own = [ord(letter) for letter in letters if ord(letter) < 256]
    rest = [byte for byte in range(256) if byte not in own]
    return dict(zip(letters, [*own, *rest], strict=True))
