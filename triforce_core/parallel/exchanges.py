"""Exchanges with other ranks that an interrupt cannot leave unfinished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

_Given = TypeVar("_Given")
# Seconds between checks that the thread is still alive.
_LOOK_SECONDS = 0.2


class Exchanges:
    """A thread that runs calls one after another, each to its end.

    An interrupt arrives in the main thread, which waits for the end of the call. An executor of the
    standard library would not do: it starts its thread on the first submit, and an interrupt there
    leaves it unclear what has been started.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchanges", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], _Given]) -> _Given:
        """Run a call and return its result or raise its error. An interrupt is raised once the call
        ends.

        Raises TimeoutError after `close`.
        """
        own: Future[_Given] = Future()
        try:
            return self._ended(call, own)
        except BaseException:
            if not own.done():
                # The call may be running. An empty call behind it ends only after it.
                with suppress(TimeoutError):
                    self._ended(lambda: None, Future())
            raise

    def close(self) -> None:
        """End the thread after the calls it was given. Calls in the thread itself are allowed."""
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
