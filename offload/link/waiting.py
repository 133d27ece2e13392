"""Waiting for a device that may never answer."""

from __future__ import annotations

import time
from typing import Protocol

from offload.errors import LinkError

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
        """Blocks the host until an event has come. Raises LinkError if it does not, or if what came
        before it failed.
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
                    raise LinkError(
                        f"the device did not finish a copy, or what it computes before it, within "
                        f"{self._seconds:g} seconds"
                    )
                if now - began > _SPIN:
                    time.sleep(min(_SHARE * (now - began), _LONGEST_PAUSE))
        except RuntimeError as error:
            raise LinkError(f"a transfer failed: {error}") from error
