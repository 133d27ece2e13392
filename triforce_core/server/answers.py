"""A request's way through the worker, as the server's event loop sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from triforce_core.params import SamplingParams
from triforce_core.server.errors import refused
from triforce_core.server.wording import Wording
from triforce_core.server.worker import Asked, Job, Worker
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
        return self.wording.whole(completions, told=self.params[0].tells_logprobs)

    async def events(self, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events. What goes wrong meanwhile is one of them."""
        completions: list[Completion] = []
        try:
            for index, (asked, params) in enumerate(self._texts()):
                if (first := self.wording.first(index)) is not None:
                    yield _event(first)
                async with aclosing(self._patiently(asked, params)) as items:
                    async for item in items:
                        if item is None:
                            yield f": {self.worker.progress:.2f} of the prompt is read\n\n"
                        elif isinstance(item, Piece):
                            yield _event(self.wording.piece(index, item))
                        else:
                            completions.append(item)
                            yield _event(self.wording.last(index, item))
        except Exception as error:
            yield _event(refused(error)[1])
            return
        if include_usage:
            yield _event(self.wording.used(completions))
        yield "data: [DONE]\n\n"

    def check(self) -> None:
        """Raises QueueFullError or UsageError if the first text could not be asked for now."""
        self.worker.check_room()

    def _texts(self) -> list[tuple[Asked, SamplingParams]]:
        """Each text to be written; of one prompt those with a seed have one seed after another."""
        return [
            (asked, params if params.seed is None else replace(params, seed=params.seed + choice))
            for asked, params in zip(self.asked, self.params, strict=True)
            for choice in range(self.choices)
        ]

    async def _all(self) -> list[Completion]:
        completions = []
        for asked, params in self._texts():
            async with aclosing(self._items(asked, params)) as items:
                completions += [item async for item in items if isinstance(item, Completion)]
        return completions

    async def _items(
        self, asked: Asked, params: SamplingParams
    ) -> AsyncIterator[Piece | Completion]:
        """What a job gives. It ends with whoever asks."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue()
        job = Job(asked, params, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        self.worker.submit(job)
        try:
            while True:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Completion):
                    return
        finally:
            job.cancel()

    async def _patiently(
        self, asked: Asked, params: SamplingParams
    ) -> AsyncIterator[Piece | Completion | None]:
        """The same, with None whenever there was nothing for a while."""
        async with aclosing(self._items(asked, params)) as items:
            following = asyncio.ensure_future(anext(items))
            try:
                while True:
                    done, _ = await asyncio.wait({following}, timeout=PING_SECONDS)
                    if not done:
                        yield None
                        continue
                    try:
                        item = following.result()
                    except StopAsyncIteration:
                        return
                    following = asyncio.ensure_future(anext(items))
                    yield item
            finally:
                following.cancel()
                # Its generator is busy until it has seen that.
                await asyncio.wait({following})


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
