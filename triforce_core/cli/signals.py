"""What an interrupt does to a run: Ctrl-C, a `kill`, a terminal that closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
# Seconds after which a person is told that a pass has to end first.
_PATIENCE = 1.0


def exit_code(number: int) -> int:
    """The code of a process that a signal ended, as shells have it: 130 for an interrupt."""
    return 128 + number


def leave(number: int, frame: FrameType | None = None) -> None:
    """Ends the process at once. What was written to standard output so far gets there."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(exit_code(number))


def leave_at_once() -> None:
    """From now on signals end the process: no traceback out of the middle of an import. Those that
    whoever started it had ignored, as `nohup` does, stay ignored.
    """
    for number in _heeded():
        signal.signal(number, leave)


@contextmanager
def raising() -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt, so that what was found is still shown."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.SIGINT not in _heeded():
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

    before = {number: signal.signal(number, raise_) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[int]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


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
            with suppress(OSError):
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
        before = {number: signal.signal(number, self) for number in _heeded()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
