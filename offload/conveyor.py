"""The conveyor: rings of device slots through which KV blocks and layer weights stream in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.link import Event, Link
from triforce_offload.weights.locations import Located, Source


@dataclass(frozen=True)
class Transfer:
    """One contiguous copy of a pass's schedule.

    key: the key by which compute asks for it, unique in a schedule
    ring: name of the ring of slots that it goes through; no slot is smaller than the source
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
    """Runs a schedule of transfers ahead of the compute that consumes them.

    Invariants, and why they hold:
    - Transfers start in schedule order and are acquired in schedule order, so one slot per ring is
      enough to make progress: the next transfer to be acquired is always issued before any that
      could take its slot.
    - A slot is written only after the event of its last reader: `release` records the event, and
      the next copy into the slot waits for it.
    - A slot is read only after its copy: `acquire` makes compute wait for the copy's event.
    - Copies run ahead as far as there are free slots, across layers, because `release` issues every
      transfer that now has a slot.
    """

    def __init__(self, link: Link, rings: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """rings: the flat uint8 device buffers of each kind of slot."""
        self._link = link
        # Kernels may have read a slot's memory before it became a slot, hence the first event.
        self._rings = {
            name: [_Slot(buffer, link.record()) for buffer in buffers]
            for name, buffers in rings.items()
        }
        self._free = {name: deque(slots) for name, slots in self._rings.items()}
        self._waiting: deque[Transfer] = deque()
        self._issued: deque[_Held] = deque()
        self._acquired: dict[Hashable, _Held] = {}

    def start(self, schedule: Iterable[Transfer]) -> None:
        """Begin a pass: fill the free slots at once. The previous pass must have ended."""
        if self._waiting or self._issued or self._acquired:
            raise RuntimeError("a pass was started before the one under way ended")
        self._waiting.extend(schedule)
        self._issue()

    def acquire(self, key: Hashable) -> torch.Tensor:
        """Return the device bytes of the next transfer, which must be `key`, ready for compute.

        The result is a flat uint8 view, valid until `release(key)`. Raises LinkError if its copy
        failed.
        """
        if not self._issued or self._issued[0].transfer.key != key:
            expected = self._issued[0].transfer.key if self._issued else None
            raise RuntimeError(f"the schedule holds {expected!r} next, {key!r} was asked for")
        held = self._issued.popleft()
        self._acquired[key] = held
        self._link.wait(held.ready)
        return held.slot.buffer[: held.transfer.source.bytes.numel()]

    @contextmanager
    def bring(self, key: Hashable, location: Located) -> Iterator[torch.Tensor]:
        """Yield the bytes of a location on the device, valid inside the block. If the location has
        a source, `key` must be the next transfer.

        Raises LinkError.
        """
        if location.source is None:
            yield location.memory
            return
        yield self.acquire(key)
        self.release(key)

    def release(self, key: Hashable) -> None:
        """End the use of `key`'s bytes. The next transfer of the ring takes its slot."""
        held = self._acquired.pop(key)
        held.slot.released = self._link.record()
        self._free[held.transfer.ring].append(held.slot)
        self._issue()

    def cancel(self) -> None:
        """End a pass early: drop the transfers that were not issued, wait for the others, free
        every slot.

        A copy that fails here does not matter: nothing will read its bytes, and copies of one
        direction keep their order, so even a late one cannot overwrite a later one. Every slot is
        free afterwards, even if an exception interrupted the conveyor between two steps.
        """
        self._waiting.clear()
        for held in (*self._issued, *self._acquired.values()):
            with suppress(LinkError):
                self._link.wait(held.ready)
        # Otherwise the next call that waits for the link would report a copy that was dropped here.
        with suppress(LinkError):
            self._link.synchronize()
        self._issued.clear()
        self._acquired.clear()
        for name, slots in self._rings.items():
            for slot in slots:
                slot.released = self._link.record()
            self._free[name] = deque(slots)

    def close(self) -> None:
        """Drop all slots."""
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
