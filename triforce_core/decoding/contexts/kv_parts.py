"""KV that is spread over ranks: gathered on the first rank when a context is saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from triforce_offload.errors import RankError
from triforce_offload.kv.recent.marks import MarkTensor
from triforce_offload.ranks import Call, Ranks


class Interrupted(Exception):
    """Raised between two layers to end a prefill, or the restoration of a context."""


@dataclass(frozen=True)
class KVParts:
    """The key-value heads of each rank. All ranks call the same methods in the same order.

    heads: the heads of each rank; if several ranks have a head, the last rank's copy is used
    """

    ranks: Ranks
    heads: Sequence[range]

    @property
    def count(self) -> int:
        """Number of heads, over all ranks."""
        return self.heads[-1].stop

    @property
    def are_apart(self) -> bool:
        """Whether no head is on two ranks."""
        return sum(map(len, self.heads)) == self.count

    def gathered(self, own: torch.Tensor, call: Call) -> torch.Tensor:
        """Gather a tensor of all heads on the first rank. The other ranks send their parts, and get
        their own back.

        own: [any, heads of this rank, ...] on the host
        call: the call that makes the other ranks gather, too
        Raises RankError.
        """
        if self.ranks.count == 1:
            return own
        if self.ranks.index:
            self.ranks.give(own)
            return own
        # Allocate first: a lack of host memory must show before the other ranks are told.
        whole = own.new_empty((own.shape[0], self.count, *own.shape[2:]))
        parts = [own, *self.ranks.collect(call)]
        for heads, part in zip(self.heads, parts, strict=True):
            whole[:, heads.start : heads.stop] = part
        return whole

    def scattered(self, whole: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of a tensor of all heads, which the first rank provides.

        whole: [any, all heads, ...] on the host; None on the other ranks
        Raises RankError, or Interrupted on the other ranks if the first rank called `give_up`.
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
        """Make the other ranks wait until the first rank gets here. Raises as `scattered` does."""
        self.scattered(None if self.ranks.index else torch.empty(1, self.count))

    def give_up(self) -> None:
        """On the first rank: tell the other ranks, which may be waiting, that nothing will come."""
        # Lost ranks do not wait.
        with suppress(RankError):
            self.ranks.hand(None)


class StoreParts(NamedTuple):
    """The heads of each rank in a recent store: key heads, and value heads if these differ."""

    keys: KVParts
    values: KVParts

    def of(self, tensor: MarkTensor) -> KVParts:
        """Return the heads by which a tensor of a mark is divided."""
        return self.keys if tensor.by_keys else self.values
