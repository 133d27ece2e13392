"""The thread that has the engine: requests wait in a queue, one after another is served."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from triforce_core.conversation import Conversations, Turn
from triforce_core.engine import Engine
from triforce_core.params import SamplingParams
from triforce_core.server.contexts import KeptContexts
from triforce_core.server.errors import NotReadyError, QueueFullError
from triforce_core.stream import Completion, Piece, Stream

# Called in the engine's thread with what a request gives: text, its completion or its error.
Receiver = Callable[[Piece | Completion | BaseException], None]


class Asked(NamedTuple):
    """What is to be answered. conversation: whether it may go on from the answer."""

    turn: Turn
    conversation: bool


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
    _stream: Stream | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self._stream is not None:
            self._stream.interrupt()

    def run(self, engine: Engine) -> Completion:
        """In the engine's thread."""
        self.began = time.monotonic()
        self._stream = engine.stream(self.asked_for.turn.tokens, self.params)
        if self.cancelled:
            self._stream.interrupt()
        for piece in self._stream.pieces():
            self.receive(piece)
        return self._stream.result


class Worker:
    """Loads an engine and serves jobs until it is closed.

    state: "loading", "ready", "failed" or "closed"; error: why it failed
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
        self.current: Job | None = None
        # Called if loading fails.
        self.failed: Callable[[], None] = lambda: None
        self._progress = (0, 1)
        self._served = served
        self._contexts = contexts
        self._load = load
        self._most = waiting
        # A deque and a queue that may be used in a signal's handler, which takes no lock.
        self._jobs: deque[Job] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait, without those whose clients have left."""
        return len({id(job.request) for job in tuple(self._jobs) if not job.cancelled})

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

    def check_room(self) -> None:
        """Raises what `submit` would now."""
        if self.state != "ready":
            raise NotReadyError(f"the model is {self.state}")
        # What an idle engine is about to take does not wait.
        if self.waiting >= self._most + (self.current is None):
            raise QueueFullError(f"{self._most} requests wait already")

    def close(self) -> None:
        """Ends the job under way and the thread; those that wait are told."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def stop(self) -> None:
        """The same without waiting for it. May be called in a signal's handler."""
        self.state = "closed"
        if (current := self.current) is not None:
            current.cancel()
        while self._jobs:
            self._jobs.popleft().receive(NotReadyError("the server is closing"))
        self._wakes.put(None)

    def _run(self) -> None:
        try:
            self.engine = self._load(self._report)
        except BaseException as error:
            self.state, self.error = "failed", error
            self.failed()
            return
        with self.engine as engine:
            self.conversations = Conversations(engine.tokenizer)
            kept = KeptContexts(engine, self._contexts)
            if self.state == "loading":
                self.state = "ready"
            while self.state != "closed":
                self._wakes.get()
                with suppress(IndexError):
                    self._serve(engine, kept, self._jobs.popleft())

    def _serve(self, engine: Engine, kept: KeptContexts, job: Job) -> None:
        if job.cancelled:
            return
        self.current, self._progress = job, (0, 1)
        result: Completion | BaseException
        try:
            kept.prepare(job.asked_for.turn.tokens)
            result = job.run(engine)
            if job.asked_for.conversation:
                stops = frozenset(engine.config.eos_token_ids + job.params.stop_token_ids)
                self.conversations.answered(job.asked_for.turn, result, stops)
            if self.state == "closed" and result.finish_reason == "interrupted":
                # What was cut is not given as if it were whole.
                result = NotReadyError("the server is closing")
        except BaseException as error:
            result = error
        finally:
            self.current = None
        self._served(job, result)
        job.receive(result)

    def _report(self, what: str, done: int, total: int) -> None:
        self._progress = (done, total)
