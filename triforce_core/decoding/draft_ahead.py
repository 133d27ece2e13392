"""Drafting ahead: the retrieval level goes on while a pass waits for the link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


class DraftAhead:
    """Runs steps in a thread of its own while the calling thread runs a pass."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "draft-ahead")

    @contextmanager
    def during(self, step: Callable[[], bool]) -> Iterator[None]:
        """Call `step` again and again in the other thread while the caller's block runs, until it
        returns False. At the end of the block, the last step has ended.

        Raises what `step` raises, unless the block raises.
        """
        ended = threading.Event()

        def run() -> None:
            with torch.inference_mode():
                while not ended.is_set() and step():
                    pass

        running = self._executor.submit(run)
        try:
            yield
        except BaseException:
            ended.set()
            running.exception()
            raise
        ended.set()
        running.result()
