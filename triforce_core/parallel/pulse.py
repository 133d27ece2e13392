"""Heartbeats by which two ranks notice that the other one is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from triforce_core.parallel.message import DamagedMessageError, Failure
from triforce_core.parallel.wire import Gone, Wire

BEAT_SECONDS = 0.5
# A rank is lost after this many beats without a message. Beats are counted, not timed: a process
# that was suspended, as all ranks are by Ctrl-Z, has missed none.
MOST_SILENT_BEATS = 10
_BEAT, _BYE = "beat", "bye"


# Called when the other rank is lost, with the reason, or None if its connection just ended.
Lost = Callable[[Failure | None], None]


class Pulse:
    """A thread that sends beats to another rank and listens for beats from it."""

    def __init__(self, wire: Wire, lost: Lost) -> None:
        """lost: called once, in the thread, unless the other rank ended properly"""
        self._wire = wire
        self._lost = lost
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def fail(self, failure: Failure) -> None:
        """Send the other rank the reason why this rank ends."""
        self._send(failure)
        self._ended.set()

    def close(self) -> None:
        """Tell the other rank that this one ends properly, and close the wire."""
        if not self._ended.is_set():
            self._ended.set()
            self._send(_BYE)
        self._thread.join(2 * BEAT_SECONDS)
        self._wire.close()

    def _send(self, message: object) -> None:
        with self._sending, suppress(Gone):
            self._wire.send(message)

    def _run(self) -> None:
        silent, sent = 0, 0.0
        while not self._ended.is_set():
            if time.monotonic() - sent >= BEAT_SECONDS:
                self._send(_BEAT)
                sent = time.monotonic()
            try:
                if not self._wire.waits(BEAT_SECONDS):
                    silent += 1
                    if silent > MOST_SILENT_BEATS:
                        seconds = MOST_SILENT_BEATS * BEAT_SECONDS
                        self._end(Failure(f"has not answered for {seconds:g} s", 1, True))
                    continue
                silent, message = 0, self._wire.receive()
            except Gone:
                self._end(None)
                return
            except DamagedMessageError as error:
                self._end(Failure(str(error), error.exit_code, True))
                return
            if message == _BYE:
                self._ended.set()
            elif isinstance(message, Failure):
                self._end(message)

    def _end(self, failure: Failure | None) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._lost(failure)
