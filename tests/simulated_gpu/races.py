"""Who used which bytes when: two uses that no event orders are a race, whatever came first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class RaceError(AssertionError):
    """Two streams, or a stream and the host, use the same bytes in no certain order."""


@dataclass(frozen=True)
class Access:
    """One use of bytes `start` to `end`: the `tick`-th operation of a stream."""

    start: int
    end: int
    stream: int
    tick: int
    writes: bool
    what: str


class AccessLog:
    """The uses of one allocation that a later use may still have to come behind.

    Order is that of vector clocks (Lamport; Mattern): a stream's clock holds, for each stream, how
    many of its operations are sure to be done before the next one of this stream.
    """

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def add(self, new: Access, clock: Mapping[int, int]) -> None:
        """clock: of the stream that uses the bytes. Raises RaceError."""
        kept = []
        for old in self._accesses:
            if old.end <= new.start or new.end <= old.start:
                kept.append(old)
                continue
            if (old.writes or new.writes) and clock.get(old.stream, 0) < old.tick:
                raise RaceError(
                    f"{new.what} on stream {new.stream} {_uses(new)} bytes that {old.what} on "
                    f"stream {old.stream} {_uses(old)}, and waits for no event of it"
                )
            covered = new.start <= old.start and old.end <= new.end
            superseded = new.writes or (old.stream == new.stream and not old.writes)
            if not (covered and superseded):
                kept.append(old)
        kept.append(new)
        self._accesses = kept

    def last_of_each_stream(self) -> dict[int, Access]:
        """The newest use by every stream."""
        newest: dict[int, Access] = {}
        for access in self._accesses:
            if access.stream not in newest or newest[access.stream].tick < access.tick:
                newest[access.stream] = access
        return newest


def _uses(access: Access) -> str:
    return "writes" if access.writes else "reads"
