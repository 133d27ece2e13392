"""Host memory: exact sizes, reused blocks, and registration that never outlives its pages."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from fake_driver import FakeDriver

from triforce_offload.errors import DoesNotFitError
from triforce_offload.memory import host
from triforce_offload.memory.host import HostBlocks, HostMemory
from triforce_offload.memory.numa import node_cpus, parse_cpus
from triforce_offload.memory.touch import touch


def test_memory_is_registered_as_long_as_anything_views_it() -> None:
    driver = FakeDriver()
    memory = HostMemory(driver)
    arena = memory.arena(8192)
    assert arena.pinned
    assert memory.is_direct(arena.bytes[100:200])
    assert list(driver.registered.values()) == [8192]
    view = arena.bytes[100:200].view(torch.int32)
    arena.close()
    gc.collect()
    assert driver.registered, "a view is still there"
    view.fill_(7)
    del view
    gc.collect()
    assert driver.registered == {}
    assert memory.pinned_bytes == 0


def test_memory_that_was_forgotten_is_unregistered() -> None:
    driver = FakeDriver()
    memory = HostMemory(driver)
    arena = memory.arena(4096)
    del arena
    gc.collect()
    assert driver.registered == {}


def test_memory_is_registered_in_pieces_all_or_none(monkeypatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 1 << 16)
    driver = FakeDriver(most=5 << 16)
    memory = HostMemory(driver)
    arena = memory.arena(3 * (1 << 16) + 100)
    assert sorted(driver.registered.values()) == [100, *[1 << 16] * 3]
    with pytest.warns(RuntimeWarning, match="would not pin"):
        second = memory.arena(2 << 16)
    assert not second.pinned
    assert len(driver.registered) == 4, "the piece that had been pinned is let go"
    assert arena.pinned


def test_a_cap_is_used_up_and_said_once_with_its_sizes(recwarn) -> None:
    """F4: what the driver takes is pinned, what it refuses stays pageable and usable."""
    driver = FakeDriver(most=4 << 20)
    memory = HostMemory(driver)
    arenas = [memory.arena(1 << 20) for _ in range(7)]
    assert [arena.pinned for arena in arenas] == [True] * 4 + [False] * 3
    assert [memory.is_direct(arena.bytes) for arena in arenas] == [True] * 4 + [False] * 3
    assert len(driver.asked) == 5, "a driver that has refused is not asked again"
    (warning,) = recwarn
    assert "pinned 4.00 MiB" in str(warning.message)
    assert "1.00 MiB more (error 2)" in str(warning.message)
    assert (memory.pinned_bytes, memory.pageable_bytes) == (4 << 20, 3 << 20)
    arenas[6].bytes.fill_(3)


@pytest.mark.parametrize("kth", [1, 2, 3])
def test_the_nth_registration_fails(kth: int) -> None:
    driver = FakeDriver()
    register, driver.register = driver.register, lambda *where: register(*where)
    memory = HostMemory(driver)
    for _ in range(kth - 1):
        assert memory.arena(4096, pin=True).pinned
    driver.register = lambda *_: 712
    with pytest.warns(RuntimeWarning, match="error 712"):
        assert not memory.arena(4096).pinned


def test_without_pinning_only_what_asks_for_it_is_registered(recwarn) -> None:
    driver = FakeDriver()
    memory = HostMemory(driver, pin=False)
    pageable, ring = memory.arena(4096), memory.arena(4096, pin=True)
    assert not pageable.pinned
    assert not memory.is_direct(pageable.bytes)
    assert memory.is_direct(ring.bytes)
    assert not recwarn.list


def test_without_a_driver_all_memory_is_direct() -> None:
    memory = HostMemory()
    assert memory.is_direct(memory.arena(100).bytes)
    assert memory.is_direct(torch.empty(5))


def test_more_than_there_is_is_refused_before_it_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: 1000)
    with pytest.raises(DoesNotFitError, match="host memory"):
        HostMemory().arena(1001)
    blocks = HostBlocks(100, HostMemory())
    with pytest.raises(DoesNotFitError, match="KV of this request"):
        blocks.reserve(11)
    assert blocks.nbytes == 0


def test_blocks_are_made_as_they_are_taken_in_pieces_and_used_again(monkeypatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 1000)
    blocks = HostBlocks(256, HostMemory())
    blocks.reserve(7)
    assert blocks.nbytes == 0
    taken = []
    for number in range(7):
        taken.append(blocks.take())
        assert blocks.nbytes == min(7, 3 * (number // 3 + 1)) * 256
    assert len({block.data_ptr() for block in taken}) == 7
    for number, block in enumerate(taken):
        block.fill_(number)
    assert [block[255].item() for block in taken] == list(range(7))
    for block in taken:
        blocks.give_back(block)
    blocks.reserve(7)
    for _ in range(7):
        blocks.take()
    assert blocks.nbytes == 7 * 256
    blocks.close()
    assert blocks.nbytes == 0


def test_no_block_crosses_the_edge_of_a_piece(monkeypatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 1 << 16)
    driver = FakeDriver()
    small, large = (HostBlocks(size, HostMemory(driver)) for size in (40_000, 3 << 16))
    small.reserve(5)
    large.reserve(2)
    blocks = [small.take() for _ in range(5)]
    for block in blocks:
        start = block.data_ptr()
        assert any(
            at <= start and start + block.numel() <= at + size
            for at, size in driver.registered.items()
        )
    # One that is larger than a piece begins where a piece begins.
    assert large.take().data_ptr() in driver.registered


def test_copies_are_cut_where_pieces_end(monkeypatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 1 << 16)
    memory = HostMemory(FakeDriver())
    with memory.arena(5 << 15) as arena, memory.arena(1 << 10, pin=False) as pageable:
        copies = {
            (0, 5 << 15): [1 << 16, 1 << 16, 1 << 15],
            (1 << 15, 1 << 17): [1 << 15, 1 << 16],
            (1 << 16, 3 << 15): [1 << 15],
            (65_535, 65_537): [1, 1],
            (3, 3): [],
        }
        for (begin, end), sizes in copies.items():
            assert memory.copies(arena.bytes[begin:end]) == sizes
        assert memory.copies(pageable.bytes[5:]) == [1019]


def test_first_touch_backs_every_page() -> None:
    arena = HostMemory(FakeDriver(), cpus=tuple(os.sched_getaffinity(0))).arena(130 << 20)
    address, size = arena.bytes.data_ptr(), arena.bytes.numel()
    assert resident_bytes(address, size) == size
    affinity = os.sched_getaffinity(0)
    touch(address, 0)
    touch(address, 4096, cpus=[min(affinity)])
    assert os.sched_getaffinity(0) == affinity, "only the threads that touch are moved"
    assert int(arena.bytes[:: 1 << 20].sum()) == 0


def resident_bytes(address: int, size: int) -> int:
    """How much of a mapping has pages, as the system tells."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start < address + size and address < end
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return min(total, size)


def test_processors_near_a_gpu(tmp_path) -> None:
    assert parse_cpus("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpus("\n") == ()
    device = tmp_path / "bus/pci/devices/0000:41:00.0"
    node = tmp_path / "devices/system/node/node1"
    for directory in (device, node):
        directory.mkdir(parents=True)
    (node / "cpulist").write_text("4-5\n")
    (device / "numa_node").write_text("1\n")
    assert node_cpus("0000:41:00.0", tmp_path) == (4, 5)
    (device / "numa_node").write_text("-1\n")
    assert node_cpus("0000:41:00.0", tmp_path) == ()
    assert node_cpus("0000:42:00.0", tmp_path) == ()
