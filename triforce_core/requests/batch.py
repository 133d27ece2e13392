"""Continuous batching: each pass of the full model runs over all running requests.

A single request is a batch of one. A pass streams or reads the weights once for all requests.
Requests start and end between passes; each has its own context and draft.
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

from triforce_core.decoding.contexts.context import Context, begin_pass, run_pass
from triforce_core.decoding.contexts.kv_parts import Interrupted
from triforce_core.decoding.contexts.memory_fallback import MemoryFallback
from triforce_core.decoding.contexts.prefill_parts import PrefillParts
from triforce_core.decoding.decoder import Step
from triforce_core.requests.one_thread import one_thread_at_a_time
from triforce_core.requests.request import Request
from triforce_core.requests.stream import Completion, Piece
from triforce_offload.errors import TriforceError
from triforce_offload.memory.device import OUT_OF_MEMORY
from triforce_offload.runtime import Runtime

# Called with the output of a request: pieces of text, then the completion or the error.
Receiver = Callable[[Piece | Completion | BaseException], None]
_Given = TypeVar("_Given")


@dataclass(eq=False)
class Member:
    """A request in a batch, and the receiver of its output.

    interrupted: ends the request; see `interrupt`
    ended: whether its context is free
    rest: for a failed request, the rest of its text and a Completion with its output so far
    """

    request: Request
    context: Context
    receive: Receiver
    interrupted: threading.Event
    ended: bool = False
    rest: list[Piece | Completion] = field(default_factory=list)

    @property
    def made(self) -> int:
        """Number of new tokens so far."""
        return self.request.made

    def interrupt(self) -> None:
        """End the request within one pass. Its result is its output so far. May be called in any
        thread.
        """
        self.interrupted.set()


@one_thread_at_a_time("add", "prefill", "_prefill_part", "decode", "drop")
class Batch:
    """A batch of requests that run together, in the calling thread.

    An error in a prefill ends its request; an error in a pass ends all requests of the pass. The
    receivers get the error. An error that a receiver raises ends its request, and is raised here.
    """

    def __init__(
        self,
        runtime: Runtime,
        fallback: MemoryFallback,
        progress: Callable[[int, int], None],
        ended: Callable[[Context, bool], None],
    ) -> None:
        """progress: see `Request.prefill`
        ended: called when a request's context is free, with whether the context can be reused
        """
        # Also held while requests and contexts are made or changed.
        self.busy = threading.RLock()
        self._runtime = runtime
        self._fallback = fallback
        self._progress = progress
        self._parts = PrefillParts()
        # Whether the next part is one of the prompt that waits longest.
        self._in_order = True
        self._ended = ended
        self._new: list[Member] = []
        # Members of the current prefill or pass.
        self._current: Sequence[Member] = ()
        self._decoding: list[Member] = []
        self._raised: list[Exception] = []

    @property
    def members(self) -> list[Member]:
        """The members that have not ended, including those of the current prefill or pass."""
        known = dict.fromkeys((*self._current, *self._decoding, *self._new))
        return [member for member in known if not member.ended]

    def add(self, member: Member) -> None:
        """Add a request, to be prefilled next."""
        self._new.append(member)

    def step(self, *, in_parts: bool = False) -> None:
        """Prefill the prompts of new requests, then run one pass over all requests.

        in_parts: prefill only a part of one prompt, so that running requests wait less
        """
        if in_parts:
            self._prefill_part()
        else:
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
            with self._current_for([member]):
                self._prefill(member)
        self._raise()
        return True

    @torch.inference_mode()
    def decode(self) -> None:
        """Run one pass over all running requests."""
        if members := self._decoding:
            self._decoding = []
            with self._current_for(members):
                steps = self._retried(members, lambda: self._steps(members))
                self._settle(members, steps)
        self._raise()

    def pieces(self, add: Callable[[Receiver], Member]) -> Generator[Piece | Completion]:
        """Run a request on demand: yield text after each pass, then the Completion. If the request
        fails, yield a Completion with the output so far, then raise the error.

        add: adds the request with the receiver that it gets
        """
        received: deque[Piece | Completion | BaseException] = deque()
        member = add(received.append)
        item = error = None
        try:
            while not member.ended and error is None:
                try:
                    # After a prefill, yield the first token before running the next pass.
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
            # The error refers to this frame, so it would keep the memory of the failed pass alive.
            item = error = None
            if not member.ended:
                self.drop(member)

    def drop(self, member: Member) -> None:
        """Abandon a request immediately. Its receiver gets nothing more."""
        for members in (self._new, self._decoding):
            if member in members:
                members.remove(member)
        self._runtime.passes.end()
        self._free(member, sound=False)

    def close(self) -> None:
        """End all requests. Their results are their output so far."""
        for member in self.members:
            member.interrupt()
        while self.members:
            self.step()

    @torch.inference_mode()
    def _prefill_part(self) -> None:
        """Prefill the next part of a prompt: in turn of the one that waits longest and of that of
        which least is left, so that a short one need not wait for a long one.
        """
        self._end_interrupted()
        if not self._new:
            return
        lengths = [member.request.left() for member in self._new]
        place = 0 if self._in_order else lengths.index(min(lengths))
        self._in_order = not self._in_order
        member, link = self._new.pop(place), self._runtime.link
        with self._current_for([member]):
            rows, before = self._parts.rows(lengths[place]), link.counters()
            began = time.perf_counter()
            if not self._prefill(member, rows):
                self._new.insert(place, member)
            # Otherwise the next pass would be charged for what the device still computes.
            link.wait_on_host(link.record())
            self._parts.took(rows, time.perf_counter() - began, link.counters() - before)
        self._raise()

    def _end_interrupted(self) -> None:
        """End the new requests that were interrupted: their turn may be far."""
        for member in [each for each in self._new if each.interrupted.is_set()]:
            self._new.remove(member)
            with self._current_for([member]):
                member.request.interrupt_prefill()
                self._settle([member], [])

    def _prefill(self, member: Member, rows: int | None = None) -> bool:
        """Prefill a prompt, or its next `rows` tokens. Return whether its prefill has ended."""
        request = member.request
        try:
            self._retried(
                [member], lambda: request.prefill(self._progress, rows), kept=request.prefilled
            )
        except Interrupted:
            request.interrupt_prefill()
            self._settle([member], [])
            return True
        if not request.is_prefilled:
            return False
        step = self._retried([member], request.first)
        self._settle([member], [step])
        return True

    def _steps(self, members: Sequence[Member]) -> list[Step]:
        """Run a pass. A failed pass changes nothing but KV."""
        self._begin(members)
        requests = [member.request for member in members]
        inputs = [request.next_pass() for request in requests]
        began = time.perf_counter()
        logits = run_pass([member.context for member in members], inputs)
        if len(members) > 1:
            # Otherwise the first request to read its logits would be charged for the whole pass.
            link = self._runtime.link
            link.wait_on_host(link.record())
        seconds = (time.perf_counter() - began) / len(members)
        return [request.take(own, seconds) for request, own in zip(requests, logits, strict=True)]

    def _retried(
        self, members: Sequence[Member], attempt: Callable[[], _Given], kept: int | None = None
    ) -> _Given:
        """Return what `attempt` returns, with the out-of-memory fallback if it applies.

        kept: see `MemoryFallback.run`; None for the whole context
        """
        if not self._fallback.applies:
            return attempt()
        (member,) = members
        context, request = member.context, member.request
        kept = context.length if kept is None else kept
        return self._fallback.run(context, attempt, kept, request.levels_changed)

    def _begin(self, members: Sequence[Member]) -> None:
        """Refresh the retrieval caches for the next pass, and start the copies of the pass."""
        for member in members:
            member.request.refresh()
        if members:
            begin_pass([member.context for member in members])

    def _begin_ahead(self) -> None:
        """Begin the next pass now, unless a prefill comes before it."""
        try:
            if not self._new:
                self._begin(self._decoding)
        except OUT_OF_MEMORY:
            # The accepted tokens stay. The next pass tries again, and reports a failure.
            for member in self._decoding:
                member.context.end()

    def _settle(self, members: Sequence[Member], steps: Sequence[Step]) -> None:
        """Begin the next pass, then deliver the output of this one. Members continue or end."""
        given: list[list[Piece | Completion]] = [[] for _ in members]
        try:
            for own, member, step in zip(given, members, steps, strict=False):
                own += member.request.text_of(step)
            for own, member in zip(given, members, strict=True):
                if not member.request.reason:
                    self._decoding.append(member)
                    continue
                own += member.request.finish()
                self._free(member, sound=True)
            self._begin_ahead()
        finally:
            for own, member in zip(given, members, strict=True):
                for item in own:
                    self._deliver(member, item)

    def _deliver(self, member: Member, item: Piece | Completion | BaseException) -> None:
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
    def _current_for(self, members: Sequence[Member]) -> Iterator[None]:
        """Run a prefill or a pass of members, and deliver its error to them. KeyboardInterrupt and
        the like are also raised.
        """
        memory = self._runtime.memory
        self._current = members
        try:
            with memory.typed_errors(), memory.current():
                yield
        except BaseException as error:
            self._runtime.passes.end()
            for member in members:
                if member in self._decoding:
                    self._decoding.remove(member)
                if member.ended:
                    continue
                if isinstance(error, TriforceError) and member.request.is_prefilled:
                    member.rest = member.request.fail(error)
                self._free(member, sound=False)
                self._deliver(member, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._current = ()
