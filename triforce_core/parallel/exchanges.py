"""Exchanges with other ranks that an interrupt does not leave half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

_Given = TypeVar("_Given")
# Seconds after which whoever waits asks whether the thread is still there.
_LOOK_SECONDS = 0.2


class Exchanges:
    """A thread that calls one thing after another, each to its end. An interrupt comes to the main
    thread, which waits for that end before it goes on. An executor of the standard library starts
    its thread as it is first asked: one that is interrupted there does not know what it has begun.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchanges", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], _Given]) -> _Given:
        """Returns or raises what the call does; an interrupt, once it has ended. TimeoutError after
        `close`.
        """
        own: Future[_Given] = Future()
        try:
            return self._ended(call, own)
        except BaseException:
            if not own.done():
                # It may be under way, and it ends before what is called after it.
                with suppress(TimeoutError):
                    self._ended(lambda: None, Future())
            raise

    def close(self) -> None:
        """Ends the thread, after what it was given to call. May be called there."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ended(self, call: Callable[[], _Given], future: Future[_Given]) -> _Given:
        self._calls.put((call, future))
        while self._thread.is_alive() and not wait([future], _LOOK_SECONDS).done:
            pass
        return future.result(0)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
