"""A text's KV that is on several ranks: whole on the one that leads, when a context is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from offload.errors import RankError
from offload.ranks import Ranks


class Interrupted(Exception):
    """Raised between two layers to end the reading of a prompt, or of what was kept."""


@dataclass(frozen=True)
class KVParts:
    """What each rank has of the model's key-value heads. All ranks call the same in the same order.

    heads: of each rank; one that an earlier rank has too is taken from the last
    """

    ranks: Ranks
    heads: Sequence[range]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Of all heads, on the rank that leads. On the others what they have, which they send.

        own: [any, heads of this rank, ...] on the host. Raises RankError.
        """
        if self.ranks.count == 1:
            return own
        if self.ranks.index:
            self.ranks.send(0, own)
            return own
        whole = own.new_empty((own.shape[0], self.heads[-1].stop, *own.shape[2:]))
        for rank, heads in enumerate(self.heads):
            part = self.ranks.receive(rank) if rank else own
            whole[:, heads.start : heads.stop] = part
        return whole

    def scattered(self, whole: torch.Tensor | None) -> torch.Tensor:
        """What this rank has of a tensor of all heads, which the rank that leads has.

        whole: [any, all heads, ...] on the host; None on the other ranks
        Raises RankError, or Interrupted where the rank that leads has called `give_up`.
        """
        if self.ranks.index:
            part = self.ranks.receive(0)
            if part is None:
                raise Interrupted
            return part
        for rank, heads in enumerate(self.heads):
            if rank:
                self.ranks.send(rank, whole[:, heads.start : heads.stop])
        own = self.heads[0]
        return whole[:, own.start : own.stop]

    def agree(self) -> None:
        """The others wait until the rank that leads has come as far as here.

        Raises what `scattered` does.
        """
        self.scattered(torch.empty(1, self.heads[-1].stop) if not self.ranks.index else None)

    def give_up(self) -> None:
        """On the rank that leads: tells the others, which wait for something, that it will not
        come.
        """
        # Those that are gone wait for nothing.
        with suppress(RankError):
            for rank in range(1, self.ranks.count):
                self.ranks.send(rank, None)
