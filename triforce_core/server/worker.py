"""The thread that has the engine: requests wait in a queue until there is room for them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from triforce_core.conversation import Conversations, Turn
from triforce_core.engine import Engine
from triforce_core.params import SamplingParams
from triforce_core.requests.batch import Member, Receiver
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.contexts import KeptContexts
from triforce_core.server.errors import NotReadyError, QueueFullError
from triforce_offload.errors import DeviceFailedError, RankError

# What an engine does not outlive.
_LAST = (DeviceFailedError, RankError)
# Texts that are tokenised at once.
_PREPARERS = 2


class Asked(NamedTuple):
    """What is to be answered. conversation: whether it may go on from the answer. owner: who asks,
    as far as a client says so
    """

    turn: Turn
    conversation: bool
    owner: str = ""


@dataclass(eq=False)
class Job:
    """One text that is asked for. `cancel` ends it, wherever it is, within a pass.

    request: the same object for all texts of one request, which wait together
    """

    asked_for: Asked
    params: SamplingParams
    receive: Receiver
    request: object = field(default_factory=object)
    asked: float = field(default_factory=time.monotonic)
    began: float | None = None
    cancelled: bool = False
    _member: Member | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self._member is not None:
            self._member.interrupt()

    def begin(self, engine: Engine, receive: Receiver) -> None:
        """In the engine's thread. Raises UsageError or DoesNotFitError."""
        self.began = time.monotonic()
        asked = self.asked_for
        self._member = engine.add_request(
            asked.turn.tokens, self.params, receive, owner=asked.owner
        )
        if self.cancelled:
            self._member.interrupt()


class Worker:
    """Loads an engine and serves jobs until it is closed, or the engine can do nothing more.

    state: "loading", "ready", "failed" or "closed"; error: why it failed
    preparers: threads that tokenise
    """

    def __init__(
        self,
        load: Callable[[Callable[[str, int, int], None]], Engine],
        waiting: int,
        contexts: int,
        served: Callable[[Job, Completion | BaseException], None] = lambda job, result: None,
    ) -> None:
        """load: makes the engine, called in the worker's thread with where progress is told.
        waiting: jobs that may wait. contexts: as ServerSettings has it. served: is told of each.
        """
        self.state = "loading"
        self.error: BaseException | None = None
        self.engine: Engine | None = None
        self.conversations: Conversations | None = None
        self.running: list[Job] = []
        # Called when it has failed.
        self.failed: Callable[[], None] = lambda: None
        self._progress = (0, 1)
        self._served = served
        self._contexts = contexts
        self._load = load
        self._most = waiting
        # A deque and a queue that may be used in a signal's handler, which takes no lock.
        self._jobs: deque[Job] = deque()
        self._prepared = 0
        # Few, since each takes many times the memory of its text.
        self.preparers = ThreadPoolExecutor(_PREPARERS, "tokenise")
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def context_tokens(self) -> int:
        """Tokens that a text has room for, once the engine is there."""
        return self.engine.max_context

    @property
    def waiting(self) -> int:
        """Requests that wait, or whose text is tokenised, without those whose clients have left."""
        jobs = tuple(self._jobs)
        return self._prepared + len({id(job.request) for job in jobs if not job.cancelled})

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Takes a place in the queue for a request whose text is to be tokenised. In the event
        loop's thread alone. Raises QueueFullError or NotReadyError.
        """
        self.check_room()
        self._prepared += 1
        try:
            yield
        finally:
            self._prepared -= 1

    @property
    def progress(self) -> float:
        """The share of a prompt's layers, or of the model's, that were read."""
        done, total = self._progress
        return done / total

    def submit(self, jobs: Sequence[Job]) -> None:
        """Puts the texts of one request behind the others.

        Raises QueueFullError or NotReadyError.
        """
        self.check_room()
        for job in jobs:
            self._jobs.append(job)
            self._wakes.put(None)
        if self.state != "ready":
            # Since it was asked for room.
            self._refuse_waiting()

    def check_ready(self) -> None:
        """Raises NotReadyError."""
        if self.state != "ready":
            raise self._not_ready()

    def check_room(self) -> None:
        """Raises what `submit` would now."""
        self.check_ready()
        # What the engine is about to take does not wait.
        free = self.engine.sequences - len(self.running)
        if self.waiting >= self._most + free:
            raise QueueFullError(f"{self._most} requests wait already")

    def close(self) -> None:
        """Ends the jobs under way and the thread; those that wait are told."""
        self.stop()
        self.preparers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()

    def stop(self) -> None:
        """The same without waiting for it. May be called in a signal's handler."""
        self.state = "closed"
        for job in tuple(self.running):
            job.cancel()
        self._refuse_waiting()
        self._wakes.put(None)

    def _run(self) -> None:
        try:
            self.engine = self._load(self._report)
            with self.engine as engine:
                try:
                    self._serve(engine)
                except BaseException as error:
                    # Before the engine closes: what that cuts is not given as if it were whole.
                    self._fail(error)
        except BaseException as error:
            self._fail(error)
        for job in self.running:
            job.receive(self._not_ready())

    def _serve(self, engine: Engine) -> None:
        self.conversations = Conversations(engine.tokenizer)
        kept = KeptContexts(engine, self._contexts)
        if self.state == "loading":
            self.state = "ready"
        while self.state == "ready" or self.running:
            if not self.running:
                self._wakes.get()
            self._admit(engine, kept)
            engine.step()

    def _fail(self, error: BaseException) -> None:
        """Nothing is served any more."""
        if self.error is None:
            self.error, self.state = error, "failed"
            self._refuse_waiting()
            self.failed()

    def _not_ready(self) -> NotReadyError:
        if self.error is not None:
            why = str(self.error) or type(self.error).__name__
            return NotReadyError(f"the server ends: {why}")
        if self.state == "loading":
            return NotReadyError("the model is loading")
        return NotReadyError("the server is closing")

    def _refuse_waiting(self) -> None:
        # Until there is none: several threads may come here.
        with suppress(IndexError):
            while True:
                self._jobs.popleft().receive(self._not_ready())

    def _admit(self, engine: Engine, kept: KeptContexts) -> None:
        """Begins jobs that wait, as long as there is room."""
        while self.state == "ready" and self._jobs and engine.has_room:
            try:
                job = self._jobs.popleft()
            except IndexError:
                # Those that waited were told in a signal's handler that the server closes.
                return
            if job.cancelled:
                continue
            self.running.append(job)
            self._progress = (0, 1)
            try:
                kept.prepare(job.asked_for.turn.tokens, job.asked_for.owner)
                job.begin(engine, partial(self._received, job))
            except BaseException as error:
                self._ended(job, error)
            if self.state == "closed":
                job.cancel()

    def _received(self, job: Job, item: Piece | Completion | BaseException) -> None:
        if isinstance(item, Piece):
            job.receive(item)
        else:
            self._ended(job, item)

    def _ended(self, job: Job, result: Completion | BaseException) -> None:
        self.running.remove(job)
        try:
            if isinstance(result, Completion) and job.asked_for.conversation:
                stops = frozenset(self.engine.config.eos_token_ids + job.params.stop_token_ids)
                self.conversations.answered(job.asked_for.turn, result, stops)
        except BaseException as error:
            result = error
        cut = isinstance(result, Completion) and result.finish_reason == "interrupted"
        if self.state != "ready" and cut:
            # What was cut is not given as if it were whole.
            result = self._not_ready()
        try:
            self._served(job, result)
        finally:
            job.receive(result)
        if isinstance(result, BaseException) and self._is_last(result):
            self._fail(result)

    def _is_last(self, error: BaseException) -> bool:
        """Whether the engine does not outlive it."""
        if isinstance(error, _LAST):
            return True
        try:
            # Whatever goes wrong in the middle of a pass ends the other ranks.
            self.engine.check_ranks()
        except RankError:
            return True
        return False

    def _report(self, what: str, done: int, total: int) -> None:
        self._progress = (done, total)
