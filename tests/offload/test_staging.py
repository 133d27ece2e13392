"""Pageable memory behind a pinned ring: the same bytes, in order, and the same texts (F4)."""

from __future__ import annotations

import pytest
import torch
from fake_driver import FakeDriver
from helpers import BLOCK, PLACEMENTS, placed, random_ids

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import LinkError
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.link.staging import StagedLink
from triforce_offload.memory.host import HostMemory

RING = 64


@pytest.fixture(params=["pinned", "pageable", "half"])
def memory(request) -> HostMemory:
    most = {"pinned": 1 << 40, "pageable": 1 << 12, "half": 1 << 13}[request.param]
    return HostMemory(FakeDriver(most))


@pytest.mark.filterwarnings("ignore:the driver pinned")
@pytest.mark.parametrize("size", [1, RING - 1, RING, 5 * RING + 7])
def test_bytes_go_out_and_come_back(memory: HostMemory, size: int) -> None:
    link = StagedLink(EmulatedLink(), memory, RING)
    generator = torch.Generator().manual_seed(size)
    try:
        for _ in range(20):
            arenas = [memory.arena(size) for _ in range(3)]
            sources = [
                torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for _ in arenas
            ]
            written = [
                link.to_host(arena.bytes, source, (link.record(),))
                for arena, source in zip(arenas, sources, strict=True)
            ]
            slots = [torch.empty(size, dtype=torch.uint8) for _ in arenas]
            ready = [
                link.to_device(slot, arena.bytes, (event,))
                for slot, arena, event in zip(slots, arenas, written, strict=True)
            ]
            for slot, event, source in zip(slots, ready, sources, strict=True):
                link.wait(event)
                assert torch.equal(slot, source)
                began, ended = link.span(event)
                assert began <= ended
            link.synchronize()
            for arena in arenas:
                arena.close()
        assert link.counters().bytes_to_device == link.counters().bytes_to_host == 60 * size
    finally:
        link.close()


@pytest.mark.filterwarnings("ignore:the driver pinned")
def test_a_failed_part_fails_the_copy_and_what_needs_it() -> None:
    class Failing(EmulatedLink):
        def to_device(self, device, host, after, what=None):
            raise LinkError("a transfer failed: planted")

    memory = HostMemory(FakeDriver(1))
    link = StagedLink(Failing(), memory, RING)
    with memory.arena(3 * RING) as arena:
        target = torch.empty(3 * RING, dtype=torch.uint8)
        event = link.to_device(target, arena.bytes, ())
        with pytest.raises(LinkError, match="planted"):
            link.wait(event)
        with pytest.raises(LinkError, match="planted"):
            link.to_host(arena.bytes, target, (event,)) and link.synchronize()
        link.synchronize()  # said once
    link.close()


@pytest.mark.first
@pytest.mark.parametrize("most", [0, 10_000, 40_000])
@pytest.mark.parametrize("placement", ["kv", "both-one-slot"])
def test_texts_are_the_same_whatever_could_be_pinned(
    tiny, monkeypatch, recwarn, most: int, placement: str
) -> None:
    """F4: registering fails from the first byte on, or from the n-th; one warning says so."""
    path, _ = tiny("llama")
    options = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "budget": 32}
    options = placed(placement, options | {"accept": "coupled"})
    params = SamplingParams(40, temperature=0.8, seed=1)
    with Engine.from_pretrained(path, **options) as engine:
        expected = engine.generate(random_ids(75), params).token_ids
    memory = HostMemory(FakeDriver(most))
    monkeypatch.setattr(
        "triforce_core.loading.load.open_link",
        lambda *_: (StagedLink(EmulatedLink(), memory, 1 << 10), memory),
    )
    with Engine.from_pretrained(path, **options) as engine:
        result = engine.generate(random_ids(75), params)
        again = engine.generate(random_ids(75), params)
    assert result.token_ids == again.token_ids == expected
    assert len([w for w in recwarn.list if "would not pin" in str(w.message)]) == 1
    assert result.stats["memory"]["host_pageable_bytes"] > 0


def test_without_pinning_there_is_no_warning_and_the_same_text(tiny, monkeypatch, recwarn) -> None:
    path, _ = tiny("llama")
    options = {"device": "cpu", "max_context": 200, "placement": PLACEMENTS["kv"]}
    params = SamplingParams(20, temperature=0)
    with Engine.from_pretrained(path, block_tokens=BLOCK, **options) as engine:
        expected = engine.generate(random_ids(75), params).token_ids
    memory = HostMemory(FakeDriver(), pin=False)
    monkeypatch.setattr(
        "triforce_core.loading.load.open_link",
        lambda *_: (StagedLink(EmulatedLink(), memory, 1 << 10), memory),
    )
    with Engine.from_pretrained(path, block_tokens=BLOCK, **options) as engine:
        assert engine.generate(random_ids(75), params).token_ids == expected
    assert not [w for w in recwarn.list if "pin" in str(w.message)]
