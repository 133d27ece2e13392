"""Streams and events, with an order that an adversary chooses within what waits allow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from random import Random

import torch

# Every operation of the simulation, of whatever thread, runs under this lock.
LOCK = threading.RLock()

# PCIe 4.0 x16, in bytes per second, and the time of a launch: virtual seconds are made of these.
_LINK_BYTES_PER_SECOND = 25.2e9
# How often at most an event that nobody forces is asked for in vain.
_MOST_QUERIES = 4


class Adversary(Enum):
    """When copies on other streams than the default one are made.

    LATE: when something waits for them, and no sooner
    EARLY: as they are asked for
    RANDOM: one or the other, by a coin with a seed
    """

    LATE = "late"
    EARLY = "early"
    RANDOM = "random"


class CaptureRefusedError(RuntimeError):
    """An operation that a stream under capture does not permit."""


class Event:
    """torch.cuda.Event."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._timed = enable_timing
        self._stream: Stream | None = None
        self._clock: dict[int, int] = {}
        self._done = True
        self._seconds = 0.0
        self._asked = 0
        self._graph: object | None = None

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            stream = stream or _machine().current_stream()
            self._stream = stream
            self._graph = _machine().capturing
            self._clock = dict(stream.clock)
            self._done = False
            self._asked = 0
            stream.enqueue(self._finish)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _machine().current_stream()).wait_event(self)

    def query(self) -> bool:
        """True once everything before it is done. The adversary lets it be asked a few times."""
        with LOCK:
            _machine().refuse_capture("cudaEventQuery")
            if not self._done:
                self._asked += 1
                if self._asked < _MOST_QUERIES:
                    return False
                self.force()
            _machine().host_saw(self._clock)
            return True

    def synchronize(self) -> None:
        with LOCK:
            _machine().refuse_capture("cudaEventSynchronize")
            self.force()
            _machine().host_saw(self._clock)

    def elapsed_time(self, end: Event) -> float:
        """Virtual milliseconds from this event to another."""
        with LOCK:
            if not (self._timed and end._timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._stream is None or end._stream is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self._done and end._done):
                raise RuntimeError("CUDA error: device not ready")
            return (end._seconds - self._seconds) * 1000

    def force(self) -> None:
        """Runs what comes before this event on its stream."""
        if not self._done:
            self._stream.run_until(lambda: self._done)

    def _finish(self) -> None:
        self._done = True
        self._seconds = self._stream.seconds


class Stream:
    """torch.cuda.Stream. The default stream of a device runs what it is given at once; copies and
    events on others wait for the adversary.

    clock: how many operations of each stream are sure to be done before its next one
    """

    def __init__(self, device: object = None, priority: int = 0, *, default: bool = False) -> None:
        machine = _machine()
        with LOCK:
            self.device_index = machine.index_of(device)
            self.device = machine.torch_device(self.device_index)
            self.index = machine.new_stream_index(self)
            self.clock: dict[int, int] = {self.index: 0}
            self.seconds = 0.0
            self._default = default
            self._queue: deque[Callable[[], None]] = deque()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with LOCK:
            machine = _machine()
            if machine.capturing is not None and event._graph is not machine.capturing:
                raise machine.refusal("a wait for work that is not part of the capture")
            if event._stream is None:
                return
            join(self.clock, event._clock)

            def wait() -> None:
                event.force()
                self.seconds = max(self.seconds, event._seconds)

            self.enqueue(wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        with LOCK:
            _machine().refuse_capture("cudaStreamSynchronize")
            self.run()
            _machine().host_saw(self.clock)

    def query(self) -> bool:
        with LOCK:
            return not self._queue

    def tick(self) -> int:
        """Counts an operation that is enqueued now, behind all that the host has seen done."""
        join(self.clock, _machine().host_clock)
        self.clock[self.index] += 1
        return self.clock[self.index]

    def enqueue(self, run: Callable[[], None]) -> None:
        asked = time.perf_counter()

        def job() -> None:
            self.seconds = max(self.seconds, asked)
            run()

        self._queue.append(job)
        if self._default or _machine().runs_now():
            self.run()

    def carry(self, nbytes: int) -> None:
        """Lets the virtual time of a copy pass."""
        self.seconds += nbytes / _LINK_BYTES_PER_SECOND

    def run(self) -> None:
        self.run_until(lambda: False)

    def run_until(self, enough: Callable[[], bool]) -> None:
        # Whoever forces a copy, its memory may have been made in inference mode.
        with torch.inference_mode():
            while self._queue and not enough():
                self._queue.popleft()()

    @property
    def is_default(self) -> bool:
        return self._default

    @property
    def cuda_stream(self) -> int:
        return 0 if self._default else self.index

    def __enter__(self) -> Stream:
        self._context = UsedStream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)


class UsedStream:
    """torch.cuda.stream(stream): that is the current one inside, and its device too."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            state = _machine().thread
            index = self._stream.device_index
            self._before = state.device, index, state.streams.get(index)
            state.device = index
            state.streams[index] = self._stream

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            state = _machine().thread
            state.device, index, stream = self._before
            if stream is None:
                del state.streams[index]
            else:
                state.streams[index] = stream


class Coin:
    """What an adversary decides, by its kind and a seed."""

    def __init__(self, adversary: Adversary, seed: int) -> None:
        self._adversary = adversary
        self._random = Random(seed)

    def runs_now(self) -> bool:
        if self._adversary is Adversary.RANDOM:
            return self._random.random() < 0.5
        return self._adversary is Adversary.EARLY


def join(clock: dict[int, int], other: dict[int, int]) -> None:
    """The later of both, stream by stream, in `clock`."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _machine():
    from simulated_gpu.machine import machine

    return machine()
