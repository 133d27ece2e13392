"""A request's way through the worker, as the server's event loop sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from triforce_core.params import SamplingParams
from triforce_core.requests.batch import Receiver
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.errors import refused
from triforce_core.server.messages.wording import Wording
from triforce_core.server.worker import Asked, Job, Worker

# While nothing is to be said a stream says that it is alive, so often.
PING_SECONDS = 5.0
_LOOK_SECONDS = 0.2

# What a text gives, and which of a request's texts it is.
Given = tuple[int, Piece | Completion]


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Answers:
    """The choices of one request, as they come.

    asked: the text of each prompt; choices: of each
    """

    worker: Worker
    wording: Wording
    asked: Sequence[Asked]
    params: Sequence[SamplingParams]
    choices: int = 1

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece. Raises ClientGoneError, and what a job raises."""
        completions = await _unless_gone(request, self._all())
        told = self.params[0].tells_logprobs
        return self.wording.whole(completions, self.choices, told=told)

    async def events(self, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events. What goes wrong once it was asked for is one of them.

        Raises QueueFullError or NotReadyError, while there still is a status to say it with.
        """
        events = self._events(include_usage=include_usage)
        # Up to where all is asked for.
        await anext(events)
        return events

    async def _events(self, *, include_usage: bool) -> AsyncIterator[str]:
        completions: dict[int, Completion] = {}
        with self._submitted() as items:
            yield ""
            try:
                for index in range(self._texts):
                    if (first := self.wording.first(index)) is not None:
                        yield _event(first)
                async with aclosing(_patiently(items, self._texts)) as following:
                    async for given in following:
                        if given is None:
                            read = f"{self.worker.progress:.2f} of the prompt is read"
                            yield f": {read}\n\n"
                            continue
                        index, item = given
                        if isinstance(item, Piece):
                            yield _event(self.wording.piece(index, item))
                        else:
                            completions[index] = item
                            yield _event(self.wording.last(index, item))
            except Exception as error:
                yield _event(refused(error)[1])
                return
        if include_usage:
            given = [completions[index] for index in range(self._texts)]
            yield _event(self.wording.used(given, self.choices))
        yield "data: [DONE]\n\n"

    async def _all(self) -> list[Completion]:
        completions: dict[int, Completion] = {}
        with self._submitted() as items:
            while len(completions) < self._texts:
                index, item = await _next(items)
                if isinstance(item, Completion):
                    completions[index] = item
        return [completions[index] for index in range(self._texts)]

    @property
    def _texts(self) -> int:
        return len(self.asked) * self.choices

    @contextmanager
    def _submitted(self) -> Iterator[asyncio.Queue]:
        """Asks for all texts at once: what they give comes to a queue, with which of them gave it.
        They end with whoever asked. Of one prompt those with a seed have one seed after another.
        """
        loop, request = asyncio.get_running_loop(), object()
        items: asyncio.Queue = asyncio.Queue()
        jobs: list[Job] = []
        for asked, params in zip(self.asked, self.params, strict=True):
            for choice in range(self.choices):
                own = params
                if params.seed is not None:
                    own = replace(params, seed=(params.seed + choice) % (1 << 63))
                receive = _receiver(loop, items, len(jobs))
                jobs.append(Job(asked, own, receive, request))
        self.worker.submit(jobs)
        try:
            yield items
        finally:
            for job in jobs:
                job.cancel()


def _receiver(loop: asyncio.AbstractEventLoop, items: asyncio.Queue, index: int) -> Receiver:
    """Takes what a text gives in the engine's thread over to the loop's, while there is one."""

    def receive(item: Piece | Completion | BaseException) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(items.put_nowait, (index, item))

    return receive


async def _next(items: asyncio.Queue) -> Given:
    """The next of what texts give. Raises what one of them raises."""
    index, item = await items.get()
    if isinstance(item, BaseException):
        raise item
    return index, item


async def _patiently(items: asyncio.Queue, texts: int) -> AsyncIterator[Given | None]:
    """What texts give until all have ended, with None whenever there was nothing for a while."""
    while texts:
        try:
            index, item = await asyncio.wait_for(_next(items), PING_SECONDS)
        except TimeoutError:
            yield None
            continue
        texts -= isinstance(item, Completion)
        yield index, item


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of some work, which ends when the client leaves. Raises ClientGoneError."""
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


def _event(what: dict[str, Any]) -> str:
    return f"data: {json.dumps(what, ensure_ascii=False, separators=(',', ':'))}\n\n"
