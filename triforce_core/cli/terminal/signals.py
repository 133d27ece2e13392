"""What an interrupt does to a run: Ctrl-C, a `kill`, a terminal that closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from triforce_core.cli.terminal.leaving import exit_code, heeded, leave

# Seconds after which a person is told that a pass has to end first.
_PATIENCE = 1.0


@contextmanager
def raising() -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt, so that what was found is still shown."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.SIGINT not in heeded():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ending() -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt and any other signal SystemExit, so that a
    terminal is given back and nothing is left half written.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(exit_code(number))

    before = {number: signal.signal(number, raise_) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Ends a request within one pass when the first signal comes, the process at the second.

    end: what ends the request, once there is one. number: of the signal that came, if one did
    """

    def __init__(
        self, before_leaving: Callable[[], None], slowly: Callable[[], None] | None = None
    ) -> None:
        """before_leaving: gives a terminal its cursor back. slowly: called if the request has not
        ended a second after the signal
        """
        self.end: Callable[[], None] | None = None
        self.number: int | None = None
        self._before_leaving = before_leaving
        self._slowly = slowly
        self._timer: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.end is None or self.number is not None:
            with suppress(Exception):
                self._before_leaving()
            leave(number)
        self.number = number
        self.end()
        if self._slowly:
            # From another thread, since this one may be in the middle of a write.
            self._timer = threading.Timer(_PATIENCE, self._slowly)
            self._timer.daemon = True
            self._timer.start()

    @property
    def is_interrupt(self) -> bool:
        """Whether it was Ctrl-C's signal that came."""
        return self.number == signal.SIGINT

    def ended(self) -> None:
        """Says that the request has ended."""
        if self._timer:
            self._timer.cancel()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Inside, signals come here; only the main thread gets any."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self) for number in heeded()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
