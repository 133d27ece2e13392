"""Runs a schedule on a virtual clock, without tensors and without waiting.

The rules are those of `conveyor` and the links. Copies of one direction run one at a time in
schedule order. A copy starts when a slot of its ring is free, which is after the last reader of the
slot's previous bytes. Compute runs in order and starts after the copies that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from triforce_offload.link.trace import COMPUTE, COPY_IN, PROCESSOR, Span
from triforce_offload.schedule import WEIGHTS, Crossing


class Work(NamedTuple):
    """A piece of compute and its seconds.

    needs: number of crossings, counted from the first, that must be complete before it starts
    releases: indices of crossings whose slots are free after it
    layer: index of its layer; -1 if it belongs to none
    by_processor: whether the processor computes the layer
    meanwhile: seconds that the processor computes on the side once this piece has ended
    joins: whether the piece needs what the processor computed on the side
    """

    name: str
    seconds: float
    needs: int = 0
    releases: tuple[int, ...] = ()
    layer: int = -1
    by_processor: bool = False
    meanwhile: float = 0.0
    joins: bool = False


class ReadFromDisk(NamedTuple):
    """Layers whose weights are read from their files, and the rate of the disk."""

    layers: frozenset[int]
    bytes_per_second: float


class Timeline(NamedTuple):
    """When everything in a schedule happened, in seconds from its start.

    crossings, works: start and end of each, in schedule order
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
    """Run a schedule.

    slots: number of slots of each ring
    copies_begin: time at which the first copy may start
    read_from_disk: layers whose weights cannot cross faster than the disk reads them

    Raises ValueError for a schedule that could never end because it needs more slots than there
    are.
    """
    crossed: list[tuple[float, float]] = []
    worked: list[tuple[float, float]] = []
    released: list[float | None] = [None] * len(crossings)
    members: dict[str, list[int]] = {ring: [] for ring in slots}
    link_free = copies_begin
    clock = processor_free = 0.0
    for work in works:
        needs = work.needs
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
        if work.joins:
            began = max(began, processor_free)
        clock = began + work.seconds
        if work.meanwhile:
            processor_free = clock + work.meanwhile
        worked.append((began, clock))
        for index in work.releases:
            released[index] = clock
    return Timeline(crossed, worked)


def spans(
    crossings: Sequence[Crossing], works: Sequence[Work], timeline: Timeline, start: float
) -> list[Span]:
    """Return a timeline as trace spans that begin at `start`; each span is marked as simulated."""
    shown = [
        Span(COPY_IN, crossing.ring, start + began, start + ended, _described(crossing))
        for crossing, (began, ended) in zip(crossings, timeline.crossings, strict=False)
    ]
    for work, (began, ended) in zip(works, timeline.works, strict=True):
        args: dict[str, Any] = {"simulated": True}
        if work.layer >= 0:
            args["layer"] = work.layer
        track = PROCESSOR if work.by_processor else COMPUTE
        shown.append(Span(track, work.name, start + began, start + ended, args))
        if work.meanwhile:
            later = start + ended
            shown.append(Span(PROCESSOR, "attention", later, later + work.meanwhile, args))
    return shown


def _described(crossing: Crossing) -> dict[str, Any]:
    args: dict[str, Any] = {"simulated": True, "layer": crossing.layer, "bytes": crossing.nbytes}
    return args if crossing.block is None else args | {"block": crossing.block}
