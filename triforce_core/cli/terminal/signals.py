"""Signal handling during a run: Ctrl-C, `kill`, a closed terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from triforce_core.cli.terminal.ending import exit_code, heeded, leave

# Seconds after a signal before the user is told that the current pass ends first.
_PATIENCE = 1.0


@contextmanager
def raising() -> Iterator[None]:
    """Make an interrupt raise KeyboardInterrupt, so that partial results are still shown."""
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
    """Make an interrupt raise KeyboardInterrupt and any other signal SystemExit.

    The terminal is then restored and no file is left half written.
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
    """A signal handler: the first signal ends the request within one pass, the second the process.

    end: a function that ends the request, once there is a request
    number: the signal that arrived, or None
    """

    def __init__(
        self, before_leaving: Callable[[], None], slowly: Callable[[], None] | None = None
    ) -> None:
        """before_leaving: restores the terminal before the process ends
        slowly: called if the request has not ended _PATIENCE seconds after the signal
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
            # Use another thread, because this one may be in the middle of a write.
            self._timer = threading.Timer(_PATIENCE, self._slowly)
            self._timer.daemon = True
            self._timer.start()

    @property
    def is_interrupt(self) -> bool:
        """Whether the signal was SIGINT."""
        return self.number == signal.SIGINT

    def ended(self) -> None:
        """Cancel the timer, because the request has ended."""
        if self._timer:
            self._timer.cancel()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handle signals here. Has no effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self) for number in heeded()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
