"""What the rank that leads tells the others: a call and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """What is about to be done, with everything it is done to."""

    name: str
    arguments: tuple[Any, ...]


class Tokens(NamedTuple):
    """Token ids. Those that are on a device follow from there: values is None then."""

    count: int
    values: list[int] | None


def packed(name: str, arguments: tuple[Any, ...]) -> tuple[Call, list[torch.Tensor]]:
    """A call as it is sent, and the tokens that follow it from device to device."""
    sent, following = [], []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            on_host = argument.device.type == "cpu"
            sent.append(Tokens(argument.shape[0], argument.tolist() if on_host else None))
            if not on_host:
                following.append(argument)
        else:
            sent.append(argument)
    return Call(name, tuple(sent)), following


def unpacked(
    call: Call, device: torch.device, spread: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """A call as it is made. spread: receives what follows it."""

    def tensor(tokens: Tokens) -> torch.Tensor:
        if tokens.values is not None:
            return torch.tensor(tokens.values, dtype=torch.int64, device=device)
        return spread(torch.empty(tokens.count, dtype=torch.int64, device=device))

    arguments = (tensor(a) if isinstance(a, Tokens) else a for a in call.arguments)
    return Call(call.name, tuple(arguments))
