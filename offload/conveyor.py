"""The conveyor: a ring of device slots through which blocks and layer weights stream in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.link import Event, Link
from triforce_offload.weights.locations import Location, Source


@dataclass(frozen=True)
class Transfer:
    """One contiguous copy of a pass's schedule.

    key: by which compute asks for it, unique in a schedule
    ring: the name of the slots it goes through, none of which is smaller than the source
    """

    key: Hashable
    ring: str
    source: Source


@dataclass(eq=False)
class _Slot:
    buffer: torch.Tensor
    released: Event


@dataclass(frozen=True)
class _Held:
    transfer: Transfer
    slot: _Slot
    ready: Event


class Conveyor:
    """Runs a schedule of transfers ahead of the compute that consumes it.

    Invariants, and why they hold:
    - Transfers start in schedule order and are acquired in schedule order, so one slot a ring is
      enough to make progress: the next to be acquired is always issued before any that could take
      its slot.
    - A slot is written only after the event of its last reader: `release` records it, and the next
      copy into the slot is issued behind it.
    - A slot is read only after its copy: `acquire` makes compute wait for the copy's event.
    - The copies run ahead as far as there are free slots, across layers, since `release` issues
      whatever now has room.
    """

    def __init__(self, link: Link, rings: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """rings: the flat uint8 device buffers of each kind of slot."""
        self._link = link
        # A slot's memory may have had readers before it was a slot, hence the first event.
        self._rings = {
            name: [_Slot(buffer, link.record()) for buffer in buffers]
            for name, buffers in rings.items()
        }
        self._free = {name: deque(slots) for name, slots in self._rings.items()}
        self._waiting: deque[Transfer] = deque()
        self._issued: deque[_Held] = deque()
        self._acquired: dict[Hashable, _Held] = {}

    def start(self, schedule: Iterable[Transfer]) -> None:
        """Begins a pass: fills the free slots at once. The pass before must have ended."""
        if self._waiting or self._issued or self._acquired:
            raise RuntimeError("a pass was started before the one under way ended")
        self._waiting.extend(schedule)
        self._issue()

    def acquire(self, key: Hashable) -> torch.Tensor:
        """The device bytes of the next transfer, which must be `key`, ready for compute.

        Returns a flat uint8 view, valid until `release(key)`. Raises LinkError if its copy failed.
        """
        if not self._issued or self._issued[0].transfer.key != key:
            expected = self._issued[0].transfer.key if self._issued else None
            raise RuntimeError(f"the schedule holds {expected!r} next, {key!r} was asked for")
        held = self._issued.popleft()
        self._acquired[key] = held
        self._link.wait(held.ready)
        return held.slot.buffer[: held.transfer.source.bytes.numel()]

    @contextmanager
    def bring(self, key: Hashable, location: Location) -> Iterator[torch.Tensor]:
        """The bytes of a location on the device, valid inside the block: of one with a source, the
        next transfer, which must be `key`.

        Raises LinkError.
        """
        if location.source is None:
            yield location.read(None)
            return
        yield location.read(self.acquire(key))
        self.release(key)

    def release(self, key: Hashable) -> None:
        """Ends the use of `key`'s bytes: its slot takes the next transfer of its ring."""
        held = self._acquired.pop(key)
        held.slot.released = self._link.record()
        self._free[held.transfer.ring].append(held.slot)
        self._issue()

    def cancel(self) -> None:
        """Ends a pass early: drops what was not issued, waits for what was, frees every slot.

        A copy that fails here is of no interest: nobody will read its bytes, and copies of one
        direction keep their order, so even one that is late cannot land on a later one. Every slot
        is free afterwards, one that an exception caught between two steps included.
        """
        self._waiting.clear()
        for held in (*self._issued, *self._acquired.values()):
            with suppress(LinkError):
                self._link.wait(held.ready)
        # Or whoever waits for the link next would be told of a copy that was dropped here.
        with suppress(LinkError):
            self._link.synchronize()
        self._issued.clear()
        self._acquired.clear()
        for name, slots in self._rings.items():
            for slot in slots:
                slot.released = self._link.record()
            self._free[name] = deque(slots)

    def drop_slots(self, most: int) -> int:
        """Lets go of slots, so that each ring has so many at most, between two passes. Says how
        many it let go of.
        """
        if self._waiting or self._issued or self._acquired:
            raise RuntimeError("slots were dropped in the middle of a pass")
        dropped = sum(max(0, len(slots) - most) for slots in self._rings.values())
        self._rings = {name: slots[:most] for name, slots in self._rings.items()}
        self._free = {name: deque(slots) for name, slots in self._rings.items()}
        return dropped

    def close(self) -> None:
        """Lets go of the slots."""
        self._rings = {}
        self._free = {}

    def _issue(self) -> None:
        while self._waiting and self._free[self._waiting[0].ring]:
            transfer = self._waiting.popleft()
            slot = self._free[transfer.ring].popleft()
            source = transfer.source
            target = slot.buffer[: source.bytes.numel()]
            after = (slot.released, *source.after)
            ready = self._link.to_device(target, source.bytes, after, transfer.key)
            self._issued.append(_Held(transfer, slot, ready))
