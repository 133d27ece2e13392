"""The ranks that share a model, each with a device and a link, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Call:
    """A message of the first rank: what it is about to do. Each kind of message is a subclass.

    computes: whether devices go on computing after the call, until `Ranks.check`
    settles: whether no device computes any more after the call
    """

    computes: ClassVar[bool] = False
    settles: ClassVar[bool] = False


class Ranks(Protocol):
    """One rank leads: it alone draws tokens and decides. Before each use of the model it sends a
    message to the other ranks, which do the same, so that all ranks meet in `sum` and `gather`.

    index: index of this rank; 0 leads
    count: number of all ranks
    here: number of ranks that share this machine's memory and processors
    local: index of this rank among them
    """

    index: int
    count: int
    here: int
    local: int

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """Wait for all ranks, which compute together from then on; later calls do nothing.
        own_device: whether no other rank computes on this rank's device. Raises RankError.
        """

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' parts into `part` and return it. Raises RankError."""

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return all ranks' parts [rows, widths[rank]] side by side on the leading rank, and [rows,
        0] on the others. Raises RankError.
        """

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers. All ranks wait for it. Raises RankError."""

    def of_first(self, message: Call) -> Call:
        """Return the first rank's message, which all ranks wait for. Raises RankError."""

    def tell(self, call: Call) -> None:
        """Send a message to the other ranks if this rank leads. Raises RankError."""

    def ask(self, question: Call) -> list[Any]:
        """Return the answers of the other ranks to a question, in rank order. Raises RankError."""

    def collect(self, call: Call) -> list[torch.Tensor]:
        """Send a message after which each of the other ranks sends a host tensor (`give`). Return
        these tensors in rank order. An interrupt waits until all of them have arrived. Raises
        RankError.
        """

    def give(self, tensor: torch.Tensor) -> None:
        """Send a tensor to the leading rank, which collects it."""

    def hand(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Send each of the other ranks a host tensor, or None to say that none will follow. An
        interrupt waits until all are sent. Raises RankError.
        """

    def handed(self) -> torch.Tensor | None:
        """Return the tensor that the leading rank hands to this one; None if none will follow."""

    def check(self) -> None:
        """Record that the device has computed the last call, before its result is used.

        Raises RankError if a rank was lost in the meantime.
        """

    def close(self) -> None:
        """End the other ranks if this rank leads."""

    def recover(self) -> None:
        """After an error, end the other ranks if they still execute a call that this rank left."""

    def abandon(self) -> None:
        """End the other ranks, whatever they are doing."""


def all_agree(ranks: Ranks, agrees: bool) -> bool:
    """Return whether all ranks agree. All ranks wait for it. Raises RankError."""
    return agrees if ranks.count == 1 else bool(ranks.least(int(agrees)))


class Silent:
    """The part of `Ranks` of a rank that sends no messages to others."""

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
    """One device that has the whole model."""

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

    def of_first(self, message: Call) -> Call:
        """Ranks.of_first."""
        return message
