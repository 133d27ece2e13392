"""Host memory: exact sizes, reused blocks, and registration that never outlives its pages."""

from __future__ import annotations

import gc

import pytest
import torch

from offload import host
from offload.errors import DoesNotFitError
from offload.host import HostArena, HostBlocks


class FakeDriver:
    """Stands for torch.cuda.cudart(): keeps what is registered, refuses after `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if sum(self.registered.values()) + size > self.most:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(most=1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host, "_clear_cuda_error", lambda: None)
    return driver


def test_memory_is_registered_as_long_as_anything_views_it(driver: FakeDriver) -> None:
    arena = HostArena(8192, pin=True)
    assert arena.pinned
    assert arena.bytes.data_ptr() % 4096 == 0
    assert list(driver.registered.values()) == [8192]
    view = arena.bytes[100:200].view(torch.int32)
    arena.close()
    gc.collect()
    assert driver.registered, "a view is still there"
    view.fill_(7)
    del view
    gc.collect()
    assert driver.registered == {}


def test_memory_that_was_forgotten_is_unregistered(driver: FakeDriver) -> None:
    arena = HostArena(4096, pin=True)
    del arena
    gc.collect()
    assert driver.registered == {}


def test_a_driver_that_refuses_leaves_memory_pageable_with_a_warning(driver: FakeDriver) -> None:
    with pytest.warns(RuntimeWarning, match=r"would not pin 2\.00 MiB .* stays pageable"):
        arena = HostArena(2 << 20, pin=True)
    assert not arena.pinned
    arena.bytes.fill_(3)
    assert driver.registered == {}


def test_more_than_there_is_is_refused_before_it_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: 1000)
    with pytest.raises(DoesNotFitError, match="host memory"):
        HostArena(1001, pin=False)


def test_blocks_are_provided_exactly_in_pieces_and_used_again(monkeypatch) -> None:
    monkeypatch.setattr(host, "_ARENA_BYTES", 1000)
    blocks = HostBlocks(256, pin=False)
    blocks.provide(7)
    assert blocks.nbytes == 7 * 256
    taken = [blocks.take() for _ in range(7)]
    assert len({block.data_ptr() for block in taken}) == 7
    for number, block in enumerate(taken):
        block.fill_(number)
    assert [block[255].item() for block in taken] == list(range(7))
    for block in taken:
        blocks.give_back(block)
    blocks.provide(7)
    assert blocks.nbytes == 7 * 256
    blocks.close()
    assert blocks.nbytes == 0
