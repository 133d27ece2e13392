"""A timeline of link, device, processor and host, in the format of Chrome's and Perfetto's viewers.

Without tracing nothing of it runs: the link is not wrapped, and `NoTrace` does nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from triforce_offload.files import Output
from triforce_offload.link.link import Event, Link, WrappedLink

if TYPE_CHECKING:
    import torch

COPY_IN, COPY_OUT, COMPUTE = "copy in", "copy out", "compute"
PROCESSOR, HOST = "processor", "host"
TRACKS = (COPY_IN, COPY_OUT, COMPUTE, PROCESSOR, HOST)
_LEAST_WAIT_SECONDS = 20e-6


class Span(NamedTuple):
    """A named interval on a track. began, ended: seconds of time.perf_counter"""

    track: str
    name: str
    began: float
    ended: float
    args: dict[str, Any]

    def later(self, seconds: float) -> Span:
        return self._replace(began=self.began + seconds, ended=self.ended + seconds)


class Tracer(Protocol):
    """Receives what the runtime does."""

    def compute(self, name: str, **args: Any) -> AbstractContextManager:
        """Group the kernels launched inside the block under one name."""

    def processor(self, name: str, **args: Any) -> AbstractContextManager:
        """Record what the processor computes of a pass inside the block."""

    def host(self, name: str, began: float, seconds: float, **args: Any) -> None:
        """Record work of the host, which began at `began` in seconds of time.perf_counter."""


class NoTrace:
    """A tracer that records nothing."""

    def compute(self, name: str, **args: Any) -> AbstractContextManager:
        return _NOTHING

    def processor(self, name: str, **args: Any) -> AbstractContextManager:
        return _NOTHING

    def host(self, name: str, began: float, seconds: float, **args: Any) -> None:
        pass


_NOTHING = nullcontext()


class Trace:
    """Records events while a request runs; `spans` asks the link for their times."""

    def __init__(self, link: Link) -> None:
        self._link = link
        link.keep_times()
        self._copies: list[tuple[str, Hashable, int, Event]] = []
        self._computed: list[tuple[str, Event, Event, dict[str, Any]]] = []
        self._host: list[Span] = []

    @contextmanager
    def compute(self, name: str, **args: Any) -> Iterator[None]:
        began = self._link.record()
        try:
            yield
        finally:
            self._computed.append((name, began, self._link.record(), args))

    @contextmanager
    def processor(self, name: str, **args: Any) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._host.append(Span(PROCESSOR, name, began, time.perf_counter(), args))

    def host(self, name: str, began: float, seconds: float, **args: Any) -> None:
        self._host.append(Span(HOST, name, began, began + seconds, args))

    def copy(self, track: str, what: Hashable, size: int, event: Event) -> None:
        """Record a copy: its name, its bytes and the event of its end."""
        self._copies.append((track, what, size, event))

    def clear(self) -> None:
        self._copies.clear()
        self._computed.clear()
        self._host.clear()

    def spans(self) -> list[Span]:
        """Return all spans so far, by track. Waits until they have ended. Raises LinkError."""
        copies = [
            Span(track, _name(what), *self._link.span(event), _describe(what) | {"bytes": size})
            for track, what, size, event in self._copies
        ]
        computed = [
            Span(COMPUTE, name, self._link.span(began)[1], self._link.span(ended)[1], args)
            for name, began, ended, args in self._computed
        ]
        waits = _LEAST_WAIT_SECONDS
        computed = [s for s in computed if s.name != _WAIT or s.ended - s.began >= waits]
        return [*copies, *computed, *self._host]


def write_spans(ranks: Sequence[Sequence[Span]], path: Path, about: dict[str, Any]) -> None:
    """Write the timelines of one or more ranks, completely or not at all. about: description of the
    run, stored beside the events

    Raises OutputError.
    """
    zero = min((span.began for spans in ranks for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        for i, track in enumerate(TRACKS):
            name = track if len(ranks) == 1 else f"{track}, rank {rank}"
            about_track = {"thread_name": {"name": name}, "thread_sort_index": {"sort_index": i}}
            events += [
                {"ph": "M", "pid": rank, "tid": i, "name": kind, "args": args}
                for kind, args in about_track.items()
            ]
        events += [
            {
                "ph": "X",
                "pid": rank,
                "tid": TRACKS.index(span.track),
                "name": span.name,
                "ts": round((span.began - zero) * 1e6, 3),
                "dur": round((span.ended - span.began) * 1e6, 3),
                "args": span.args,
            }
            for span in sorted(spans, key=lambda span: span.began)
        ]
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    Output(path, "trace").write(json.dumps(whole))


_WAIT = "wait"


class TracedLink(WrappedLink):
    """A link that records in a trace every copy, and every wait of compute or host for one."""

    def __init__(self, link: Link, trace: Trace) -> None:
        super().__init__(link)
        self._trace = trace

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        event = super().to_device(device, host, after, what)
        self._trace.copy(COPY_IN, what, host.numel(), event)
        return event

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        event = super().to_host(host, device, after, what)
        self._trace.copy(COPY_OUT, what, host.numel(), event)
        return event

    def wait(self, event: Event) -> None:
        with self._trace.compute(_WAIT):
            super().wait(event)

    def wait_on_host(self, event: Event) -> None:
        began = time.perf_counter()
        super().wait_on_host(event)
        if (waited := time.perf_counter() - began) >= _LEAST_WAIT_SECONDS:
            self._trace.host(_WAIT, began, waited)


def _name(what: Hashable) -> str:
    return str(what[0]) if isinstance(what, tuple) else str(what)


def _describe(what: Hashable) -> dict[str, Any]:
    """Return the parts of a transfer's key, which is (ring, layer) or (ring, layer, block), without
    the sequence that may follow.
    """
    if not isinstance(what, tuple):
        return {}
    part = what[0] if what[0] == "expert" else "block"
    return dict(zip(("layer", part), what[1:], strict=False))
