"""Staging slots: where blocks lie on the device while the link carries them to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_offload.link.link import Event, Link


class StagingSlots:
    """A ring of buffers of any one block each, which the KV of all texts leaves through."""

    def __init__(self, buffers: Sequence[torch.Tensor], link: Link) -> None:
        """buffers: flat uint8, on the device."""
        self._buffers = list(buffers)
        self._link = link
        self._left: list[Event | None] = [None] * len(self._buffers)
        self._next = 0
        self._taken = 0

    def take(self) -> torch.Tensor:
        """The next buffer, once what it held has left. Raises LinkError."""
        slot = self._taken = self._next
        self._next = (slot + 1) % len(self._buffers)
        left, self._left[slot] = self._left[slot], None
        if left is not None:
            self._link.wait(left)
        return self._buffers[slot]

    def leaves(self, written: Event) -> None:
        """Says when what was put into the buffer taken last will have left."""
        self._left[self._taken] = written

    def forget(self) -> None:
        """Says that the link has carried out all that was asked of it. That a block did not leave
        is told to whoever brings it back.
        """
        self._left = [None] * len(self._buffers)

    def close(self) -> None:
        """Lets go of the buffers."""
        self._buffers.clear()
