"""Waiting for a device ends: with an event of torch.cuda's that comes, fails or never comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from triforce_core.cli import entry, main
from triforce_offload.errors import DeviceFailedError, DeviceHungError
from triforce_offload.link import cuda, waiting
from triforce_offload.link.cuda import CudaLink
from triforce_offload.link.waiting import Patience, come, hangs
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import CudaDriver, HostMemory


class Event:
    """torch.cuda.Event, of a device that answers as it is told to."""

    answers: Callable[[int], bool] = staticmethod(lambda asked: True)

    def __init__(self, **_: object) -> None:
        self.asked = 0

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return type(self).answers(self.asked)

    def synchronize(self) -> None:
        raise AssertionError("a wait that nobody can end")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, *_: object) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    synchronize = Event.synchronize


@pytest.fixture
def link(monkeypatch) -> CudaLink:
    """Of a device that gives up after a tenth of a second, and was probed before."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setitem(cuda._PROBED, device, (1e9, 1 << 24))
    return CudaLink(device, HostMemory(), timeout_seconds=0.1)


WAITS = {
    "wait_on_host": lambda link: link.wait_on_host(Event()),
    "synchronize": lambda link: link.synchronize(),
    "counters": lambda link: link.counters(),
    "keep_times": lambda link: link.keep_times(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_never_comes_is_an_error_at_the_limit_and_then_at_once(
    link, monkeypatch, name: str
) -> None:
    monkeypatch.setattr(Event, "answers", staticmethod(lambda asked: False))
    began = time.monotonic()
    with pytest.raises(DeviceHungError, match=r"did not finish a copy.* within 0\.1 seconds"):
        WAITS[name](link)
    assert time.monotonic() - began >= 0.1
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it is waited for again"))
    for again in WAITS.values():
        with pytest.raises(DeviceHungError, match="did not finish"):
            again(link)
    # Nothing waits there: whoever ends the run has said why.
    link.close()


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("times", [1, 2, 500])
def test_what_comes_is_waited_for(link, monkeypatch, name: str, times: int) -> None:
    answered: list[int] = []

    def come(asked: int) -> bool:
        if asked >= times:
            answered.append(asked)
        return asked >= times

    monkeypatch.setattr(Event, "answers", staticmethod(come))
    # However long the pauses are on a machine, the limit is not what ends this.
    link._patience._seconds = 3600.0
    WAITS[name](link)
    # Each event is asked until it has come, and no more.
    assert answered == [times] * (2 if name == "synchronize" else 1)


def test_what_is_there_costs_one_question(link, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it was there"))
    event = Event()
    link.wait_on_host(event)
    assert event.asked == 1


@pytest.mark.parametrize("name", WAITS)
def test_a_device_that_failed_is_an_error_at_once(link, monkeypatch, name: str) -> None:
    def fail(asked: int) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "answers", staticmethod(fail))
    with pytest.raises(DeviceFailedError, match="illegal memory access"):
        WAITS[name](link)


class Numbers:
    """A tensor of a device, whose own wait nobody can end."""

    is_cuda, device = True, torch.device("cuda", 0)

    def tolist(self) -> list[int]:
        raise AssertionError("a wait that nobody can end")


@pytest.fixture
def kernel(monkeypatch) -> Numbers:
    """What a kernel computes that never ends, on a device that is given up after a moment."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(Event, "answers", staticmethod(lambda asked: False))
    monkeypatch.setitem(waiting._PATIENCE, Numbers.device, Patience(0.1))
    return Numbers()


def test_a_kernel_that_hangs_is_an_error_at_the_limit(kernel) -> None:
    assert not hangs()
    with pytest.raises(DeviceHungError, match="did not finish"):
        come(kernel).tolist()
    assert hangs()
    assert hangs(kernel.device)
    assert not hangs(torch.device("cuda", 1))
    assert not hangs(torch.device("cpu"))


def test_numbers_that_have_come_are_those_of_the_tensor(kernel, monkeypatch) -> None:
    monkeypatch.setattr(Event, "answers", staticmethod(lambda asked: asked > 3))
    assert come(kernel) is kernel
    assert not hangs()
    here = torch.arange(3)
    assert come(here) is here


def test_a_device_that_hangs_is_asked_for_nothing_more(kernel, monkeypatch) -> None:
    """Or the end of the run would wait for it."""
    with pytest.raises(DeviceHungError):
        come(kernel)
    for name in ("empty_cache", "cudart", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("it was asked"))
    memory = DeviceMemory.__new__(DeviceMemory)
    memory.device = kernel.device
    memory.trim()
    assert CudaDriver(kernel.device).unregister(1 << 20) == 0


def test_a_command_leaves_a_device_that_hangs(kernel, monkeypatch, capsys) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(entry, "leave_at_once", lambda: None)

    def run() -> int:
        with pytest.raises(DeviceHungError):
            come(kernel)
        return 1

    monkeypatch.setattr(main, "main", run)
    assert entry.main() == 1
    assert left == [1]
    monkeypatch.setitem(waiting._PATIENCE, kernel.device, Patience(0.1))
    monkeypatch.setattr(main, "main", lambda: 7)
    assert entry.main() == 7
    assert left == [1]
