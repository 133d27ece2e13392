"""Waiting for a device that may never answer."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from triforce_offload.errors import DeviceFailedError, DeviceHungError

# Longer than anything that is waited for: the reading of the longest prompt by the slowest card.
LONGEST_WAIT_SECONDS = 1800.0

# Asked without a pause so long, in seconds, what is nearly there costs nothing.
_SPIN = 200e-6
# Then with pauses of this share of what was waited so far, and of so many seconds at most: what has
# come is noticed a hundredth later.
_SHARE, _LONGEST_PAUSE = 0.01, 1e-3


class Queried(Protocol):
    """As torch.cuda.Event has it."""

    def query(self) -> bool:
        """Whether everything before it is done. Raises RuntimeError if that failed."""


class Patience:
    """Waits for events, each for so long at most. After one that did not come the device counts as
    hung: whatever has not come yet fails at once.
    """

    def __init__(self, seconds: float) -> None:
        self.exhausted = False
        self._seconds = seconds

    def wait(self, event: Queried) -> None:
        """Blocks the host until an event has come. Raises DeviceHungError if it does not, or
        DeviceFailedError if what came before it failed.
        """
        try:
            if event.query():
                return
            began = time.monotonic()
            until = began + (0.0 if self.exhausted else self._seconds)
            while not event.query():
                now = time.monotonic()
                if now >= until:
                    self.exhausted = True
                    raise DeviceHungError(
                        f"the device did not finish a copy, or what it computes before it, within "
                        f"{self._seconds:g} seconds"
                    )
                if now - began > _SPIN:
                    time.sleep(min(_SHARE * (now - began), _LONGEST_PAUSE))
        except RuntimeError as error:
            raise DeviceFailedError(f"a transfer failed: {error}") from error


# Of each device, whoever waits for it: who found that it hangs keeps the others from trying.
_PATIENCE: dict[torch.device, Patience] = {}


def patience(device: torch.device) -> Patience:
    """A device's own. device: with its number"""
    return _PATIENCE.setdefault(device, Patience(LONGEST_WAIT_SECONDS))


def hangs(device: torch.device | None = None) -> bool:
    """Whether a device, or any, did not answer: whatever its driver is asked may wait for it, and
    so may the end of the process.
    """
    asked = _PATIENCE.values() if device is None else [_PATIENCE.get(device)]
    return any(it.exhausted for it in asked if it)


def come(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, once its device has computed it. What asks for its numbers then does not wait:
    their own wait could not be ended.

    Raises LinkError.
    """
    if tensor.is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        patience(tensor.device).wait(event)
    return tensor


def number(counted: torch.Tensor | int) -> int:
    """What a device may have counted, here. Raises LinkError."""
    return int(come(counted)) if isinstance(counted, torch.Tensor) else counted
