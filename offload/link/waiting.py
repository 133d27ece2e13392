"""Waiting for a device that may never answer."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from triforce_offload.errors import DeviceFailedError, DeviceHungError

# Longer than any real wait: the prefill of the longest prompt on the slowest card.
LONGEST_WAIT_SECONDS = 1800.0

# Seconds of polling without a pause, which makes a wait for a nearly finished event cheap.
_SPIN = 200e-6
# After that, each pause is this share of the time waited so far, and at most this many seconds: an
# event is noticed at most one per cent late.
_SHARE, _LONGEST_PAUSE = 0.01, 1e-3


class Queried(Protocol):
    """The part of torch.cuda.Event that `Patience` uses."""

    def query(self) -> bool:
        """Return whether everything before the event is done. Raises RuntimeError on failure."""


class Patience:
    """Waits for events, each for a limited time. After the first timeout the device counts as hung:
    every wait for an event that has not happened fails at once.
    """

    def __init__(self, seconds: float) -> None:
        self.exhausted = False
        self._seconds = seconds

    def wait(self, event: Queried) -> None:
        """Block the host until an event happens. Raises DeviceHungError if it does not happen in
        time, or DeviceFailedError if the work before it failed.
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


# One Patience per device, shared by everything that waits for it: after one timeout nobody waits
# for a device that hangs.
_PATIENCE: dict[torch.device, Patience] = {}


def patience(device: torch.device) -> Patience:
    """Return the shared Patience of a device. device: a device with its index"""
    return _PATIENCE.setdefault(device, Patience(LONGEST_WAIT_SECONDS))


def hangs(device: torch.device | None = None) -> bool:
    """Return whether a device, or any device, did not answer. Every call to its driver may then
    block, and so may the end of the process.
    """
    asked = _PATIENCE.values() if device is None else [_PATIENCE.get(device)]
    return any(it.exhausted for it in asked if it)


def come(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor once its device has computed it. Reading its values then does not wait; a
    wait inside torch could not be interrupted.

    Raises LinkError.
    """
    if tensor.is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        patience(tensor.device).wait(event)
    return tensor


def number(counted: torch.Tensor | int) -> int:
    """Return a count on the host that a device may have computed. Raises LinkError."""
    return int(come(counted)) if isinstance(counted, torch.Tensor) else counted
