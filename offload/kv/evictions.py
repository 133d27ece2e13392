"""Staging slots: device buffers of evicted blocks while the link copies them to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_offload.link.link import Event, Link


class StagingSlots:
    """A ring of buffers of one block each, through which the KV of all sequences is evicted."""

    def __init__(self, buffers: Sequence[torch.Tensor], link: Link) -> None:
        """buffers: flat uint8 buffers on the device."""
        self._buffers = list(buffers)
        self._link = link
        self._left: list[Event | None] = [None] * len(self._buffers)
        self._next = 0
        self._taken = 0

    def take(self) -> torch.Tensor:
        """Return the next buffer, once its previous block has been copied out. Raises LinkError."""
        slot = self._taken = self._next
        self._next = (slot + 1) % len(self._buffers)
        left, self._left[slot] = self._left[slot], None
        if left is not None:
            self._link.wait(left)
        return self._buffers[slot]

    def copied_after(self, written: Event) -> None:
        """Set the event after which the buffer taken last has been copied out."""
        self._left[self._taken] = written

    def forget(self) -> None:
        """Forget all events, after the link has completed all copies. A failed copy is reported
        when its block is next read.
        """
        self._left = [None] * len(self._buffers)

    def close(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
