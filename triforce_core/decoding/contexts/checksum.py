"""A checksum of a text that grows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence


class Checksum:
    """CRC-32 of the first tokens of a text, each as 8 bytes; only what is new is read."""

    def __init__(self) -> None:
        self._length = self._sum = 0

    def of(self, tokens: Sequence[int], length: int) -> int:
        """Of the first `length` tokens. What was summed before must not have changed, but for what
        lies beyond a shorter length that was asked for since.
        """
        if length < self._length:
            self._length = self._sum = 0
        new = tokens[self._length : length]
        self._sum = zlib.crc32(struct.pack(f"<{len(new)}q", *new), self._sum)
        self._length = length
        return self._sum
