"""A checksum of a growing token sequence."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence


class Checksum:
    """CRC-32 of the first tokens of a sequence, each as 8 bytes; only new tokens are read."""

    def __init__(self) -> None:
        self._length = self._sum = 0

    def of(self, tokens: Sequence[int], length: int) -> int:
        """Return the checksum of the first `length` tokens.

        Tokens that were summed before must not have changed, unless the checksum of a shorter
        length, without them, was asked for since.
        """
        if length < self._length:
            self._length = self._sum = 0
        new = tokens[self._length : length]
        self._sum = zlib.crc32(struct.pack(f"<{len(new)}q", *new), self._sum)
        self._length = length
        return self._sum
