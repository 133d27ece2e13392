"""Sizes of the experts of a layer, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from triforce_offload.weights.formats import aligned

# Experts of a layer that cross the link to its pool after a pass at most: more would keep the next
# pass waiting.
MOST_INSERTED = 2


@dataclass(frozen=True)
class ExpertSizes:
    """Experts whose bytes follow one another in each of their tensors.

    count: number of experts
    tensors: bytes of each tensor of one expert
    """

    count: int
    tensors: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(self.tensors)

    def pool_bytes(self, slots: int) -> int:
        """Return the bytes of a pool of some of the experts."""
        return sum(aligned(slots * nbytes) for nbytes in self.tensors)
