"""The parts in which prompts are prefilled while other requests generate."""

from __future__ import annotations

from triforce_core.plan.sizes import PREFILL_CHUNK
from triforce_offload.link.link import LinkCounters

# The fewest tokens of a part, but for the last of a prompt. Larger parts are multiples of it, so
# that a prompt is cut into the same chunks as if it were prefilled at once.
LEAST = PREFILL_CHUNK
# What streams crosses the link with each part. Parts are so long that this takes about this share
# of their time; the rest of the transfer is then hidden behind computation.
_LINK_SHARE = 0.5


class PrefillParts:
    """How many tokens are prefilled at a time: as few as possible, so that other requests do not
    wait for long, but enough to hide what crosses the link. It is learned from the parts so far.
    """

    def __init__(self) -> None:
        self._chunks = 1.0

    def rows(self, left: int) -> int:
        """Return the number of tokens of the next part of a prompt with `left` tokens left."""
        rows = LEAST * round(self._chunks)
        # A last part that is much shorter would take nearly as long.
        return left if 2 * left < 3 * rows else rows

    def took(self, rows: int, seconds: float, crossed: LinkCounters) -> None:
        """Note what a part of `rows` tokens took, and what crossed the link meanwhile."""
        if seconds <= 0 or rows < LEAST:
            return
        wanted = rows / LEAST * crossed.busy_seconds / seconds / _LINK_SHARE
        # One slow part should not change much.
        self._chunks = max(1.0, self._chunks / 2, min(2 * self._chunks, wanted))
