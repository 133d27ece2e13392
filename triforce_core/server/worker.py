"""The engine's thread: requests wait in a queue until the engine has room for them."""

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

# Errors after which the engine cannot continue.
_LAST = (DeviceFailedError, RankError)
# The number of prompts tokenised at once.
_PREPARERS = 2


class Prompt(NamedTuple):
    """A prompt to answer.

    conversation: whether a later request may continue from the answer
    owner: the client, as far as it identifies itself
    """

    turn: Turn
    conversation: bool
    owner: str = ""


@dataclass(eq=False)
class Job:
    """One sequence to generate. `cancel` ends it within one pass, whether it waits or runs.

    request: an object shared by all sequences of one request, which count as one in the queue
    """

    prompt: Prompt
    params: SamplingParams
    receive: Receiver
    request: object = field(default_factory=object)
    submitted: float = field(default_factory=time.monotonic)
    began: float | None = None
    cancelled: bool = False
    _member: Member | None = None

    @property
    def progress(self) -> float:
        """The share of the prompt that is processed."""
        return self._member.request.progress if self._member else 0.0

    def cancel(self) -> None:
        self.cancelled = True
        if self._member is not None:
            self._member.interrupt()

    def begin(self, engine: Engine, receive: Receiver) -> None:
        """Add the sequence to the engine, in the engine's thread.

        Raises UsageError or DoesNotFitError.
        """
        self.began = time.monotonic()
        prompt = self.prompt
        self._member = engine.add_request(
            prompt.turn.tokens, self.params, receive, owner=prompt.owner
        )
        if self.cancelled:
            self._member.interrupt()


class Worker:
    """A thread that loads an engine and serves jobs until it is closed or the engine fails.

    state: "loading", "ready", "failed" or "closed"
    error: the error that made it fail
    preparers: the threads that tokenise prompts
    """

    def __init__(
        self,
        load: Callable[[Callable[[str, int, int], None]], Engine],
        waiting: int,
        contexts: int,
        served: Callable[[Job, Completion | BaseException], None] = lambda job, result: None,
    ) -> None:
        """load: loads the engine; called in the worker's thread with a callback for progress
        waiting: the maximum number of waiting requests
        contexts: as in ServerSettings
        served: called with each job that ends and its result
        """
        self.state = "loading"
        self.error: BaseException | None = None
        self.engine: Engine | None = None
        self.conversations: Conversations | None = None
        self.running: list[Job] = []
        # Called in the worker's thread once it accepts jobs.
        self.became_ready: Callable[[Engine], None] = lambda engine: None
        # Called when the worker has failed.
        self.failed: Callable[[], None] = lambda: None
        self._progress = (0, 1)
        self._served = served
        self._contexts = contexts
        self._load = load
        self._most = waiting
        # A deque and a SimpleQueue take no lock, so a signal handler may use them.
        self._jobs: deque[Job] = deque()
        self._prepared = 0
        # Few threads, because tokenising takes many times the memory of the text.
        self.preparers = ThreadPoolExecutor(_PREPARERS, "tokenise")
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def context_tokens(self) -> int:
        """The maximum tokens of a sequence. The engine must be loaded."""
        return self.engine.max_context

    @property
    def waiting(self) -> int:
        """The number of requests that wait or are being tokenised."""
        return self._prepared + len({id(job.request) for job in tuple(self._jobs)})

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Hold a place in the queue while a request is tokenised. Only for the event loop's thread.

        Raises QueueFullError or NotReadyError.
        """
        self.check_room()
        self._prepared += 1
        try:
            yield
        finally:
            self._prepared -= 1

    @property
    def progress(self) -> float:
        """The share of layers done while the model loads."""
        done, total = self._progress
        return done / total

    def submit(self, jobs: Sequence[Job]) -> None:
        """Append the sequences of one request to the queue.

        Raises QueueFullError or NotReadyError.
        """
        self.check_room()
        for job in jobs:
            self._jobs.append(job)
            self._wakes.put(None)
        if self.state != "ready":
            # The state has changed since the check above.
            self._refuse_waiting()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel the sequences of one request. Those that wait leave the queue."""
        for job in jobs:
            job.cancel()
            with suppress(ValueError):
                self._jobs.remove(job)

    def check_ready(self) -> None:
        """Raise NotReadyError unless the engine is ready."""
        if self.state != "ready":
            raise self._not_ready()

    def check_room(self) -> None:
        """Raise the error that `submit` would raise now."""
        self.check_ready()
        # The engine takes as many requests as it has room for; these do not count as waiting.
        free = self.engine.sequences - len(self.running)
        if self.waiting >= self._most + free:
            raise QueueFullError(f"{self._most} requests wait already")

    def close(self) -> None:
        """Cancel running jobs, reject waiting ones and join the thread."""
        self.stop()
        self.preparers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()

    def stop(self) -> None:
        """Close without waiting for the thread. A signal handler may call this."""
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
                    # Before the engine closes: sequences that it interrupts must not appear to be
                    # complete.
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
            self.became_ready(engine)
        while self.state == "ready" or self.running:
            self._wait_for_jobs()
            self._admit(engine, kept)
            engine.step(in_parts=engine.sequences > 1)

    def _wait_for_jobs(self) -> None:
        """Wait until there is something to do."""
        if not self.running and not self._jobs and self.state == "ready":
            self._wakes.get()
        # What the wakes so far were for is looked at after this.
        with suppress(queue.Empty):
            while True:
                self._wakes.get_nowait()

    def _fail(self, error: BaseException) -> None:
        """Record the error, reject waiting jobs and serve nothing more."""
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
        # Pop until the queue is empty, because several threads may run this at once.
        with suppress(IndexError):
            while True:
                self._jobs.popleft().receive(self._not_ready())

    def _admit(self, engine: Engine, kept: KeptContexts) -> None:
        """Start waiting jobs while the engine has room."""
        while self.state == "ready" and self._jobs and engine.has_room:
            try:
                job = self._jobs.popleft()
            except IndexError:
                # A signal handler has just rejected the waiting jobs.
                return
            if job.cancelled:
                continue
            self.running.append(job)
            try:
                kept.prepare(job.prompt.turn.tokens, job.prompt.owner)
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
            if isinstance(result, Completion) and job.prompt.conversation:
                stops = frozenset(self.engine.config.eos_token_ids + job.params.stop_token_ids)
                self.conversations.answered(job.prompt.turn, result, stops)
        except BaseException as error:
            result = error
        cut = isinstance(result, Completion) and result.finish_reason == "interrupted"
        if self.state != "ready" and cut:
            # An interrupted sequence must not appear to be complete.
            result = self._not_ready()
        try:
            self._served(job, result)
        finally:
            job.receive(result)
        if isinstance(result, BaseException) and self._is_last(result):
            self._fail(result)

    def _is_last(self, error: BaseException) -> bool:
        """Return whether the engine cannot continue after an error."""
        if isinstance(error, _LAST):
            return True
        try:
            # An error in the middle of a pass ends the other ranks.
            self.engine.check_ranks()
        except RankError:
            return True
        return False

    def _report(self, what: str, done: int, total: int) -> None:
        self._progress = (done, total)
