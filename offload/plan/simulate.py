"""A schedule on a virtual clock. No tensors, no waiting.

The rules are those of `conveyor` and the links: copies of one direction happen in the order of the
schedule, one at a time; a copy starts when a slot of its ring is free, which is after the last
reader of the slot's bytes before; what computes runs in order and starts after the copies it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from triforce_offload.link.trace import COMPUTE, COPY_IN, Span
from triforce_offload.schedule import WEIGHTS, Crossing


class Work(NamedTuple):
    """A piece of compute and its seconds.

    needs: how many crossings, from the first, must have come
    releases: indices of crossings whose slots are free afterwards
    layer: -1 for what belongs to none
    """

    name: str
    seconds: float
    needs: int = 0
    releases: tuple[int, ...] = ()
    layer: int = -1


class ReadFromDisk(NamedTuple):
    """Layers whose weights are read from their files, and how fast."""

    layers: frozenset[int]
    bytes_per_second: float


class Timeline(NamedTuple):
    """When everything of a schedule happened, in seconds from its beginning.

    crossings, works: began and ended of each, in the order of the schedule
    """

    crossings: list[tuple[float, float]]
    works: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return self.works[-1][1] if self.works else 0.0


def simulate(
    crossings: Sequence[Crossing],
    works: Sequence[Work],
    slots: Mapping[str, int],
    bytes_per_second: float,
    copies_begin: float = 0.0,
    read_from_disk: ReadFromDisk | None = None,
) -> Timeline:
    """Runs a schedule. slots: of each ring. copies_begin: when the first copy may start.
    read_from_disk: layers whose weights come no faster than the disk gives them.

    Raises ValueError for a schedule that could never end: one that needs more slots than there are.
    """
    crossed: list[tuple[float, float]] = []
    worked: list[tuple[float, float]] = []
    released: list[float | None] = [None] * len(crossings)
    members: dict[str, list[int]] = {ring: [] for ring in slots}
    link_free = copies_begin
    clock = 0.0
    for _, seconds, needs, releases, _ in works:
        while len(crossed) < needs:
            index = len(crossed)
            ring, layer, _, nbytes, _ = crossings[index]
            earlier = members[ring]
            start = link_free
            if len(earlier) >= slots[ring]:
                free = released[earlier[-slots[ring]]]
                if free is None:
                    raise ValueError(f"crossing {index} waits for a slot of {ring} for ever")
                start = max(start, free)
            earlier.append(index)
            rate = bytes_per_second
            if read_from_disk and ring == WEIGHTS and layer in read_from_disk.layers:
                rate = min(rate, read_from_disk.bytes_per_second)
            link_free = start + nbytes / rate
            crossed.append((start, link_free))
        began = max(clock, crossed[needs - 1][1]) if needs else clock
        clock = began + seconds
        worked.append((began, clock))
        for index in releases:
            released[index] = clock
    return Timeline(crossed, worked)


def spans(
    crossings: Sequence[Crossing], works: Sequence[Work], timeline: Timeline, start: float
) -> list[Span]:
    """A timeline as a trace has it, from `start` on; everything says that it is simulated."""
    shown = [
        Span(COPY_IN, crossing.ring, start + began, start + ended, _described(crossing))
        for crossing, (began, ended) in zip(crossings, timeline.crossings, strict=False)
    ]
    for work, (began, ended) in zip(works, timeline.works, strict=True):
        args: dict[str, Any] = {"simulated": True}
        if work.layer >= 0:
            args["layer"] = work.layer
        shown.append(Span(COMPUTE, work.name, start + began, start + ended, args))
    return shown


def _described(crossing: Crossing) -> dict[str, Any]:
    args: dict[str, Any] = {"simulated": True, "layer": crossing.layer, "bytes": crossing.nbytes}
    return args if crossing.block is None else args | {"block": crossing.block}
