"""G1: every wait of the link, the staging and the conveyor, left out, is caught on a simulated GPU.

Each wait is a line of the source. It is taken out of the function that has it, and a scenario that
passes with it must then end in an error, in wrong bytes, or in a race that the simulation noticed.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from types import FrameType

import pytest
import torch
from simulated_gpu import REAL, Adversary, simulated

from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.graphs import CudaRecorder
from triforce_offload.link.cuda import CudaLink
from triforce_offload.link.link import Event
from triforce_offload.link.staging import StagedLink
from triforce_offload.link.waiting import come
from triforce_offload.memory.host import CudaDriver, HostMemory
from triforce_offload.weights.locations import Source

pytestmark = [
    pytest.mark.skipif(REAL, reason="simulates a GPU, and there is one"),
    # What is left out also shows where the last tensor of some memory goes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DEVICE = torch.device("cuda:0")
SIZE = 4096
_NEVER = "torch.cuda.Event()"


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_offload.link.cuda._PROBED", {})
    monkeypatch.setattr("triforce_offload.link.cuda._PROBE_BYTES", 1 << 20)
    monkeypatch.setattr("triforce_offload.link.cuda._COPY_BYTES", (1 << 19, 1 << 20))


def some_bytes(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


def copies() -> None:
    """Both directions of the link, behind and before compute, each other and the host."""
    # Memory that the probe of the link will get may still be read by a kernel.
    torch.ones(1 << 20, dtype=torch.uint8, device=DEVICE).sum()
    memory = HostMemory(CudaDriver(DEVICE))
    link = CudaLink(DEVICE, memory)
    with memory.arena(3 * SIZE) as arena:
        one, two, three = arena.bytes.split(SIZE)
        one.copy_(some_bytes(SIZE, 1))
        there = torch.full((SIZE,), 7, dtype=torch.uint8, device=DEVICE)
        link.wait(link.to_device(there, one, (link.record(),)))
        more = there + 1
        away = link.to_host(two, more, (link.record(),))
        link.wait_on_host(away)
        assert torch.equal(two, some_bytes(SIZE, 1) + 1)
        # On the device alone, one copy comes behind the other.
        away = link.to_host(three, more + 1, (link.record(),))
        link.wait(link.to_device(there, three, (link.record(), away)))
        assert torch.equal(come(there).cpu(), some_bytes(SIZE, 1) + 2)
        link.wait_on_host(link.to_device(there, one, (link.record(),)))
        one.copy_(some_bytes(SIZE, 2))
        link.to_device(there, one, (link.record(),))
        link.to_host(two, more, (link.record(),))
        link.synchronize()
        assert torch.equal(two, some_bytes(SIZE, 1) + 1)
        assert torch.equal(come(there + 0).cpu(), some_bytes(SIZE, 2))
        link.to_device(there, one, (link.record(),))
        link.close()
        # What a closed link has to do with can go.
        del one, two, three


def times() -> None:
    """The times of copies and of compute."""
    memory = HostMemory(CudaDriver(DEVICE))
    link = CudaLink(DEVICE, memory)
    link.keep_times()
    with memory.arena(SIZE) as arena:
        arena.bytes.zero_()
        there = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
        copy = link.to_device(there, arena.bytes, (link.record(),))
        began, ended = link.span(copy)
        assert began <= ended
        link.to_device(there, arena.bytes, (link.record(),))
        busy = link.counters().busy_seconds
        link.synchronize()
        assert busy == link.counters().busy_seconds
        link.close()


def passes() -> None:
    """Two passes through two slots, the first of which is given up in its middle."""
    memory = HostMemory(CudaDriver(DEVICE))
    link = CudaLink(DEVICE, memory)
    slots = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    conveyor = Conveyor(link, {"ring": slots})
    with memory.arena(6 * SIZE) as arena:
        arena.bytes.copy_(some_bytes(6 * SIZE, 3))
        schedule = [
            Transfer(place, "ring", Source(part))
            for place, part in enumerate(arena.bytes.split(SIZE))
        ]
        conveyor.start(schedule)
        conveyor.acquire(0).sum()
        conveyor.cancel()
        conveyor.start(schedule)
        for place in range(6):
            found = conveyor.acquire(place) + 0
            conveyor.release(place)
            assert torch.equal(come(found).cpu(), some_bytes(6 * SIZE, 3).split(SIZE)[place])
        conveyor.start(schedule)
        conveyor.cancel()
        conveyor.close()
        del slots, schedule
        # The allocator hands the slots' memory out again.
        torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
        link.close()


def staged() -> None:
    """Pageable memory through the pinned rings, and pinned memory beside it."""
    memory = HostMemory(CudaDriver(DEVICE))
    link = StagedLink(CudaLink(DEVICE, memory), memory, SIZE)
    size = 7 * SIZE + 5
    with memory.arena(size, pin=False) as pageable, memory.arena(size) as pinned:
        pageable.bytes.copy_(some_bytes(size, 4))
        there = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        link.wait(link.to_device(there, pageable.bytes, (link.record(),)))
        more = there + 1
        written = link.to_host(pageable.bytes, more, (link.record(),))
        link.wait_on_host(written)
        assert torch.equal(pageable.bytes, some_bytes(size, 4) + 1)
        # Pinned memory may come behind a copy that is staged, in either direction.
        read = link.to_device(there, pageable.bytes, (link.record(),))
        link.wait_on_host(link.to_host(pageable.bytes, more, (read, link.record())))
        away = link.to_host(pinned.bytes, more, (read, link.record()))
        link.wait(link.to_device(there, pinned.bytes, (link.record(), away)))
        staged_again = link.to_device(there, pageable.bytes, (link.record(), away))
        link.wait(link.to_device(there, pinned.bytes, (link.record(), staged_again)))
        assert torch.equal(come(there).cpu(), some_bytes(size, 4) + 1)
        link.to_host(pinned.bytes, there + 1, (link.record(),))
        link.synchronize()
        assert torch.equal(pinned.bytes, some_bytes(size, 4) + 2)
        link.to_device(there, pageable.bytes, (link.record(),))
        link.close()


@dataclass
class Slow:
    """Bytes that are read once the thread that asked for them waits, or has gone on."""

    source: torch.Tensor

    def __post_init__(self) -> None:
        self.gone_on = threading.Event()
        self._asked_by = threading.get_ident()

    def numel(self) -> int:
        return self.source.numel()

    def read(self, into: torch.Tensor) -> None:
        while not (self.gone_on.is_set() or self._is_awaited()):
            time.sleep(1e-4)
        into.copy_(self.source)

    def _is_awaited(self) -> bool:
        frame: FrameType | None = sys._current_frames().get(self._asked_by)
        names = set()
        while frame is not None:
            names.add((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        return (threading.__file__, "wait") in names


def on_demand() -> None:
    """What a thread reads from a file may not be there yet when somebody waits for it."""
    memory = HostMemory(CudaDriver(DEVICE))
    link = StagedLink(CudaLink(DEVICE, memory), memory, SIZE, (2, SIZE))
    there = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)

    def ended(copy: Event) -> None:
        # The host saw it end.
        link.span(copy)

    link.keep_times()
    for wait in (link.wait, lambda _: link.synchronize(), ended):
        source = Slow(some_bytes(SIZE, 5))
        try:
            wait(link.to_device(there, source, (link.record(),)))
        finally:
            source.gone_on.set()
        assert torch.equal(come(there + 0).cpu(), some_bytes(SIZE, 5))
        there.zero_()
    link.close()


def graphs() -> None:
    """Numbers that a replay computed, on the host."""
    number = torch.full((1,), 3.0, device=DEVICE)
    run = CudaRecorder(DEVICE).record(lambda: number * 2)
    assert float(come(run())) == 6.0


@dataclass(frozen=True)
class Wait:
    """A wait of the source, and what shows that it is needed.

    where: module, class and function; line: of its source; instead: what the line becomes
    """

    where: str
    line: str
    instead: str
    scenario: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.where}: {self.line}"


_COME = "triforce_offload.link.waiting:come"
_LINK, _STAGED = "triforce_offload.link.cuda:CudaLink", "triforce_offload.link.staging:StagedLink"
_CARRIER, _CONVEYOR = "triforce_offload.link.staging:_Carrier", "triforce_offload.conveyor:Conveyor"
WAITS = [
    Wait(f"{_LINK}._copy", "stream.wait_event(_end(event))", "pass", copies),
    Wait(
        f"{_LINK}.wait",
        "torch.cuda.current_stream(self._device).wait_event(_end(event))",
        "pass",
        copies,
    ),
    Wait(f"{_LINK}.wait_on_host", "self._patience.wait(_end(event))", "pass", copies),
    Wait(f"{_LINK}.synchronize", "self._patience.wait(event)", "pass", copies),
    Wait(f"{_LINK}.close", "self.synchronize()", "pass", copies),
    Wait(f"{_LINK}._probe", "self._in.wait_event(self.record())", "pass", copies),
    Wait(f"{_LINK}.span", "self._patience.wait(end)", "pass", times),
    Wait(f"{_LINK}.counters", "self._patience.wait(self._in.record_event())", "pass", times),
    Wait(f"{_CONVEYOR}.__init__", "link.record()", _NEVER, passes),
    Wait(f"{_CONVEYOR}.acquire", "self._link.wait(held.ready)", "pass", passes),
    Wait(f"{_CONVEYOR}.release", "self._link.record()", _NEVER, passes),
    Wait(f"{_CONVEYOR}.cancel", "slot.released = self._link.record()", "pass", passes),
    Wait(f"{_CONVEYOR}._issue", "after = (slot.released, *source.after)", "after = ()", passes),
    Wait(f"{_STAGED}.to_device", "_issued(event) for", "event for", staged),
    Wait(f"{_STAGED}.to_host", "_issued(event) for", "event for", staged),
    Wait(f"{_STAGED}.wait", "_issued(event)", "event", staged),
    Wait(f"{_STAGED}.wait_on_host", "_issued(event)", "event", staged),
    Wait(f"{_STAGED}.synchronize", "self._link.synchronize()", "pass", staged),
    Wait(f"{_STAGED}.close", "self._link.synchronize()", "pass", staged),
    Wait(f"{_STAGED}.span", "event.issued()", "pass", on_demand),
    Wait("triforce_offload.link.staging:_Staged.issued", "self.done.wait()", "pass", on_demand),
    Wait(f"{_CARRIER}.finish", "self._last.done.wait()", "pass", on_demand),
    Wait(f"{_CARRIER}._run", "_issued(event) for", "event for", staged),
    Wait(f"{_CARRIER}._carry", "self._link.wait_on_host(self._copied[place])", "pass", staged),
    Wait(f"{_CARRIER}._land", "self._link.wait_on_host(event)", "pass", staged),
    Wait(
        "triforce_offload.link.waiting:come", "patience(tensor.device).wait(event)", "pass", graphs
    ),
]
# Lines that look like waits, and why nothing is lost without them.
NO_WAITS = {
    "self._in.synchronize()": "the probe times copies between them",
    "self._patience.wait(epoch)": "it says when the device began to count, for times alone",
    "self._link.wait(held.ready)": "`cancel` synchronises the link after it, and takes its error",
    "self._link.synchronize()": "`cancel` waits for each copy before it",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("adversary", list(Adversary))
@pytest.mark.parametrize("scenario", [copies, times, passes, staged, on_demand, graphs])
def test_with_every_wait_nothing_is_noticed(
    scenario: Callable[[], None], adversary: Adversary
) -> None:
    with simulated(adversary, seed=5, strict=True) as machine, torch.inference_mode():
        scenario()
    assert machine.faults == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_wait_left_out_is_caught(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(wait, monkeypatch)
    caught = ""
    with simulated(Adversary.LATE, strict=True) as machine, torch.inference_mode():
        try:
            wait.scenario()
        except Exception as error:
            caught = f"{type(error).__name__}: {error}"
    assert caught or machine.faults, "nothing was noticed"


@pytest.mark.one_in(10)
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_function_that_is_compiled_again_with_its_wait_passes(
    wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(replace(wait, instead=wait.line), monkeypatch)
    with simulated(Adversary.LATE, strict=True) as machine, torch.inference_mode():
        wait.scenario()
    assert machine.faults == []


def test_every_wait_of_these_modules_is_one_of_them() -> None:
    calls = re.compile(r"\.(wait|wait_event|wait_on_host|synchronize|issued)\(|_issued\(")
    for name in ("link.cuda", "link.staging", "conveyor", "graphs"):
        module = import_module(f"triforce_offload.{name}")
        for line in inspect.getsource(module).splitlines():
            if calls.search(line) and not line.lstrip().startswith(("def ", "#", "return event")):
                known = [it for it in WAITS if it.line in line]
                assert known or line.strip() in NO_WAITS, f"{name}: {line.strip()}"


def leave_out(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the function that has the wait again, without it."""
    name, _, path = wait.where.partition(":")
    module = import_module(name)
    home = attrgetter(path.rpartition(".")[0])(module) if "." in path else module
    function = inspect.unwrap(attrgetter(path)(module))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(wait.line) >= 1, "the source has no such line any more"
    source = source.replace(wait.line, wait.instead)
    names: dict[str, object] = {}
    # Within a class's body `super()` would have no class to begin at: it gets one.
    source = source.replace("super()", "super(StagedLink, self)")
    exec(compile(source, f"<{wait}>", "exec"), vars(module) | {"torch": torch}, names)
    monkeypatch.setattr(home, function.__name__, names[function.__name__])
    for user in (sys.modules[__name__], *filter(None, map(sys.modules.get, _USERS_OF_COME))):
        if function.__name__ == "come":
            monkeypatch.setattr(user, "come", names["come"])


_USERS_OF_COME = ("triforce_offload.kv.gather",)
