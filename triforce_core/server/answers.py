"""Requests to the worker, seen from the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from triforce_core.params import SamplingParams
from triforce_core.requests.batch import Receiver
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.errors import refused
from triforce_core.server.wording.wording import Wording
from triforce_core.server.worker import Job, Prompt, Worker

# Seconds without output after which a stream sends a comment to show that it is alive.
PING_SECONDS = 5.0
_LOOK_SECONDS = 0.2

# The index of one of the request's sequences, and an item that it produced.
Given = tuple[int, Piece | Completion]


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class Answers:
    """The choices of one request, delivered as they are generated.

    prompts: the prompts
    params: the sampling parameters of each prompt
    choices: the number of choices for each prompt
    """

    worker: Worker
    wording: Wording
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    choices: int = 1

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the complete answer. Raises ClientGoneError, and any error of a job."""
        completions = await _unless_gone(request, self._all())
        return self.wording.whole(completions, self.choices)

    async def events(self) -> AsyncIterator[str]:
        """Return the answer as a stream. An error after submission becomes a part of it.

        Raises QueueFullError or NotReadyError while an HTTP status can still report it.
        """
        events = self._events()
        # Advance to the point where all jobs are submitted.
        await anext(events)
        return events

    async def _events(self) -> AsyncIterator[str]:
        completions: dict[int, Completion] = {}
        with self._submitted() as (items, jobs):
            yield ""
            try:
                yield self.wording.begin(self._texts)
                async with aclosing(_patiently(items, self._texts)) as following:
                    async for given in following:
                        if given is None:
                            yield self.wording.waiting(min(job.progress for job in jobs))
                            continue
                        index, item = given
                        if isinstance(item, Piece):
                            yield self.wording.piece(index, item)
                        else:
                            completions[index] = item
                            yield self.wording.last(index, item)
            except Exception as error:
                yield self.wording.failed(refused(error)[1])
                return
        yield self.wording.end([completions[i] for i in range(self._texts)], self.choices)

    async def _all(self) -> list[Completion]:
        completions: dict[int, Completion] = {}
        with self._submitted() as (items, _):
            while len(completions) < self._texts:
                index, item = await _next(items)
                if isinstance(item, Completion):
                    completions[index] = item
        return [completions[index] for index in range(self._texts)]

    @property
    def _texts(self) -> int:
        return len(self.prompts) * self.choices

    @contextmanager
    def _submitted(self) -> Iterator[tuple[asyncio.Queue, list[Job]]]:
        """Submit all sequences at once. Yield a queue of their items, each with its index, and the
        jobs.

        All jobs are cancelled on exit. Choices of one prompt use consecutive seeds if a seed is
        set.
        """
        loop, request = asyncio.get_running_loop(), object()
        items: asyncio.Queue = asyncio.Queue()
        jobs: list[Job] = []
        for prompt, params in zip(self.prompts, self.params, strict=True):
            for choice in range(self.choices):
                own = params
                if params.seed is not None:
                    own = replace(params, seed=(params.seed + choice) % (1 << 63))
                receive = _receiver(loop, items, len(jobs))
                jobs.append(Job(prompt, own, receive, request))
        self.worker.submit(jobs)
        try:
            yield items, jobs
        finally:
            self.worker.cancel(jobs)


def _receiver(loop: asyncio.AbstractEventLoop, items: asyncio.Queue, index: int) -> Receiver:
    """Return a receiver that passes items from the engine's thread to the event loop.

    Items are dropped once the loop is closed.
    """

    def receive(item: Piece | Completion | BaseException) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(items.put_nowait, (index, item))

    return receive


async def _next(items: asyncio.Queue) -> Given:
    """Return the next item from the queue. Raises the error if the item is one."""
    index, item = await items.get()
    if isinstance(item, BaseException):
        raise item
    return index, item


async def _patiently(items: asyncio.Queue, texts: int) -> AsyncIterator[Given | None]:
    """Yield items until all sequences have ended, and None after PING_SECONDS without an item."""
    while texts:
        try:
            index, item = await asyncio.wait_for(_next(items), PING_SECONDS)
        except TimeoutError:
            yield None
            continue
        texts -= isinstance(item, Completion)
        yield index, item


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`, or cancel it when the client disconnects.

    Raises ClientGoneError.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise ClientGoneError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
