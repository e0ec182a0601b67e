"""Messages over a byte pipe between the trainer and its reward workers: a length, then pickled plain values.

Pickle, because `extra_info` of a parquet row holds dates and bytes, which JSON does not carry. Both ends are
processes of one user running one program.
"""

from __future__ import annotations

import pickle
import struct

_LENGTH = struct.Struct("!Q")


def pack_frame(message: tuple[object, ...]) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes, fed in any portions, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while start + _LENGTH.size <= len(self._buffer):
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
