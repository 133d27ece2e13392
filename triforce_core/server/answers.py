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
from triforce_core.server.errors import refused
from triforce_core.server.wording import Wording
from triforce_core.server.worker import Asked, Job, Receiver, Worker
from triforce_core.stream import Completion, Piece

# While nothing is to be said a stream says that it is alive, so often.
PING_SECONDS = 5.0
_LOOK_SECONDS = 0.2


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Answers:
    """The choices of one request, one after another.

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
        """The answer as server-sent events. What goes wrong meanwhile is one of them."""
        completions: list[Completion] = []
        try:
            with self._submitted() as texts:
                for index, items in enumerate(texts):
                    if (first := self.wording.first(index)) is not None:
                        yield _event(first)
                    async with aclosing(_patiently(items)) as following:
                        async for item in following:
                            if item is None:
                                read = f"{self.worker.progress:.2f} of the prompt is read"
                                yield f": {read}\n\n"
                            elif isinstance(item, Piece):
                                yield _event(self.wording.piece(index, item))
                            else:
                                completions.append(item)
                                yield _event(self.wording.last(index, item))
        except Exception as error:
            yield _event(refused(error)[1])
            return
        if include_usage:
            yield _event(self.wording.used(completions, self.choices))
        yield "data: [DONE]\n\n"

    def check(self) -> None:
        """Raises QueueFullError or NotReadyError if the texts could not be asked for now."""
        self.worker.check_room()

    async def _all(self) -> list[Completion]:
        completions = []
        with self._submitted() as texts:
            for items in texts:
                while not isinstance(item := await _next(items), Completion):
                    pass
                completions.append(item)
        return completions

    @contextmanager
    def _submitted(self) -> Iterator[list[asyncio.Queue]]:
        """Asks for all texts at once: what each gives comes to a queue of its own. They end with
        whoever asked. Of one prompt those with a seed have one seed after another.
        """
        loop, request = asyncio.get_running_loop(), object()
        jobs, texts = [], []
        for asked, params in zip(self.asked, self.params, strict=True):
            for choice in range(self.choices):
                items: asyncio.Queue = asyncio.Queue()
                own = params
                if params.seed is not None:
                    own = replace(params, seed=(params.seed + choice) % (1 << 63))
                jobs.append(Job(asked, own, _receiver(loop, items), request))
                texts.append(items)
        self.worker.submit(jobs)
        try:
            yield texts
        finally:
            for job in jobs:
                job.cancel()


def _receiver(loop: asyncio.AbstractEventLoop, items: asyncio.Queue) -> Receiver:
    """Takes what comes in the engine's thread over to the loop's, while there is one."""

    def receive(item: Piece | Completion | BaseException) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(items.put_nowait, item)

    return receive


async def _next(items: asyncio.Queue) -> Piece | Completion:
    """The next of what a job gives. Raises what it raises."""
    item = await items.get()
    if isinstance(item, BaseException):
        raise item
    return item


async def _patiently(items: asyncio.Queue) -> AsyncIterator[Piece | Completion | None]:
    """What a job gives, with None whenever there was nothing for a while."""
    while True:
        try:
            item = await asyncio.wait_for(_next(items), PING_SECONDS)
        except TimeoutError:
            yield None
            continue
        yield item
        if isinstance(item, Completion):
            return


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
