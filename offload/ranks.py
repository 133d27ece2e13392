"""The ranks that share a model, each with a device and a link, as one of them sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch


class Call:
    """What the first rank tells the others before it does it. Each kind is a subclass.

    computes: whether it goes on until the device has computed, which `Ranks.check` says
    settles: whether nothing computes any more after it
    """

    computes: ClassVar[bool] = False
    settles: ClassVar[bool] = False


class Ranks(Protocol):
    """One rank leads: it alone draws tokens and decides, and tells the others each thing it does
    with the model before it does it. They do the same, so that all meet in `sum` and `gather`.

    index: of this rank, 0 for the one that leads; count: of all ranks
    here, local: how many of them share this machine's memory and processors, and which of those
        this is
    """

    index: int
    count: int
    here: int
    local: int

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """Waits for all ranks, which compute together from then on. own_device: whether no other
        rank computes on this one's. Raises RankError.
        """

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, written over `part`. Raises RankError."""

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' parts [rows, widths[rank]] side by side, on the one that leads; on the others
        [rows, 0]. Raises RankError.
        """

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, which wait for each other. Raises RankError."""

    def tell(self, call: Call) -> None:
        """Tells the others what is about to be done, if this rank leads. Raises RankError."""

    def ask(self, question: Call) -> list[Any]:
        """What each of the others answers, in their order. Raises RankError."""

    def collect(self, call: Call) -> list[torch.Tensor]:
        """Tells the others to do what each gives a tensor of the host by (`give`). Returns these,
        in their order. An interrupt waits until all have come. Raises RankError.
        """

    def give(self, tensor: torch.Tensor) -> None:
        """To the rank that leads, which collects it."""

    def hand(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Sends each of the others a tensor of the host; None: that none will come. An interrupt
        waits until all are sent. Raises RankError.
        """

    def handed(self) -> torch.Tensor | None:
        """What the rank that leads hands to this one, None if none will come."""

    def check(self) -> None:
        """Asked when the device has computed what was told, and before that is used.

        Raises RankError if a rank was lost meanwhile.
        """

    def close(self) -> None:
        """Ends the others, if this rank leads."""

    def recover(self) -> None:
        """After an error: ends the others if they are in the middle of what this rank left."""

    def abandon(self) -> None:
        """Ends the others, in the middle of whatever they do."""


class Silent:
    """What a rank that tells the others nothing has of Ranks."""

    index = 0
    here = 1
    local = 0

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """Ranks.meet."""

    def tell(self, call: Call) -> None:
        """Ranks.tell."""

    def ask(self, question: Call) -> list[Any]:
        """Ranks.ask."""
        return []

    def collect(self, call: Call) -> list[torch.Tensor]:
        """Ranks.collect."""
        return []

    def give(self, tensor: torch.Tensor) -> None:
        """Ranks.give."""

    def hand(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Ranks.hand."""

    def handed(self) -> torch.Tensor | None:
        """Ranks.handed."""

    def check(self) -> None:
        """Ranks.check."""

    def close(self) -> None:
        """Ranks.close."""

    def recover(self) -> None:
        """Ranks.recover."""

    def abandon(self) -> None:
        """Ranks.abandon."""


class Alone(Silent):
    """One device with the whole model."""

    count = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Ranks.sum."""
        return part

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Ranks.gather."""
        return part

    def least(self, number: int) -> int:
        """Ranks.least."""
        return number
