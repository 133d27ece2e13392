"""A text's KV that is on several ranks: whole on the one that leads, when a context is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from triforce_offload.errors import RankError
from triforce_offload.ranks import Call, Ranks


class Interrupted(Exception):
    """Raised between two layers to end the reading of a prompt, or of what was kept."""


@dataclass(frozen=True)
class KVParts:
    """What each rank has of the model's key-value heads. All ranks call the same in the same order.

    heads: of each rank; one that an earlier rank has too is taken from the last
    """

    ranks: Ranks
    heads: Sequence[range]

    @property
    def count(self) -> int:
        """Of heads, on all ranks."""
        return self.heads[-1].stop

    @property
    def are_apart(self) -> bool:
        """Whether no head is on two ranks."""
        return sum(map(len, self.heads)) == self.count

    def gathered(self, own: torch.Tensor, call: Call) -> torch.Tensor:
        """Of all heads, on the rank that leads. On the others what they have, which they give.

        own: [any, heads of this rank, ...] on the host. call: what the others are told, by which
        they come here too. Raises RankError.
        """
        if self.ranks.count == 1:
            return own
        if self.ranks.index:
            self.ranks.give(own)
            return own
        # What the host has no room for is known before anybody is told.
        whole = own.new_empty((own.shape[0], self.count, *own.shape[2:]))
        parts = [own, *self.ranks.collect(call)]
        for heads, part in zip(self.heads, parts, strict=True):
            whole[:, heads.start : heads.stop] = part
        return whole

    def scattered(self, whole: torch.Tensor | None) -> torch.Tensor:
        """What this rank has of a tensor of all heads, which the rank that leads has.

        whole: [any, all heads, ...] on the host; None on the other ranks
        Raises RankError, or Interrupted where the rank that leads has called `give_up`.
        """
        if self.ranks.index:
            part = self.ranks.handed()
            if part is None:
                raise Interrupted
            return part
        own, *others = (whole[:, heads.start : heads.stop] for heads in self.heads)
        if others:
            self.ranks.hand([part.contiguous() for part in others])
        return own

    def agree(self) -> None:
        """The others wait until the rank that leads has come as far as here.

        Raises what `scattered` does.
        """
        self.scattered(None if self.ranks.index else torch.empty(1, self.count))

    def give_up(self) -> None:
        """On the rank that leads: tells the others, which may wait for something, that it will not
        come.
        """
        # Those that are gone wait for nothing.
        with suppress(RankError):
            self.ranks.hand(None)
