"""The driver of all requests: each pass of the full model is over all that are under way.

A lone request is a batch of one. The weights that stream, and what is read of resident ones, are
paid once a pass. Requests come and go between passes; each has its own context and draft.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from triforce_core.decoding.contexts.context import Context, run_pass
from triforce_core.decoding.contexts.kv_parts import Interrupted
from triforce_core.decoding.contexts.memory_fallback import MemoryFallback
from triforce_core.decoding.decoder import Step
from triforce_core.requests.request import Request
from triforce_core.requests.stream import Completion, Piece
from triforce_offload.errors import TriforceError
from triforce_offload.memory.device import OUT_OF_MEMORY
from triforce_offload.runtime import Runtime

# Called with what a request gives: text, then its completion or its error.
Receiver = Callable[[Piece | Completion | BaseException], None]
_Given = TypeVar("_Given")


@dataclass(eq=False)
class Member:
    """A request in a batch, and who receives its text.

    interrupted: ends the request; see `interrupt`
    ended: whether its context is free
    rest: of a request that failed, the rest of its text and a Completion of what there is
    """

    request: Request
    context: Context
    receive: Receiver
    interrupted: threading.Event
    ended: bool = False
    rest: list[Piece | Completion] = field(default_factory=list)

    @property
    def made(self) -> int:
        """New tokens so far."""
        return self.request.made

    def interrupt(self) -> None:
        """End the request within one pass; what it gave so far is its result. May be called in any
        thread.
        """
        self.interrupted.set()


class Batch:
    """Runs requests together, in the thread that calls it.

    The error of a prefill goes to its request alone, and that of a pass to all: they have ended
    then. An error that a receiver raises ends its request, and is raised here.
    """

    def __init__(
        self,
        runtime: Runtime,
        fallback: MemoryFallback,
        each_layer: Callable[[int], None],
        ended: Callable[[Context, bool], None],
    ) -> None:
        """each_layer: called while a prompt is prefilled, with each layer's index. ended: called
        when a request's context is free, with whether it may be used again.
        """
        self._runtime = runtime
        self._fallback = fallback
        self._each_layer = each_layer
        self._ended = ended
        self._new: list[Member] = []
        # Of the prefill or the pass that runs now.
        self._running: Sequence[Member] = ()
        self._going: list[Member] = []
        self._raised: list[Exception] = []

    @property
    def members(self) -> list[Member]:
        """Those that have not ended, in the middle of a prefill or a pass too."""
        known = dict.fromkeys((*self._running, *self._going, *self._new))
        return [member for member in known if not member.ended]

    def add(self, member: Member) -> None:
        """Add a request, to be prefilled next."""
        self._new.append(member)

    def step(self) -> None:
        """Prefill the prompts of new requests, then run one pass for all."""
        self.prefill()
        self.decode()

    @torch.inference_mode()
    def prefill(self) -> bool:
        """Prefill the prompts of new requests and draw their first tokens. Return whether there
        were any.
        """
        if not self._new:
            return False
        while self._new:
            member = self._new.pop(0)
            with self._running_for([member]):
                self._prefill(member)
        self._raise()
        return True

    @torch.inference_mode()
    def decode(self) -> None:
        """Run one pass for all requests under way."""
        if members := self._going:
            self._going = []
            with self._running_for(members):
                steps = self._retried(members, lambda: self._steps(members))
                self._settle(members, steps)
        self._raise()

    def pieces(self, add: Callable[[Receiver], Member]) -> Generator[Piece | Completion]:
        """Run a request as its text is asked for: yield text as each pass lands, then the
        Completion. An error follows the Completion of what there is.

        add: adds the request, whose receiver it is given
        """
        received: deque[Piece | Completion | BaseException] = deque()
        member = add(received.append)
        item = error = None
        try:
            while not member.ended and error is None:
                try:
                    # The first token is not kept waiting for the pass that follows it.
                    if not self.prefill():
                        self.decode()
                except Exception as raised:
                    error = raised
                while received:
                    item = received.popleft()
                    if isinstance(item, BaseException):
                        error = item
                        yield from member.rest
                    else:
                        yield item
            if error is not None:
                raise error
        finally:
            # The error refers to this frame: it would hold the memory of the pass that failed.
            item = error = None
            if not member.ended:
                self.drop(member)

    def drop(self, member: Member) -> None:
        """Give up a request at once. It receives nothing more."""
        for members in (self._new, self._going):
            if member in members:
                members.remove(member)
        self._runtime.passes.end()
        self._free(member, sound=False)

    def close(self) -> None:
        """End all requests: what they gave so far is their result."""
        for member in self.members:
            member.interrupt()
        while self.members:
            self.step()

    def _prefill(self, member: Member) -> None:
        request = member.request
        try:
            self._retried([member], lambda: request.prefill(self._each_layer), kept=0)
        except Interrupted:
            request.interrupt_prefill()
            self._settle([member], [])
        else:
            step = self._retried([member], request.first)
            self._settle([member], [step])

    def _steps(self, members: Sequence[Member]) -> list[Step]:
        """Run a pass. It leaves nothing behind but KV if it fails."""
        self._begin(members)
        requests = [member.request for member in members]
        asks = [request.ask() for request in requests]
        began = time.perf_counter()
        logits = run_pass([member.context for member in members], asks)
        if len(members) > 1:
            # Otherwise the first to read its logits would count the whole pass as its own.
            link = self._runtime.link
            link.wait_on_host(link.record())
        seconds = (time.perf_counter() - began) / len(members)
        return [request.take(own, seconds) for request, own in zip(requests, logits, strict=True)]

    def _retried(
        self, members: Sequence[Member], attempt: Callable[[], _Given], kept: int | None = None
    ) -> _Given:
        """Return what `attempt` returns, after the out-of-memory fallback if need be. kept: see
        `MemoryFallback.run`; all of the context by default
        """
        if not self._fallback.applies:
            return attempt()
        (member,) = members
        context, request = member.context, member.request
        kept = context.length if kept is None else kept
        return self._fallback.run(context, attempt, kept, request.levels_changed)

    def _begin(self, members: Sequence[Member]) -> None:
        """Choose what drafts for the next pass, and start the pass's copies."""
        for member in members:
            member.request.refresh()
        if members:
            self._runtime.passes.begin([member.context.sequence for member in members])

    def _begin_ahead(self) -> None:
        """Begin the next pass now, unless a prefill comes before it."""
        try:
            if not self._new:
                self._begin(self._going)
        except OUT_OF_MEMORY:
            # The accepted tokens stay. The next pass tries again, and fails if it has to.
            for member in self._going:
                member.context.end()

    def _settle(self, members: Sequence[Member], steps: Sequence[Step]) -> None:
        """Begin the next pass, and tell what this one gave. Members go on, or have ended."""
        given: list[list[Piece | Completion]] = [[] for _ in members]
        try:
            for own, member, step in zip(given, members, steps, strict=False):
                own += member.request.taken(step)
            for own, member in zip(given, members, strict=True):
                if not member.request.reason:
                    self._going.append(member)
                    continue
                own += member.request.finish()
                self._free(member, sound=True)
            self._begin_ahead()
        finally:
            for own, member in zip(given, members, strict=True):
                for item in own:
                    self._tell(member, item)
        for member in members:
            if not member.ended:
                member.request.drop_what_never_pays()

    def _tell(self, member: Member, item: Piece | Completion | BaseException) -> None:
        try:
            member.receive(item)
        except Exception as error:
            member.interrupt()
            self._raised.append(error)

    def _raise(self) -> None:
        """Raise the first error of a receiver."""
        if self._raised:
            error, *_ = self._raised
            self._raised.clear()
            raise error

    def _free(self, member: Member, *, sound: bool) -> None:
        if not member.ended:
            member.ended = True
            self._ended(member.context, sound)

    @contextmanager
    def _running_for(self, members: Sequence[Member]) -> Iterator[None]:
        """Run a prefill or a pass of members, and tell them of its error. An interrupt from the
        keyboard is raised besides.
        """
        memory = self._runtime.memory
        self._running = members
        try:
            with memory.typed_errors(), memory.current():
                yield
        except BaseException as error:
            self._runtime.passes.end()
            for member in members:
                if member in self._going:
                    self._going.remove(member)
                if member.ended:
                    continue
                if isinstance(error, TriforceError) and member.request.is_prefilled:
                    member.rest = member.request.fail(error)
                self._free(member, sound=False)
                self._tell(member, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._running = ()
