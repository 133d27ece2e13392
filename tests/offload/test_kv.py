"""The KV store: one owner of the length, and the same contents wherever blocks live."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from kv_stores import MAX_PASS, SHAPE, SPLIT, LateLink, kv_of, make_store, start

from triforce_offload.conveyor import Conveyor
from triforce_offload.errors import DoesNotFitError, LinkError
from triforce_offload.kv.evictions import StagingSlots
from triforce_offload.kv.store import KVStore
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostBlocks, HostMemory
from triforce_offload.schedule import KV


def put(store: KVStore, tokens: Sequence[int]) -> None:
    """Puts the rows of a pass behind the tail of every layer, as `PassCache.attend` does."""
    end = store.tail_length + len(tokens)
    for layer in range(SHAPE.layers):
        parts = kv_of(tokens, layer, store.shape)
        for room, part in zip(store.room(layer, len(tokens)), parts, strict=True):
            room[:, store.tail_length : end] = part


def fill(store: KVStore, tokens: Sequence[int], so_far: Sequence[int] = ()) -> None:
    """Stores a text that begins with what is kept; `so_far`: in parts that end there."""
    for layer in range(SHAPE.layers):
        for end in so_far:
            # What is not there yet is never read.
            part = kv_of(tokens, layer, store.shape)
            part[:, :, end:] = float("nan")
            store.fill(layer, part, end, last=False)
        store.fill(layer, kv_of(tokens, layer, store.shape), len(tokens), last=True)
    store.commit_fill(len(tokens))


def contents(store: KVStore, conveyor: Conveyor, rows: int = 0) -> list[torch.Tensor]:
    """Each layer's KV as a pass of so many rows would see it, which settles what it brings."""
    start(store, conveyor)
    layers = []
    for layer in range(SHAPE.layers):
        parts = []
        for index, location in enumerate(store.locations(layer)):
            with conveyor.bring((KV, layer, index), location) as block:
                parts.append(store.read(location, block).clone())
                store.settle(layer, index, block)
        layers.append(torch.cat([*parts, store.tail(layer, rows)], 2))
    return layers


def check(store: KVStore, conveyor: Conveyor, tokens: Sequence[int], rows: int = 0) -> None:
    for layer, seen in enumerate(contents(store, conveyor, rows)):
        assert torch.equal(seen, kv_of(tokens, layer, store.shape))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("resident", [(0, 0), (2, 1), (9, 9)])
@pytest.mark.parametrize("staging", [1, 2])
@pytest.mark.parametrize("shape", [SHAPE, SPLIT], ids=["dense", "split"])
def test_random_passes_leave_exactly_what_was_kept(resident, staging, shape) -> None:
    """Passes of any length, any path of them kept, text appended and rolled back at any length,
    memory lent and taken back, across many block borders; split, some without room for them.
    """
    for seed in range(15):
        choose = random.Random(seed)
        slots = choose.randint(1, 3)
        store, conveyor = make_store(resident, staging=staging, slots=slots, shape=shape)
        kept: list[int] = []
        addresses_at: dict[int, torch.Tensor] = {}
        fresh = 100

        def anew(count: int) -> list[int]:
            nonlocal fresh
            fresh += count
            return list(range(fresh - count, fresh))

        for _ in range(40):
            what = choose.random()
            if what < 0.6:
                drafted = anew(choose.randint(1, MAX_PASS))
                put(store, drafted)
                check(store, conveyor, kept + drafted, len(drafted))
                path = sorted(choose.sample(range(len(drafted)), choose.randint(0, len(drafted))))
                if choose.random() < 0.5:
                    path = list(range(len(path)))
                store.keep(path)
                kept += [drafted[row] for row in path]
            elif what < 0.75:
                store.release_reclaimed()
                kept += anew(choose.randint(1, 11))
                borders = range(store.length + 1, len(kept), choose.randint(1, 5))
                fill(store, kept, borders)
            elif what < 0.9:
                del kept[choose.randint(0, len(kept)) :]
                store.roll_back(len(kept))
            elif what < 0.95:
                store.release_reclaimed()
                store.use_reclaimed((choose.randint(0, 3), choose.randint(0, 3)))
            else:
                store.release_reclaimed()
            # Who has read the addresses reads them again only when the version is another.
            addresses = store.addresses()
            assert torch.equal(addresses_at.setdefault(store.version, addresses), addresses)
            assert store.length == len(kept)
            assert 0 <= store.tail_length < SHAPE.block_tokens
            check(store, conveyor, kept)
            addresses_at.setdefault(store.version, store.addresses())
        store.close()


def test_a_reading_that_ends_between_layers_leaves_what_was_kept() -> None:
    for seed in range(30):
        choose = random.Random(seed)
        store, conveyor = make_store((choose.randint(0, 2), 0), staging=choose.randint(1, 2))
        kept = list(range(choose.randint(1, 13)))
        fill(store, kept)
        longer = kept + list(range(50, 50 + choose.randint(1, 12)))
        for layer in range(choose.randint(0, 1) + 1):
            so_far = choose.randint(len(kept), len(longer))
            last = so_far == len(longer) or choose.random() < 0.5
            store.fill(layer, kv_of(longer, layer), len(longer) if last else so_far, last=last)
        store.roll_back(len(kept))
        check(store, conveyor, kept)
        fill(store, longer)
        check(store, conveyor, longer)


class NoWaitForStaging(LateLink):
    """A staging slot is taken again while its block is still on its way out."""

    def wait(self, event) -> None:
        if not (isinstance(event, self.Copy) and event.parts and event.parts[0].dtype):
            return
        if event.parts[0].data_ptr() not in self.hosts:
            super().wait(event)

    def to_host(self, host, device, after, what=None):
        self.hosts = getattr(self, "hosts", set()) | {host.data_ptr()}
        return super().to_host(host, device, after, what)


class NoWaitForWritten(LateLink):
    """A block is brought back before it has arrived on the host."""

    def to_device(self, device, host, after, what=None):
        return super().to_device(device, host, ())


@pytest.mark.parametrize("mutant", [NoWaitForStaging, NoWaitForWritten])
def test_removing_a_wait_of_the_way_out_is_caught(mutant) -> None:
    store, conveyor = make_store(link=mutant())
    tokens = list(range(14))
    fill(store, tokens)
    seen = contents(store, conveyor)
    assert not all(torch.equal(s, kv_of(tokens, layer)) for layer, s in enumerate(seen))


def test_what_cannot_be_is_refused_before_any_change() -> None:
    store, _ = make_store()
    put(store, [1, 2, 3])
    with pytest.raises(RuntimeError, match=r"keep of rows \[0, 6\], a pass has 6"):
        store.keep([0, 6])
    with pytest.raises(RuntimeError, match="a pass of 7 tokens, the tail takes 6"):
        store.room(0, 7)
    store.keep(range(3))
    assert store.length == 3
    with pytest.raises(RuntimeError, match="it holds more"):
        store.fill(0, kv_of([1], 0), 1, last=True)
    with pytest.raises(RuntimeError, match="roll back to 4 tokens of 3"):
        store.roll_back(4)
    with pytest.raises(RuntimeError, match="commit_fill before every layer was filled"):
        store.commit_fill(9)


def new_store(memory: DeviceMemory, blocks: HostBlocks, link) -> KVStore:
    staging = [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)]
    return KVStore(SHAPE, MAX_PASS, (1, 0), memory, blocks, link, StagingSlots(staging, link))


class Broken(LateLink):
    def synchronize(self) -> None:
        raise LinkError("planted")


@pytest.mark.parametrize("link", [LateLink, Broken])
def test_a_store_gives_everything_back_even_if_the_link_has_failed(link) -> None:
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    taken = set()
    for _ in range(3):
        store = new_store(memory, blocks, link())
        fill(store, range(20))
        store.use_reclaimed((1, 2))
        store.close()
        taken.add(blocks.nbytes)
        assert memory.available_bytes == memory.limit_bytes
    assert len(taken) == 1, "host blocks of texts that are gone are used again"


def test_what_is_rolled_back_is_used_again() -> None:
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    store = new_store(memory, blocks, LateLink())
    fill(store, range(20))
    taken, available = blocks.nbytes, memory.available_bytes
    for tokens in (3, 0, 11):
        store.roll_back(min(tokens, store.length))
        fill(store, range(20))
        assert (blocks.nbytes, memory.available_bytes) == (taken, available)


NO_STAGING = StagingSlots([], LateLink())


def test_texts_that_share_staging_slots_wait_for_each_other() -> None:
    """The link carries nothing before it is asked to wait: a block that was overwritten shows."""
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks, link = HostBlocks(SHAPE.block_bytes, HostMemory()), LateLink()
    slots = StagingSlots([torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)], link)
    made = (SHAPE, MAX_PASS, (0, 0), memory, blocks, link, slots)
    stores = [KVStore(*made), KVStore(*made)]
    texts = [range(20), range(40, 60)]
    for store, text in zip(stores, texts, strict=True):
        fill(store, text)
    link.synchronize()
    for store, text in zip(stores, texts, strict=True):
        for layer in range(SHAPE.layers):
            for index, location in enumerate(store.locations(layer)):
                first = index * SHAPE.block_tokens
                own = kv_of(text[first : first + SHAPE.block_tokens], layer)
                kept = location.memory.view(SHAPE.dtype).view(own.shape)
                assert torch.equal(kept, own)
    for store in stores:
        store.close()


def test_a_store_over_the_budget_is_refused() -> None:
    memory = DeviceMemory(torch.device("cpu"), 100)
    with pytest.raises(DoesNotFitError, match="KV tail"):
        KVStore(SHAPE, MAX_PASS, (0, 0), memory, None, LateLink(), NO_STAGING)
    assert memory.available_bytes == 100
    memory = DeviceMemory(torch.device("cpu"), SHAPE.tail_bytes(MAX_PASS) + 10)
    with pytest.raises(DoesNotFitError, match="resident KV"):
        KVStore(SHAPE, MAX_PASS, (1, 0), memory, None, LateLink(), NO_STAGING)
    assert memory.available_bytes == memory.limit_bytes
