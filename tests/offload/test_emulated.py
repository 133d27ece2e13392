"""The emulated link: NaN until copied, paced by a virtual clock, failures typed."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.emulated import EmulatedLink


@pytest.fixture
def link():
    link = EmulatedLink()
    yield link
    link.close()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1)


class Gate:
    """An event that opens when told, as one of compute that is not there yet."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.seconds = 0.0
        self.error = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_part_of_a_slot_reads_nan_until_the_copy_is_complete(link, dtype) -> None:
    slot = torch.zeros(4096 // dtype.itemsize, dtype=dtype)
    source = torch.ones_like(slot)
    gate = Gate()
    ready = link.to_device(flat(slot), flat(source), (gate,))
    parts = slot.view(-1, 256 // dtype.itemsize)
    assert parts.isnan().any(-1).all()
    gate.done.set()
    link.wait(ready)
    assert torch.equal(slot, source)


def test_pacing_follows_the_bandwidth_and_not_the_threads() -> None:
    link = EmulatedLink(bandwidth=1e9)
    source = torch.zeros(100_000, dtype=torch.uint8)
    events = [link.to_device(torch.empty_like(source), source, ()) for _ in range(5)]
    for event in events:
        link.wait(event)
    gaps = [b.seconds - a.seconds for a, b in itertools.pairwise(events)]
    rounding = 1e-9  # of the clock: seconds since boot in float64
    assert all(gap >= 1e-4 - rounding for gap in gaps)
    counters = link.counters()
    assert counters.bytes_to_device == 500_000
    assert counters.busy_seconds == pytest.approx(5e-4)
    link.close()


def test_directions_are_independent(link) -> None:
    gate = Gate()
    source = torch.arange(64, dtype=torch.uint8)
    stuck = link.to_device(torch.empty_like(source), source, (gate,))
    target = torch.empty_like(source)
    link.wait(link.to_host(target, source, ()))
    assert torch.equal(target, source)
    gate.done.set()
    link.wait(stuck)
    assert link.counters().bytes_to_host == 64


def test_a_failed_copy_is_a_link_error_and_spreads_to_what_needs_it(link) -> None:
    gate = Gate()
    gate.error = OSError("planted")
    source = torch.zeros(8, dtype=torch.uint8)
    first = link.to_host(torch.empty_like(source), source, (gate,))
    second = link.to_device(torch.empty_like(source), source, (first,))
    gate.done.set()
    for event in (first, second):
        with pytest.raises(LinkError, match="planted"):
            link.wait(event)
    with pytest.raises(LinkError, match="planted"):
        link.synchronize()
    link.synchronize()
    link.wait(link.to_device(torch.empty_like(source), source, ()))


def test_a_stalled_copy_ends_in_an_error() -> None:
    link = EmulatedLink(timeout_seconds=0.05)
    gate = Gate()
    source = torch.zeros(8, dtype=torch.uint8)
    stalled = link.to_device(torch.empty_like(source), source, (gate,))
    with pytest.raises(LinkError, match=r"did not finish within 0\.05 seconds"):
        link.wait(stalled)
    # Whatever else is not done fails at once: the link counts as broken.
    also = link.to_device(torch.empty_like(source), source, ())
    link._timeout = 3600
    with pytest.raises(LinkError):
        link.wait(also)
    gate.done.set()
    link.close()
