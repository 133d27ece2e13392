"""The third executor of a schedule: a virtual clock. No tensors, no waiting.

The rules are those of `conveyor` and the links: copies of one direction happen in the order of the
schedule, one at a time; a copy starts when a slot of its ring is free, which is after the last
reader of the slot's bytes before; what computes runs in order and starts after the copies it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offload.link.trace import COMPUTE, COPY_IN, Span


class Copy(NamedTuple):
    """A transfer of the schedule. ring: the name of the slots it goes through."""

    ring: str
    layer: int
    nbytes: int
    block: int = -1


class Work(NamedTuple):
    """What computes next. needs: how many copies, from the first, must have come.

    releases: indices of copies whose slots are free afterwards
    """

    name: str
    seconds: float
    needs: int = 0
    releases: tuple[int, ...] = ()
    layer: int = -1


class Timeline(NamedTuple):
    """When everything of a schedule happened, in seconds from its beginning.

    copies, works: began and ended of each, in the order of the schedule
    """

    copies: list[tuple[float, float]]
    works: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return self.works[-1][1] if self.works else 0.0


def simulate(
    copies: Sequence[Copy],
    works: Sequence[Work],
    slots: Mapping[str, int],
    bytes_per_second: float,
    copies_begin: float = 0.0,
) -> Timeline:
    """Runs a schedule. slots: of each ring. copies_begin: when the first copy may start.

    Raises ValueError for a schedule that could never end: one that needs more slots than there are.
    """
    copied: list[tuple[float, float]] = []
    worked: list[tuple[float, float]] = []
    released: list[float | None] = [None] * len(copies)
    members: dict[str, list[int]] = {ring: [] for ring in slots}
    link_free = copies_begin
    clock = 0.0
    for work in works:
        while len(copied) < work.needs:
            index = len(copied)
            copy = copies[index]
            ring = members[copy.ring]
            start = link_free
            if len(ring) >= slots[copy.ring]:
                free = released[ring[-slots[copy.ring]]]
                if free is None:
                    raise ValueError(f"copy {index} waits for a slot of {copy.ring} for ever")
                start = max(start, free)
            ring.append(index)
            link_free = start + copy.nbytes / bytes_per_second
            copied.append((start, link_free))
        began = max(clock, copied[work.needs - 1][1]) if work.needs else clock
        clock = began + work.seconds
        worked.append((began, clock))
        for index in work.releases:
            released[index] = clock
    return Timeline(copied, worked)


def spans(
    copies: Sequence[Copy], works: Sequence[Work], timeline: Timeline, start: float
) -> list[Span]:
    """A timeline as a trace has it, from `start` on; everything says that it is simulated."""
    told = [
        Span(COPY_IN, copy.ring, start + began, start + ended, _described(copy))
        for copy, (began, ended) in zip(copies, timeline.copies, strict=False)
    ]
    for work, (began, ended) in zip(works, timeline.works, strict=True):
        args: dict[str, Any] = {"simulated": True}
        if work.layer >= 0:
            args["layer"] = work.layer
        told.append(Span(COMPUTE, work.name, start + began, start + ended, args))
    return told


def _described(copy: Copy) -> dict[str, Any]:
    args: dict[str, Any] = {"simulated": True, "layer": copy.layer, "bytes": copy.nbytes}
    return args | ({"block": copy.block} if copy.block >= 0 else {})
