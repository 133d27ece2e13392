"""Several requests at once: each pass of the full model is over all of them.

What streams of the weights, and what of them is read from the device's memory, is paid once a pass.
Requests come and go between passes; each has a context, a draft, coins and an end of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from offload.feed import Feed
from offload.joint import JointPasses
from offload.runtime import Runtime
from triforce_core.decoding.context import Context
from triforce_core.params import SamplingParams
from triforce_core.request import Request
from triforce_core.stream import Completion, Piece
from triforce_core.text import TextStream

# Called with what a request gives: text, then its completion or its error.
Receiver = Callable[[Piece | Completion | BaseException], None]


@dataclass(eq=False)
class Member:
    """A request in a batch, and who is told its text.

    ended: whether its context is free
    """

    request: Request
    context: Context
    prompt: list[int]
    text: TextStream
    receive: Receiver
    reuse: bool = True
    ended: bool = False
    interrupted: threading.Event = field(default_factory=threading.Event)

    @property
    def made(self) -> int:
        """Tokens that it has given so far."""
        return self.request.made

    def interrupt(self) -> None:
        """Ends it within one pass; what it gave so far is its result. May come from any thread."""
        self.interrupted.set()


class Batch:
    """Runs members together, `step` by step, in the thread that calls it. One that could have no
    company is run as `Request.run` does.
    """

    def __init__(
        self,
        runtime: Runtime,
        each_layer: Callable[[int], None],
        ended: Callable[[Context, bool], None],
    ) -> None:
        """each_layer: called while a prompt is read, with each layer's index. ended: is told when a
        member's context is free, and whether it may be used again.
        """
        self._alone = runtime.demand.sequences == 1
        self._passes: JointPasses = runtime.joint_passes()
        self._runtime = runtime
        self._each_layer = each_layer
        self._ended = ended
        self._new: list[Member] = []
        self._going: list[Member] = []
        self._raised: list[Exception] = []

    @property
    def members(self) -> list[Member]:
        """Those that have not ended."""
        return self._going + self._new

    def add(self, member: Member) -> None:
        """Takes a request in: the next step reads its prompt."""
        self._new.append(member)

    @torch.inference_mode()
    def step(self) -> None:
        """Reads prompts that are new, then runs one pass for all members and tells each what it
        gave. What goes wrong with a prompt is told to its member alone, and what goes wrong in a
        pass to all: they have ended then. What a receiver raises ends its member, and is raised.
        """
        while self._new:
            member = self._new.pop(0)
            with self._failing([member]):
                self._read(member)
        if members := self._going:
            self._going = []
            with self._failing(members):
                self._pass(members)
        if self._raised:
            error, *_ = self._raised
            self._raised.clear()
            raise error

    def close(self) -> None:
        """Ends all members: what they gave so far is their result."""
        for member in self.members:
            member.interrupt()
        while self.members:
            self.step()

    def _read(self, member: Member) -> None:
        request = member.request
        request.read(
            member.prompt,
            member.text,
            self._each_layer,
            member.interrupted,
            reuse=member.reuse,
        )
        pieces = [] if request.reason else request.step()
        self._settle(member, pieces)

    def _pass(self, members: Sequence[Member]) -> None:
        if self._alone:
            for member in members:
                self._settle(member, member.request.step())
            return
        self._passes.begin([member.context.passes for member in members])
        asks = [member.request.ask() for member in members]
        feeds = [m.context.feed(ask) for m, ask in zip(members, asks, strict=True)]
        began = time.perf_counter()
        logits = self._computed(members[0].context, feeds)
        # Or the first of them would count the pass as its own.
        link = self._runtime.link
        link.wait_on_host(link.record())
        seconds = (time.perf_counter() - began) / len(members)
        taken = []
        for member, ask, own in zip(members, asks, logits, strict=True):
            member.context.computed(own, ask)
            taken.append(member.request.take(own, seconds))
        for member, pieces in zip(members, taken, strict=True):
            self._settle(member, pieces)

    def _computed(self, any_of_them: Context, feeds: Sequence[Feed]) -> Sequence[torch.Tensor]:
        """Logits of each member's rows."""
        model = any_of_them.model
        hidden = model.forward(Feed.side_by_side(feeds), self._passes.weights, self._passes.cache)
        return model.logits(hidden).split([feed.rows for feed in feeds])

    def _settle(self, member: Member, pieces: Sequence[Piece]) -> None:
        """Tells what a member's request gave; it goes on, or has ended."""
        request = member.request
        if not request.reason and self._alone:
            request.begin()
        elif not request.reason:
            request.refresh()
        for piece in pieces:
            self._tell(member, piece)
        if not request.reason:
            if self._alone:
                request.drop_what_never_pays()
            self._going.append(member)
            return
        last = list(request.finish())
        self._free(member, sound=True)
        for piece in last:
            self._tell(member, piece)

    def _tell(self, member: Member, item: Piece | Completion | BaseException) -> None:
        try:
            member.receive(item)
        except Exception as error:
            member.interrupt()
            self._raised.append(error)

    def _free(self, member: Member, *, sound: bool) -> None:
        if not member.ended:
            member.ended = True
            self._ended(member.context, sound)

    @contextmanager
    def _failing(self, members: Sequence[Member]) -> Iterator[None]:
        """Tells members of what goes wrong. Interrupts from the keyboard go on from here."""
        try:
            with self._runtime.memory.typed_errors(), self._runtime.memory.current():
                yield
        except BaseException as error:
            self._passes.end()
            for member in members:
                if member in self._going:
                    self._going.remove(member)
                if not member.ended:
                    self._free(member, sound=False)
                    self._tell(member, error)
            if not isinstance(error, Exception):
                raise


class Serving(Protocol):
    """An engine, as far as `run_all` asks."""

    has_room: bool

    def add_request(
        self, prompt: Any, params: Any, receive: Receiver, *, reuse: bool = True
    ) -> Member: ...

    def step(self) -> bool: ...

    def interrupt(self) -> None: ...


def run_all(
    engine: Serving,
    requests: Iterable[tuple[str | Sequence[int], SamplingParams | None, Receiver]],
    goes_on: Callable[[], bool],
    *,
    reuse: bool = True,
) -> None:
    """Runs requests to their ends, as many at once as there is room for.

    requests: prompt, parameters and receiver of each. goes_on: asked before each pass; once it says
        no, what is under way is interrupted and nothing new begins
    """
    waiting, going = deque(requests), True
    while going or (waiting and goes_on()):
        while waiting and engine.has_room and goes_on():
            prompt, params, receive = waiting.popleft()
            engine.add_request(prompt, params, receive, reuse=reuse)
        if not goes_on():
            engine.interrupt()
        going = engine.step()


def all_of(
    engine: Serving,
    prompts: Sequence[str | Sequence[int]],
    params: Sequence[SamplingParams | None],
    *,
    reuse: bool,
) -> list[Completion]:
    """What requests give. Raises the first error, once all that are under way have ended."""
    results: dict[int, Piece | Completion | BaseException] = {}
    errors: list[BaseException] = []

    def receive(index: int, item: Piece | Completion | BaseException) -> None:
        results[index] = item
        if isinstance(item, BaseException):
            errors.append(item)

    run_all(
        engine,
        [
            (prompt, own, partial(receive, index))
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ],
        lambda: not errors,
        reuse=reuse,
    )
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(prompts))]
